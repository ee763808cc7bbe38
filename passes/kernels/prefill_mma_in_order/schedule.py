"""The free choices of prefill kernels with mma.sync that add up in a given order: `PrefillMmaInOrderSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.persistent.ordered import CUTS, Ordered
from lowbit.passes.kernels.prefill_mma.schedule import PartsOfTokens, PrefillMmaSchedule


@dataclass(frozen=True)
class PrefillMmaInOrderSchedule(Ordered, PartsOfTokens):
    """The free choices of the prefill kernel of invariant matmuls with mma.sync: those of `PrefillMmaSchedule`, and the
    order.

    panel_k       columns of x that are copied and multiplied between two barriers, which hold whole products: 64, 128
                  or 256
    order_parts, order_chains, order_step_k  the cut of k: fields of `SumOrder`
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CUTS,
        **PrefillMmaSchedule.allowed,
        "panel_k": (64, 128, 256),
        "order_parts": tuple(range(1, 9)),
    }

    tokens: int = 64
    panel_k: int = 128
    num_stages: int = 2

    @property
    def most_columns(self) -> int:
        return super().most_columns // self.row_blocks  # fragments of x take registers beside those of weights
