"""What the free choices of the kernel for few slots of each expert are: `ExpertsDecodeSchedule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.decode.schedule import Schedule

_FIXED: Mapping[str, Any] = {
    "preload_weights": False,
    "min_blocks": 0,
    "spread_k": False,
    "outliers_by_step": False,
}
TOKENS = tuple(range(8, 97, 8))
"""Slots of a tile."""


@dataclass(frozen=True)
class ExpertsDecodeSchedule(Schedule):
    """The free choices of the kernel for few slots of each expert: those of `Schedule` that concern one block alone.

    tokens             slots of a tile, which are those of one expert: a multiple of 8 up to 96. Who makes the table of
                       them must know it
    max_blocks_per_sm  how many blocks a multiprocessor holds, each of which takes turns at the tiles; a thread takes no
                       more registers than that leaves
    split_k, cluster   the same: blocks that share k add up through distributed shared memory. A divisor or a multiple
                       of max_blocks_per_sm. Choices that are not about the steps of a block are as by default
    """

    token_tiles: ClassVar[tuple[int, ...]] = TOKENS
    most_overlapping: ClassVar[int] = TOKENS[-1]
    """Slots of a tile, up to which a thread of a candidate has registers for products of two groups."""

    max_blocks_per_sm: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in _FIXED.items():
            if getattr(self, name) != value:
                raise SpecError(f"schedule: experts_decode needs {name}={value}; got {name}={getattr(self, name)}")
        if self.refill == "per_warp":
            raise SpecError("schedule: experts_decode needs another refill than 'per_warp', which counts in one tile")
        if self.split_k != self.cluster:
            given = f"split_k={self.split_k} and cluster={self.cluster}"
            raise SpecError(f"schedule: experts_decode adds up in clusters, so {given} must be equal")
        if self.max_blocks_per_sm % self.cluster and self.cluster % max(1, self.max_blocks_per_sm):
            given = f"cluster={self.cluster} and max_blocks_per_sm={self.max_blocks_per_sm}"
            raise SpecError(f"schedule: experts_decode needs one of {given} to be a multiple of the other")
        if not self.max_blocks_per_sm:
            raise SpecError("schedule: experts_decode needs max_blocks_per_sm of at least 1, got 0")
