"""The free choices of prefill kernels that add up in a given order: `PrefillInOrderSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.persistent.ordered import CUTS, Ordered
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule


@dataclass(frozen=True)
class PrefillInOrderSchedule(Ordered, PrefillSchedule):
    """The free choices of the prefill kernel of invariant matmuls: those of `PrefillSchedule` that leave the order of
    sums alone, the order, and how products are added to sums.

    num_stages    4 to 8: a round has as many panels, and a chain whole rounds
    split_k, last_split_k  1
    stream_k      "off"
    order_parts   1
    order_chains, order_step_k  the cut of k: fields of `SumOrder`
    parts         equal parts of the tile's tokens that are multiplied one after the other, of 8 tokens or a multiple
                  each: 1, 2, 3 or 4
    banks         sets of registers for the products of a part, where groups have scales: with 2, a product is under way
                  while the one before it is added to the sums; 1 or 2
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PrefillSchedule.allowed,
        **CUTS,
        "parts": (1, 2, 3, 4),
        "banks": (1, 2),
    }

    tokens: int = 96
    panel_k: int = 128
    parts: int = 2
    banks: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens % (8 * self.parts):
            raise SpecError(f"schedule: parts={self.parts} must cut tokens={self.tokens} into multiples of 8")

    @property
    def part_tokens(self) -> int:
        return self.tokens // self.parts

    def slice_sizes(self, last_split_k: int) -> tuple[int, ...]:
        """Returns the values of `last_tokens` besides 0: no more than the tokens of a product."""
        return tuple(n for n in super().slice_sizes(last_split_k) if n <= self.part_tokens)
