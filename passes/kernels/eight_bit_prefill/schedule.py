"""The free choices of the prefill kernel for activations of 8 bits: `EightBitPrefillSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule


@dataclass(frozen=True)
class EightBitPrefillSchedule(PrefillSchedule):
    """The free choices of the prefill kernel for activations of 8 bits: those of `PrefillSchedule`, with panels of 128
    or 256 columns, tiles and shares of 16 tokens or a multiple, which products of integers need, and

    parts     equal parts of the tile's tokens that are multiplied one after the other, of 16 tokens or a multiple each:
              1, 2, 3, 4, 6 or 8
    banks     sets of registers for products beside those for the sums: with 2, a product is under way while the one
              before it is added to the sums; 1 or 2
    """

    least_share: ClassVar[int] = 16
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PrefillSchedule.allowed,
        "tokens": tuple(range(16, 257, 16)),
        "panel_k": (128, 256),
        "parts": (1, 2, 3, 4, 6, 8),
        "banks": (1, 2),
    }

    panel_k: int = 128
    parts: int = 1
    banks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens % (16 * self.parts):
            raise SpecError(f"schedule: parts={self.parts} must cut tokens={self.tokens} into multiples of 16")

    @property
    def part_tokens(self) -> int:
        return self.tokens // self.parts

    def slice_sizes(self, last_split_k: int) -> tuple[int, ...]:
        """Returns the values of `last_tokens` besides 0: no more than the tokens of a product."""
        return tuple(n for n in super().slice_sizes(last_split_k) if n <= self.tokens // self.parts)

    @property
    def _whole(self) -> str:
        return f"{super()._whole} in parts={self.parts}"
