"""The kinds of schedules that families with wgmma consider: tiles, clusters, and what splits k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.cost_model import at_once, clusters
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import CLUSTERS, PrefillSchedule
from lowbit.passes.target import Target

S = TypeVar("S", bound=PrefillSchedule)


def kinds(type_: type[S], tiles: Sequence[int], spec: MatmulSpec, tokens: int, target: Target) -> Iterator[S]:
    """Yields schedules of this type that differ in the tokens of a tile, the blocks that share x, and those that split
    k. They split k where all tiles are computed at once, and leave multiprocessors idle otherwise."""
    whole, split = _whole_and_split(type_, tuple(tiles))
    yield from whole
    yield from (kind for kind in split if at_once(PersistentPlan(spec, kind, WGMMA), tokens, target))
    yield from shared_kinds(type_, spec, tokens, target)


@lru_cache(maxsize=None)
def _whole_and_split(type_: type[S], tiles: tuple[int, ...]) -> tuple[list[S], list[S]]:
    """Returns the schedules without and with a split k, which are the same for all matmuls."""
    splits = ((tile, split_k) for tile, split_k in product(tiles, CLUSTERS[1:]))
    split = [type_(tokens=t, split_k=n) for t, n in splits if t % (type_.least_share * n) == 0]
    return [type_(tokens=tile, cluster=cluster) for tile, cluster in product(tiles, (1, 2))], split


def shared_kinds(type_: type[S], spec: MatmulSpec, tokens: int, target: Target) -> Iterator[S]:
    """Yields those of `kinds` whose blocks have equal shares of all rounds, where tiles do not come out even: as small
    tiles as so many tokens need, and those of one more tile of tokens."""
    if tokens > target.thresholds.sharing:
        return
    fewest = -(-tokens // 256)
    sizes = {type_.least_share * -(-tokens // (count * type_.least_share)) for count in (fewest, fewest + 1)}
    for tile, cluster in product(sorted(sizes), (1, 2)):
        if tile < 16 or tile % (type_.least_share * cluster):
            continue
        kind = type_(tokens=tile, cluster=cluster, stream_k="all")
        blocks, tiles = clusters(kind, target), PersistentPlan(spec, kind, WGMMA).tiles.count(tokens)
        if tiles % blocks:
            yield kind
            if 2 * tiles <= blocks and blocks % tiles:
                yield replace(kind, stream_k="even")
