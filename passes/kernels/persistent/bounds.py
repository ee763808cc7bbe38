"""Lower bounds of what the families with wgmma predict: candidates that can't win need not be made.

A bound knows the tokens, clusters and splits of a kind of schedules, but neither panels, stages nor cuts: it is the
time of those that would be best, whether they fit or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import PrefillCosts
from lowbit.passes.kernels.base import SURE
from lowbit.passes.kernels.persistent.cost_model import clusters, late, margin, sent, streamed
from lowbit.passes.kernels.persistent.schedule import CLUSTERS, WARPS, PrefillSchedule
from lowbit.passes.kernels.persistent.tiles import shares_of
from lowbit.passes.target import Target

_SMALLEST, _WIDEST, _SLICE = 32, 256, 16  # tokens of tiles and, at least, of slices


@dataclass(frozen=True)
class RoundTime:
    """The rounds of a tile, with panels of some width.

    step         columns of a round
    most_tokens  tokens of a tile for which a thread has registers, at most
    time         microseconds of a round of a tile of so many tokens
    """

    step: int
    most_tokens: int
    time: Callable[[int], float]

    def of_tile(self, k: float) -> int:
        """Rounds of a tile, or of a part of its k: two at least."""
        return max(2, int(-(-k // self.step)))


@dataclass(frozen=True)
class Bounds:
    """What a family's prediction is made of, for one spec and target.

    costs      those that all families for many tokens have
    rounds     with every kind of panels
    launch     microseconds of a launch
    end        microseconds of the end of a tile, per token
    exchange   microseconds until the first sums of blocks that split k are there
    multicast  times as long rounds take, at least, where blocks share x
    idle       of their time that rounds take less in a single wave, if all other multiprocessors were idle
    whole      microseconds in all, from those of the tiles and their launch
    """

    costs: PrefillCosts
    rounds: tuple[RoundTime, ...]
    launch: float
    end: float
    exchange: float
    multicast: float
    idle: float
    whole: Callable[[float], float]

    def of_kind(self, spec: MatmulSpec, s: PrefillSchedule, tokens: int, target: Target) -> float:
        """Microseconds that no schedule of a kind is predicted to be below: alike but for panels, stages and cuts."""
        blocks, k = max(1, clusters(s, target)), spec.packing.padded_k
        tiles = -(-spec.packing.row_blocks // (WARPS * s.cluster)) * -(-tokens // s.tokens)
        if s.streams:
            return self.whole(self.launch + self._shared(s, k, tiles, blocks)) * margin(s, self.costs) * SURE
        full, left = divmod(tiles, blocks)
        pace = self._pace(s, full, left / blocks)
        whole = self._tile(s.tokens, s.split_k, k, pace)
        cut = self._cut(s, whole, k, pace, left / blocks) if full and left else whole
        return self.whole(self.launch + late(s, target) + full * whole + (cut if left else 0.0)) * SURE

    def of_all(self, spec: MatmulSpec, tokens: int, target: Target, shares: bool) -> float:
        """Microseconds that no schedule is predicted to be below. shares: whether blocks may share rounds."""
        k, wide = spec.packing.padded_k, min(_WIDEST, tokens)
        tiles = spec.packing.row_blocks / WARPS * tokens / wide
        work = min(k / r.step * r.time(wide) for r in self.rounds) * tiles * self._sharing / target.multiprocessors
        time = max(work, min(self._tile(_SMALLEST, split_k, k, 1 - self.idle) for split_k in CLUSTERS))
        share = self.costs.meeting + max(work, min(r.time(_SLICE) for r in self.rounds) * self._sharing)
        return self.whole(self.launch + (min(time, share) if shares else time)) * SURE

    def _pace(self, s: PrefillSchedule, full: int, busy: float) -> float:
        """How much of their time rounds take, at least; busy: the part of the blocks with a tile of the last wave."""
        if full + (busy > 0) > 1:
            return self.multicast if s.cluster > 1 else 1.0
        return 1.0 if full else 1 - self.idle * (1 - busy)

    def _tile(self, tokens: float, split_k: int, k: int, pace: float) -> float:
        """Microseconds of a tile or slice of so many tokens, whose k is split."""
        share, whole = tokens / split_k, int(tokens)
        rounds = min(r.of_tile(k / split_k) * r.time(whole) for r in self._fitting(whole))
        exchange = self.exchange + sent(share, split_k, self.costs) if split_k > 1 else 0.0
        return rounds * pace + self.end * share + exchange

    def _cut(self, s: PrefillSchedule, whole: float, k: int, pace: float, busy: float) -> float:
        """Microseconds of the last wave, whose tiles may be cut into slices that all find a block."""
        if s.split_k > 1:
            return whole
        slices = (self._tile(max(_SLICE, s.tokens * busy * split), split, k, pace) for split in {1, s.cluster})
        return min(whole, *slices)

    def _shared(self, s: PrefillSchedule, k: int, tiles: int, blocks: int) -> float:
        """Microseconds of tiles whose rounds blocks share."""
        end = self.end * s.tokens
        return min(
            streamed(s, shares_of(tiles, r.of_tile(k), blocks, s.stream_k), r.time(s.tokens), end, self.costs)
            for r in self._fitting(s.tokens)
        )

    @property
    def _sharing(self) -> float:
        """Times as long rounds take, at least, that blocks share."""
        return self.costs.deep * self.costs.shared_x

    def _fitting(self, tokens: int) -> Iterator[RoundTime]:
        """Those of the rounds for whose tiles there may be registers: the narrowest in any case."""
        yield from (r for r in self.rounds[1:] if tokens <= r.most_tokens)
        yield self.rounds[0]
