"""The order of sums that all kernels of an invariant matmul have: a function of spec and target alone, without MLIR.

It is the one whose kernels are predicted to take the least time over `TOKENS` tokens, in their geometric mean; of
experts over their token tiles, where all are hit. No table is asked, since tables are of one GPU, or a user's own, and
results are to be the same on all of an architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily, operations_of
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.target import Target

TOKENS = (1, 4, 16, 64)


@lru_cache(maxsize=256)
def order_of(spec: MatmulSpec, target: Target) -> SumOrder:
    """Returns the order of sums of an invariant matmul. Raises SpecError where no family has one for all tokens."""
    best: tuple[float, SumOrder] | None = None
    for least, family, order in sorted(_bounded(spec, target), key=lambda each: each[0]):
        if best and least >= best[0]:
            break
        time = _mean(_fastest(family, spec, tile, target, order) for tile in _tiles(family, spec, target))
        if time < (best[0] if best else math.inf):
            best = time, order
    if best is None:
        raise SpecError(f"({spec}) has no kernels of one order of sums on {target}; use invariant=False")
    return best[1]


def _bounded(spec: MatmulSpec, target: Target) -> Iterable[tuple[float, KernelFamily[Any], SumOrder]]:
    """Yields all orders with their families, and the mean time that their kernels are not predicted to be below."""
    for family in FAMILIES.values():
        if family.operation in operations_of(spec) and (tiles := _tiles(family, spec, target)):
            for order in family.orders(spec, target):
                yield _mean(_least(family.in_order(spec, tile, target, order)) for tile in tiles), family, order


def _tiles(family: KernelFamily[Any], spec: MatmulSpec, target: Target) -> list[int]:
    """Returns the token tiles that serve `TOKENS`; none of a family that does not serve all of them. Of experts those
    that any number of slots may be cut into."""
    tiles = family.token_tiles(spec, target)
    if spec.experts > 1:
        return list(tiles)
    if max(tiles, default=0) < TOKENS[-1]:
        return []
    return [next(tile for tile in tiles if tile >= tokens) for tokens in TOKENS]


def _mean(times: Iterable[float]) -> float:
    logarithms = [math.log(time) for time in times]
    return math.exp(sum(logarithms) / len(logarithms))


def _least(groups: Iterable[Candidates[Any]]) -> float:
    return min((group.least for group in groups), default=math.inf)


def _fastest(family: KernelFamily[Any], spec: MatmulSpec, tile: int, target: Target, order: SumOrder) -> float:
    """Returns the least time that is predicted of schedules in an order; inf where there are none."""
    best = math.inf
    for group in sorted(family.in_order(spec, tile, target, order), key=lambda group: group.least):
        if group.least >= best:
            break
        best = min([best, *(family.predict(spec, tile, s, target) for s in group.schedules)])
    return best
