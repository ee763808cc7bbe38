"""What the free choices of the kernel for experts with mma.sync are: `ExpertsMmaSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule


@dataclass(frozen=True)
class ExpertsMmaSchedule(PrefillMmaSchedule):
    """The free choices of the kernel for experts with mma.sync: those of `PrefillMmaSchedule`, with tiles of few slots.

    tokens      slots of a tile, which are those of one expert: 16, 32, 64, 96, 128, 192 or 256. Who makes the table of
                tiles must know it
    row_blocks  as there; 1 with 16 tokens, which no two warps share
    blocks_per_sm  blocks that a multiprocessor holds, 1 or 2: with two, one loads while the other waits
    """

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **PrefillMmaSchedule.allowed,
        "tokens": (16, 32, 64, 96, 128, 192, 256),
        "blocks_per_sm": (1, 2),
    }

    tokens: int = 32
    panel_k: int = 128
    row_blocks: int = 1
    blocks_per_sm: int = 1

    @property
    def resident(self) -> int:
        return self.blocks_per_sm
