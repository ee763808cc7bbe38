"""Which kernel a matmul gets: the family and its schedule, without MLIR. This runs before the disk cache is asked.

`schedule_for` takes what was measured for the very same matmul. Otherwise it takes what it expects to be faster: what
was measured for a matmul like it (`passes.scheduling.tables`), or the least predicted of the candidates of all families
(the rule). A wider token tile is taken where that takes less time, so that time does not fall when tokens are added.
docs/tuning.md says how far this is from the best.

Of an invariant matmul all kernels have one order of sums (`passes.scheduling.order_choice`), so the choice for each
token tile is among the schedules of that order, and a measured one counts only if it has it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Literal

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily, KernelSchedule, Operation, operations_of
from lowbit.passes.kernels.decode.schedule import TOKEN_TILES
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill.family import TOKEN_TILES as PREFILL_TILES
from lowbit.passes.kernels.registry import FAMILIES, family_of
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.scheduling.order_choice import order_of
from lowbit.passes.scheduling.tables import REACH, Entry, Key, Table, nearest, shipped_tables
from lowbit.passes.target import Target

ALL_TILES = tuple(sorted({*TOKEN_TILES, *PREFILL_TILES}))


Origin = Literal["given", "measured", "like one measured", "rule"]
"""Where a schedule comes from: a user, a table that has the very matmul, one that has a matmul like it, or the rule."""


@dataclass(frozen=True)
class Choice:
    """A schedule, about how many microseconds a launch with all of its tokens takes, and where it comes from."""

    schedule: KernelSchedule
    microseconds: float
    origin: Origin = "rule"


class Chooser:
    """Chooses the schedules of one matmul on one target.

    It keeps what it has found out: a choice looks at wider tiles, too. Hold one to choose for several tiles, or
    take that of `chooser_of`.
    """

    def __init__(self, spec: MatmulSpec, target: Target) -> None:
        self._spec, self._target = spec, target
        self._predicted: dict[int, Choice] = {}
        self._not_below: dict[int, float] = {}  # microseconds that no candidate for a token tile takes less than
        self._ordered: dict[tuple[str, MatmulSpec, int], list[Candidates[Any]]] = {}

    @cached_property
    def order(self) -> SumOrder | None:
        """The order of sums that all kernels of an invariant matmul have; None for others."""
        return order_of(self._spec.for_tokens(1), self._target) if self._spec.invariant else None

    def has_order(self, schedule: KernelSchedule) -> bool:
        """Tells whether a kernel adds up as the matmul demands."""
        spec = self._spec.for_tokens(1)
        return self.order is None or family_of(schedule).sum_order(spec, schedule) == self.order

    @cached_property
    def _families(self) -> dict[int, list[KernelFamily[Any]]]:
        """The families that have a kernel, by token tile."""
        found: dict[int, list[KernelFamily[Any]]] = {}
        families = [f for f in FAMILIES.values() if f.operation in operations_of(self._spec)]
        for family, kind in product(families, {self._spec.for_tokens(1), self._spec}):
            for token_tile in family.token_tiles(kind, self._target):
                if self._spec.for_tokens(token_tile) == kind and self._serves(family, kind, token_tile):
                    found.setdefault(token_tile, []).append(family)
        return found

    def _serves(self, family: KernelFamily[Any], spec: MatmulSpec, token_tile: int) -> bool:
        """Whether a family has a kernel for a token tile, of the order of sums that is demanded."""
        if self.order is None:
            return True
        return any(group.schedules for group in self._in_order(family, spec, token_tile, self.order))

    def _in_order(
        self, family: KernelFamily[Any], spec: MatmulSpec, token_tile: int, order: SumOrder
    ) -> list[Candidates[Any]]:
        """The schedules of a family for a token tile in the matmul's order of sums. They are kept, since they are
        asked for again for every narrower token tile."""
        key = family.name, spec, token_tile
        if key not in self._ordered:
            self._ordered[key] = list(family.in_order(spec, token_tile, self._target, order))
        return self._ordered[key]

    @cached_property
    def token_tiles(self) -> tuple[int, ...]:
        """The token tiles that the matmul has kernels for, of whatever family."""
        return tuple(sorted(self._families))

    @cached_property
    def any_tiles(self) -> tuple[int, ...]:
        """The token tiles with a kernel that serves any number of tokens."""
        return tuple(t for t in self.token_tiles if any(family.takes_any_tokens for family in self._families[t]))

    def families(self, token_tile: int) -> list[KernelFamily[Any]]:
        """The families that have a kernel for up to `token_tile` tokens. Raises SpecError where there are none."""
        check_token_tile(token_tile)
        if token_tile not in self._families:
            limits = (family.token_tile_limit(self._spec, self._target) for family in FAMILIES.values())
            narrow = token_tile < min(self.token_tiles, default=0)
            where = f" for ({self._spec}) on {self._target}" if narrow else "".join(limits)
            check_token_tile(token_tile, self.token_tiles, where)
        return self._families[token_tile]

    def schedule(self, token_tile: int, gpu: str | None = None, user: Sequence[Table] = ()) -> KernelSchedule:
        """Returns what `schedule_for` returns."""
        return self.choice(token_tile, gpu, user).schedule

    def choice(self, token_tile: int, gpu: str | None = None, user: Sequence[Table] = ()) -> Choice:
        """Returns the same with where it comes from."""
        self.families(token_tile)  # raises where there are none
        return self.expected(token_tile, trusted_tables(self._target, gpu, user))

    def expected(self, token_tile: int, tables: Sequence[Table]) -> Choice:
        """Returns the choice for up to `token_tile` tokens: its own schedule, or that of a wider token tile where
        that takes less time.

        A measured schedule gives way only to a measured one, and one for up to `Thresholds.few` tokens not to a
        prediction for 80 to 120 (docs/lab-notebook/schedules.md); but one for so many to one of shared rounds, since
        these predictions are good (docs/lab-notebook/last-tiles.md).
        """
        if self._spec.for_tokens(token_tile) != self._spec:
            return self._unfolded.expected(token_tile, tables)
        known = self._measured(token_tile, tables)
        best = known or self._estimated(token_tile, tables) or self.predicted(token_tile)
        settled = set(self.families(token_tile))  # those of which what was looked at is no less than `best`
        for wider in (tile for tile in self.token_tiles if tile > token_tile):
            if least_time(self._spec, wider, self._target) >= best.microseconds:
                break
            other = self._measured(wider, tables)
            if other is None and known is None:
                other = self._of_wider(token_tile, wider, tables, best.microseconds, settled)
            if other and other.microseconds < best.microseconds:
                best = other
        return best

    def _of_wider(
        self, token_tile: int, wider: int, tables: Sequence[Table], below: float, settled: set[KernelFamily[Any]]
    ) -> Choice | None:
        """Returns the choice of a wider token tile where it is trusted, None also where it does not take less time."""
        few = self._target.thresholds.few
        if token_tile <= few < wider < self._target.thresholds.decoded:
            return self._sharing(wider, tables, below) if token_tile == few else None
        found = self._estimated(wider, tables, below, settled)
        settled.update(self.families(wider))
        return found

    def _sharing(self, token_tile: int, tables: Sequence[Table], below: float) -> Choice | None:
        """Returns what is expected to take the least time, if its blocks share rounds and it takes less than `below`.
        The rule has such schedules only among the new groups of a token tile."""
        new = self._find(token_tile, below, self.families(token_tile))
        if new is None and self._neighbour(token_tile, tables) is None:
            return None
        found = self._estimated(token_tile, tables, below)
        return found if found and _shares_rounds(found) else None

    @cached_property
    def _unfolded(self) -> Chooser:
        """Chooses for few tokens, whose kernels fold no scales."""
        return Chooser(self._spec.for_tokens(1), self._target)

    def _measured(self, token_tile: int, tables: Sequence[Table]) -> Choice | None:
        """Returns the entry of the first table that has the very matmul."""
        spec = self._spec
        for entry in filter(None, (table.entries.get(Key.of(spec, token_tile)) for table in tables)):
            suits = family_of(entry.schedule).suits(spec, entry.schedule, self._target, spec)
            if suits and self.has_order(entry.schedule):
                return Choice(entry.schedule, entry.microseconds, "measured")
        return None

    def _estimated(
        self,
        token_tile: int,
        tables: Sequence[Table],
        below: float = math.inf,
        settled: Collection[KernelFamily[Any]] = (),
    ) -> Choice | None:
        """Returns the rule's schedule, or that of the nearest neighbour, whichever is expected to take less time; None
        where it is the rule's, and not expected to take less than `below`.

        A neighbour's is expected to take what is predicted, times what the prediction was off there; the further apart
        the two are, the less that counts.
        """
        many = token_tile > self._target.thresholds.decoded and self.any_tiles
        near = None if many else self._neighbour(token_tile, tables)
        return self._predicted_below(token_tile, min(below, near.microseconds) if near else below, settled) or near

    def _neighbour(self, token_tile: int, tables: Sequence[Table]) -> Choice | None:
        spec, target = self._spec, self._target

        def suits(entry: Entry) -> bool:
            suits = family_of(entry.schedule).suits(spec, entry.schedule, target, entry.key.spec)
            return suits and self.has_order(entry.schedule)

        entry = nearest(tables, spec, token_tile, suits)
        if entry is None:
            return None
        family, s = family_of(entry.schedule), entry.schedule
        here, there = (family.predict(each, token_tile, s, target) for each in (spec, entry.key.spec))
        alike = 1 - Key.of(spec, token_tile).distance(entry.key) / REACH
        return Choice(s, here * (entry.microseconds / there) ** alike, "like one measured")

    def predicted(self, token_tile: int) -> Choice:
        """Returns the rule's choice for up to `token_tile` tokens: of all families' candidates that of the least
        predicted time."""
        if self._spec.for_tokens(token_tile) != self._spec:
            return self._unfolded.predicted(token_tile)
        found = self._predicted_below(token_tile, math.inf)
        if found is None:  # a family has a candidate for each of its token tiles
            raise AssertionError(f"no schedule for {token_tile} tokens of ({self._spec}) on {self._target}")
        return found

    def _predicted_below(
        self, token_tile: int, below: float, settled: Collection[KernelFamily[Any]] = ()
    ) -> Choice | None:
        """Returns the rule's choice, or None if it is predicted to take `below` or longer.

        settled: families of which no candidate for a narrower token tile is predicted to take less than `below`
        """
        if token_tile not in self._predicted and below > self._not_below.get(token_tile, 0.0):
            if found := self._find(token_tile, below, settled):
                self._predicted[token_tile] = found
            else:
                self._not_below[token_tile] = below
        choice = self._predicted.get(token_tile)
        return choice if choice and choice.microseconds < below else None

    def _find(self, token_tile: int, below: float, settled: Collection[KernelFamily[Any]]) -> Choice | None:
        """Returns the first of all candidates with the least predicted time, if it is less than `below`.

        Groups of candidates are made in the order of their bounds, until a bound is longer than what was found.
        """
        spec, target, limit = self._spec, self._target, below
        best: tuple[float, int, KernelSchedule] | None = None
        groups = sorted(enumerate(self._groups(token_tile, below, settled)), key=lambda each: each[1][1].least)
        for place, (family, group) in groups:
            if group.least > limit or group.least >= below:
                break
            for s in group.schedules:
                time = family.predict(spec, token_tile, s, target)
                if time < below and (best is None or (time, place) < best[:2]):
                    best, limit = (time, place, s), time
        return Choice(best[2], best[0]) if best else None

    def _groups(
        self, token_tile: int, below: float, settled: Collection[KernelFamily[Any]]
    ) -> Iterator[tuple[KernelFamily[Any], Candidates[Any]]]:
        """Yields the groups of families that may have candidates predicted to take less than `below`."""
        spec, target = self._spec, self._target
        for family in self.families(token_tile):
            if family.least_time(spec, token_tile, target) < below:
                if self.order:
                    groups = self._in_order(family, spec, token_tile, self.order)
                else:
                    of_family = family.new_groups if family in settled else family.groups
                    groups = of_family(spec, token_tile, target)
                yield from ((family, group) for group in groups)


@lru_cache(maxsize=64)
def chooser_of(spec: MatmulSpec, target: Target) -> Chooser:
    """Returns the chooser of a matmul on a target: one for all that ask, as most of a choice is to find out what it
    keeps."""
    return Chooser(spec, target)


def trusted_tables(target: Target, gpu: str | None = None, user: Sequence[Table] = ()) -> list[Table]:
    """Returns the tables for a target, the most trusted first: those for a GPU of this name, among them the user's."""
    tables = [t for t in (*user, *shipped_tables()) if t.capability == target.capability]
    return sorted(tables, key=lambda t: t.gpu != gpu)  # stable: the user's stay first among equals


def _shares_rounds(choice: Choice) -> bool:
    """Whether blocks have equal shares of all rounds."""
    return isinstance(choice.schedule, PrefillSchedule) and choice.schedule.streams


def schedule_for(
    spec: MatmulSpec, token_tile: int, target: Target, gpu: str | None = None, user: Sequence[Table] = ()
) -> KernelSchedule:
    """The schedule for up to `token_tile` tokens (one of `Chooser.token_tiles`). The same arguments give the same
    schedule.

    gpu   name of the GPU that will run it, as CUDA spells it; None: any GPU of the target's architecture
    user  tables that go before the shipped ones where both know a matmul equally well
    """
    return Chooser(spec, target).schedule(token_tile, gpu, user)


def choose(spec: MatmulSpec, token_tile: int, target: Target, tables: Sequence[Table]) -> KernelSchedule:
    """The schedule from these tables, the most trusted first, or by the rule."""
    return Chooser(spec, target).expected(token_tile, tables).schedule


def default_schedule(spec: MatmulSpec, token_tile: int, target: Target) -> KernelSchedule:
    """The schedule by the rule, whatever was measured."""
    return Chooser(spec, target).predicted(token_tile).schedule


def token_tiles(spec: MatmulSpec, target: Target) -> tuple[int, ...]:
    """The token tiles that a matmul has kernels for, of whatever family."""
    return Chooser(spec, target).token_tiles


def least_time(spec: MatmulSpec, tokens: int, target: Target) -> float:
    """Microseconds that no schedule is predicted to be below: for reading the weight, and for multiplying it."""
    costs = target.costs
    products = costs.products * (2 if spec.compute else 1)
    return max(spec.bytes / costs.bandwidth, spec.n * spec.k * tokens / products)


def fixed_schedule(operation: Operation) -> KernelSchedule:
    """The schedule of an operation for which there is one family, which has no free choices."""
    (family,) = (family for family in FAMILIES.values() if family.operation == operation)
    return family.schedule_type()


def check_token_tile(token_tile: int, tiles: Sequence[int] = ALL_TILES, where: str = "") -> None:
    """Raises SpecError unless there is a kernel for up to `token_tile` tokens; `where` ends its message."""
    if token_tile not in tiles:
        raise SpecError(f"tokens={token_tile} must be one of {', '.join(map(str, tiles))}{where}")
