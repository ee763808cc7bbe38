"""The free choices of prefill kernels that take x in 8 bits and add up in a given order: `EightBitInOrderSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.ordered import CUTS, Ordered


@dataclass(frozen=True)
class EightBitInOrderSchedule(Ordered, EightBitPrefillSchedule):
    """The free choices of the prefill kernel of invariant matmuls for activations of 8 bits: those of
    `EightBitPrefillSchedule` that leave the order of sums alone, and the order.

    num_stages    4 to 8: a round has as many panels, and a chain whole rounds
    split_k, last_split_k  1
    stream_k      "off"
    order_parts   1
    order_chains, order_step_k  the cut of k: fields of `SumOrder`
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**EightBitPrefillSchedule.allowed, **CUTS}

    tokens: int = 96
