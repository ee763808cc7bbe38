"""What the free choices of the prefill kernel with mma.sync are: `PrefillMmaSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.persistent.schedule import WARPS, PrefillSchedule

_MOST_COLUMNS = 4  # of eight tokens that a warp multiplies before it adds the products to its sums


@dataclass(frozen=True)
class PrefillMmaSchedule(PrefillSchedule):
    """The free choices of the prefill kernel with mma.sync: those of `PrefillSchedule` without clusters, and how warps
    share a tile.

    tokens        tokens of a tile, whose 128 rows of the weight are those of a block: a multiple of 32 up to 256
    panel_k       columns of x that are copied and multiplied between two barriers: 64 or 128
    num_stages    panels of x in shared memory: 2 or 4
    cluster       1
    split_k       1
    stream_k      "off"
    last_tokens   0
    last_split_k  1
    row_blocks    blocks of 16 rows of a warp, 1 or 2; of the eight warps, so many share the tokens of a tile
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tokens": tuple(range(32, 257, 32)),
        "panel_k": (64, 128),
        "num_stages": (2, 4),
        "cluster": (1,),
        "split_k": (1,),
        "stream_k": ("off",),
        "last_tokens": (0,),
        "last_split_k": (1,),
        "row_blocks": (1, 2),
    }

    tokens: int = 128
    row_blocks: int = 2

    @property
    def warps(self) -> tuple[int, int]:
        return WARPS // self.row_blocks, self.row_blocks


@dataclass(frozen=True)
class PartsOfTokens(PrefillMmaSchedule):
    """The same for kernels that add products to sums in other registers: a tile's tokens are cut into parts, of which
    every warp has some. So products that are not added yet take few registers."""

    @property
    def most_columns(self) -> int:
        """Columns of eight tokens that a warp may have of a part."""
        return _MOST_COLUMNS

    @property
    def columns_of_part(self) -> int:
        """Columns of eight tokens that a warp has of a part."""
        columns = self.warp_tokens // 8
        return next(some for some in range(self.most_columns, 0, -1) if columns % some == 0)

    @property
    def part_tokens(self) -> int:
        """Tokens of a part, of all warps."""
        return 8 * self.columns_of_part * self.warps[1]
