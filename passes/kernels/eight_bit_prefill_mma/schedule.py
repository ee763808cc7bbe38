"""The free choices of the prefill kernel for activations of 8 bits with mma.sync: `EightBitPrefillMmaSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule

_MOST_COLUMNS = 4  # of eight tokens that a warp multiplies before it adds the products to its sums


@dataclass(frozen=True)
class EightBitPrefillMmaSchedule(PrefillMmaSchedule):
    """The free choices of the prefill kernel for activations of 8 bits with mma.sync: those of `PrefillMmaSchedule`,
    with panels of 128 or 256 columns.

    A tile's tokens are cut into parts, of which every warp has some: so products that are not added yet take few
    registers.
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {**PrefillMmaSchedule.allowed, "panel_k": (128, 256)}

    panel_k: int = 128

    @property
    def columns_of_part(self) -> int:
        """Columns of eight tokens that a warp has of a part."""
        columns = self.warp_tokens // 8
        return next(some for some in range(_MOST_COLUMNS, 0, -1) if columns % some == 0)

    @property
    def part_tokens(self) -> int:
        """Tokens of a part, of all warps."""
        return 8 * self.columns_of_part * self.warps[1]
