"""What the free choices of the prefill kernel with mma.sync are: `PrefillMmaSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.persistent.schedule import WARPS, PrefillSchedule


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
