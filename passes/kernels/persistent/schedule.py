"""The free choices of persistent kernels: `PrefillSchedule`, which are those of the prefill kernel. Schedules of the
other families have more, or allow other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.sum_order import SumOrder

WARPS = 8  # of a block: two warpgroups, which share x
CLUSTERS = (1, 2, 4)  # blocks that split k as a cluster: clusters of three do not all find room
_SWIZZLED = 8  # tokens after which the pattern of x in shared memory begins again: boxes have multiples
ROWS_OF_TILE = 16 * WARPS
GROUP_TILES = 8  # token tiles that are computed for some rows before other rows come: 4 and 16 are as fast, or slower


@dataclass(frozen=True)
class PrefillSchedule(KernelSchedule):
    """The free choices of the prefill kernel. Every choice serves any number of tokens, and gives the same numbers up
    to f32 rounding.

    tokens        tokens of a tile, whose 128 rows of the weight are those of a block: a multiple of 8 from 16 to 256
    panel_k       columns of x that are copied and multiplied at a time: 64, 128 or 256
    num_stages    panels of x in shared memory: 4, 6 or 8
    cluster       blocks that get the same x, of which each copies its part, a multiple of 8 tokens, to all: 1 or 2
    split_k       blocks of a cluster that have the same tile and a part of k each, and store equal shares of its
                  tokens, which are multiples of 8: 1, 2 or 4
    stream_k      which blocks share the rounds of the tiles that do not come out even: equally, wherever a share begins
                  and ends, so that blocks with parts of a tile add up their sums in device memory. "off": none; "all";
                  "even": as many as give every tile the same number of blocks, where there are more blocks than tiles
    last_tokens   tokens of the slices that tiles of an incomplete last wave are cut into, if all slices fit one wave: a
                  multiple of 16 that divides `tokens`; 0: no tiles are cut
    last_split_k  blocks that have the same slice and a part of k each, and store equal shares of its tokens, which are
                  multiples of 8: 1, or as many as a cluster has. With more than 1, a slice may have all `tokens`
    """

    least_share: ClassVar[int] = 8
    """Tokens of which a block's share is a multiple where k is split."""

    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tokens": tuple(range(16, 257, 8)),
        "panel_k": (64, 128, 256),
        "num_stages": (4, 6, 8),
        "cluster": (1, 2),
        "split_k": CLUSTERS,
        "stream_k": ("off", "even", "all"),
        "last_tokens": tuple(range(0, 257, 16)),
        "last_split_k": (1, 2),
    }

    tokens: int = 256
    panel_k: int = 64
    num_stages: int = 4
    cluster: int = 1
    split_k: int = 1
    stream_k: str = "off"
    last_tokens: int = 0
    last_split_k: int = 1

    def __post_init__(self) -> None:
        for name, allowed in self.allowed.items():
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                words = ", ".join(map(str, allowed))
                raise SpecError(f"schedule: {name}={value!r} must be one of {words} for {type(self).__name__}")
        if self.tokens % (_SWIZZLED * self.cluster):
            raise SpecError(f"schedule: cluster={self.cluster} must cut tokens={self.tokens} into multiples of 8")
        if self.tokens % (self.least_share * self.split_k):
            unit = f"multiples of {self.least_share}"
            raise SpecError(f"schedule: split_k={self.split_k} must cut tokens={self.tokens} into {unit}")
        if self.streams and self.split_k > 1:
            raise SpecError(f"schedule: stream_k={self.stream_k!r} needs split_k=1, got {self.split_k}")
        self._check_slices()

    def _check_slices(self) -> None:
        """Raises SpecError where slices do not fit the tile or the cluster."""
        if self.last_split_k not in (1, self.cluster) or (self.last_split_k > 1 and not self.last_tokens):
            given = f"cluster={self.cluster} and last_tokens={self.last_tokens}"
            raise SpecError(f"schedule: last_split_k={self.last_split_k} needs as many blocks and slices, got {given}")
        if self.last_tokens and self.last_tokens not in (sizes := self.slice_sizes(self.last_split_k)):
            words = ", ".join(map(str, (0, *sizes)))
            raise SpecError(f"schedule: last_tokens={self.last_tokens} must be one of {words} for {self._whole}")

    def slice_sizes(self, last_split_k: int) -> tuple[int, ...]:
        """Returns the values of `last_tokens` besides 0, the smallest first, if so many blocks split a slice's k. Tiles
        whose k is split have no slices: blocks have one tile each, or equal shares."""
        sizes = self.allowed["last_tokens"][1:] if self.split_k == 1 and not self.streams else ()
        most = self.tokens if last_split_k > 1 else self.tokens // 2
        return tuple(
            n for n in sizes if self.tokens % n == 0 and n <= most and n % (self.least_share * last_split_k) == 0
        )

    @property
    def _whole(self) -> str:
        """The name of what is cut into slices, for messages."""
        split, last = f" and split_k={self.split_k}", f" and last_split_k={self.last_split_k}"
        stream = f" and stream_k={self.stream_k!r}"
        parts = split * (self.split_k > 1), stream * self.streams, last * (self.last_split_k > 1)
        return f"tokens={self.tokens}" + "".join(parts)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return 1

    @property
    def warps(self) -> tuple[int, int]:
        """Warps along the rows of a tile, and along its tokens."""
        return WARPS, 1

    @property
    def warp_tokens(self) -> int:
        """Tokens of a warp."""
        return self.tokens // self.warps[1]

    @property
    def part_tokens(self) -> int:
        """Tokens of a product."""
        return self.tokens

    @property
    def streams(self) -> bool:
        """Whether blocks may have parts of a tile, wherever these begin and end."""
        return self.stream_k != "off"

    @property
    def order(self) -> SumOrder | None:
        """The order of sums that the kernel is to have, as far as it cuts k; None: one chain of all columns."""
        return None

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster * self.split_k


@dataclass(frozen=True)
class RowsOfSlots:
    """Where rows of x come from in a kernel that multiplies the slots of experts by wgmma (`ExpertsSchedule`)."""

    gather: bool = False


def takes_rows_in_order(schedule: KernelSchedule) -> bool:
    """Returns whether a kernel for several experts takes a row of x for each slot, and reads no list of rows."""
    return isinstance(schedule, RowsOfSlots) and not schedule.gather
