"""The order of sums that all kernels of an invariant matmul have: a function of spec and target alone, without MLIR.

For a matmul that was measured it is in the table of its architecture (`passes.scheduling.order_tables`), which comes
with lowbit. Otherwise it is predicted. Of the orders whose kernels take hardly longer than the best for `TOKENS`
tokens, in their geometric mean, it is the one that takes the least time for these and `MANY` tokens; of experts the
best over their token tiles, where all are hit. Tables of schedules have no say: they are of one GPU, or a user's own,
and results are to be the same on all of an architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily, operations_of
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.scheduling.order_tables import measured_order
from lowbit.passes.target import Target

TOKENS, MANY = (1, 4, 16, 64), (512, 4096)
SLACK = 1.05
"""Times as long as with the best order few tokens may take, for many to take less."""


_Groups = Sequence[tuple[int, Sequence[Candidates[Any]]]]
"""Token tiles, as `_tiles` has them, with the schedules of an order."""


@dataclass(frozen=True)
class Ranked:
    """An order, and microseconds in the geometric mean: over `TOKENS`, and over `MANY`; 1 where these do not count."""

    order: SumOrder
    few: float
    many: float

    @property
    def all(self) -> float:
        """The mean over both, each number of tokens counting once."""
        return math.exp((len(TOKENS) * math.log(self.few) + len(MANY) * math.log(self.many)) / len(TOKENS + MANY))


@lru_cache(maxsize=256)
def order_of(spec: MatmulSpec, target: Target) -> SumOrder:
    """Returns the order of sums of an invariant matmul. Raises SpecError where no family has one for all tokens."""
    return measured_order(spec, target) or predicted_order(spec, target)


def predicted_order(spec: MatmulSpec, target: Target) -> SumOrder:
    """Returns the same, whatever was measured."""
    found = ranked_orders(spec, target)
    if not found:
        raise SpecError(f"({spec}) has no kernels of one order of sums on {target}; use invariant=False")
    return min(found, key=lambda each: each.all).order


def ranked_orders(spec: MatmulSpec, target: Target, slack: float = SLACK) -> list[Ranked]:
    """Returns the orders with which few tokens are predicted to take at most `slack` times as long as with the best."""
    best, few = math.inf, dict[SumOrder, float]()
    for least, family, order, groups in sorted(_bounded(spec, target), key=lambda each: each[0]):
        if least > slack * best:
            break
        few[order] = _mean(_fastest(family, spec, tile, target, of_tile) for tile, of_tile in groups)
        best = min(best, few[order])
    kept = [(order, time) for order, time in few.items() if time <= slack * best and math.isfinite(time)]
    return [Ranked(order, time, _many(spec, target, order)) for order, time in kept]


def _bounded(spec: MatmulSpec, target: Target) -> Iterable[tuple[float, KernelFamily[Any], SumOrder, _Groups]]:
    """Yields all orders with their families, the mean time that their kernels are not predicted to be below, and their
    schedules."""
    for family in FAMILIES.values():
        if family.operation in operations_of(spec) and (tiles := _tiles(family, spec, target)):
            for order in family.orders(spec, target):
                groups = [(tile, list(family.in_order(spec, tile, target, order))) for tile in tiles]
                yield _mean(_least(of_tile) for _, of_tile in groups), family, order, groups


def _tiles(family: KernelFamily[Any], spec: MatmulSpec, target: Target) -> list[int]:
    """Returns the token tiles that serve `TOKENS`; none of a family that does not serve all of them. Of experts those
    that any number of slots may be cut into."""
    tiles = family.token_tiles(spec, target)
    if spec.experts > 1:
        return list(tiles)
    if family.takes_any_tokens or max(tiles, default=0) < TOKENS[-1]:
        return []
    return [next(tile for tile in tiles if tile >= tokens) for tokens in TOKENS]


def _many(spec: MatmulSpec, target: Target, order: SumOrder) -> float:
    """Returns the mean time of `MANY` tokens: in a launch for any number of them, or in as many as they take."""
    families = [f for f in FAMILIES.values() if f.takes_any_tokens and f.operation in operations_of(spec)]
    if spec.experts > 1 or not any(family.token_tiles(spec, target) for family in families):
        return 1.0
    launch = _any_family(spec, TOKENS[-1], target, order, lambda family: not family.takes_any_tokens)
    times = (_any_family(spec, m, target, order, lambda family: family.takes_any_tokens) for m in MANY)
    return _mean(min(time, m / TOKENS[-1] * launch) for m, time in zip(MANY, times))


def _any_family(
    spec: MatmulSpec, tile: int, target: Target, order: SumOrder, suits: Callable[[KernelFamily[Any]], bool]
) -> float:
    """Returns the least time that is predicted of the schedules of some families in an order."""
    families = (f for f in FAMILIES.values() if f.operation in operations_of(spec) and suits(f))
    serving = (f for f in families if tile in f.token_tiles(spec, target))
    groups = ((family, family.in_order(spec, tile, target, order)) for family in serving)
    return min((_fastest(family, spec, tile, target, each) for family, each in groups), default=math.inf)


def _mean(times: Iterable[float]) -> float:
    logarithms = [math.log(time) for time in times]
    return math.exp(sum(logarithms) / len(logarithms))


def _least(groups: Iterable[Candidates[Any]]) -> float:
    return min((group.least for group in groups), default=math.inf)


def _fastest(
    family: KernelFamily[Any], spec: MatmulSpec, tile: int, target: Target, groups: Iterable[Candidates[Any]]
) -> float:
    """Returns the least time that is predicted of schedules for a token tile; inf where there are none."""
    best = math.inf
    for group in sorted(groups, key=lambda group: group.least):
        if group.least >= best:
            break
        best = min([best, *(family.predict(spec, tile, s, target) for s in group.schedules)])
    return best
