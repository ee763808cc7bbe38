"""The free choices of prefill kernels with mma.sync that take x in 8 bits and add up in a given order:
`EightBitMmaInOrderSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.persistent.ordered import CUTS, Ordered


@dataclass(frozen=True)
class EightBitMmaInOrderSchedule(Ordered, EightBitPrefillMmaSchedule):
    """The free choices of the prefill kernel of invariant matmuls for activations of 8 bits with mma.sync: those of
    `EightBitPrefillMmaSchedule`, and the order.

    panel_k       columns of x that are copied and multiplied between two barriers, which hold whole products: 64, 128
                  or 256
    order_parts, order_chains, order_step_k  the cut of k: fields of `SumOrder`
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CUTS,
        **EightBitPrefillMmaSchedule.allowed,
        "panel_k": (64, 128, 256),
        "order_parts": tuple(range(1, 9)),
    }

    tokens: int = 64
    num_stages: int = 2
