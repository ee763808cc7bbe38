"""Which kernel a matmul gets: the family and its schedule, without MLIR. This runs before the disk cache is asked.

`schedule_for` takes what was measured for the very same matmul. Otherwise it takes what it expects to be faster: what
was measured for a matmul like it (`passes.scheduling.tables`), or the least predicted of the candidates of all families
(the rule). A tile that holds more tokens is taken where that takes less time, so that time does not fall when tokens
are added. docs/tuning.md says how far this is from the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, KernelSchedule, Operation
from lowbit.passes.kernels.decode.schedule import TOKEN_TILES
from lowbit.passes.kernels.prefill.family import TOKEN_TILES as PREFILL_TILES
from lowbit.passes.kernels.registry import FAMILIES, family_of
from lowbit.passes.scheduling.tables import REACH, Entry, Key, Table, nearest, shipped_tables
from lowbit.passes.target import Target

MOST_BANDWIDTH, MOST_PRODUCTS = 4.8e6, 5e8  # an H200's bytes and 16-bit multiplications per microsecond
MOST_DECODED = 128  # tokens up to which kernels of the decode families are the faster ones, mostly
ALL_TILES = tuple(sorted({*TOKEN_TILES, *PREFILL_TILES}))


def any_token_tiles(spec: MatmulSpec, target: Target) -> tuple[int, ...]:
    """Returns those of them with a kernel that serves any number of tokens."""
    return _token_tiles(spec, target, (family for family in FAMILIES.values() if family.takes_any_tokens))


def token_tiles(spec: MatmulSpec, target: Target) -> tuple[int, ...]:
    """The token tiles that a matmul has kernels for, of whatever family."""
    return _token_tiles(spec, target, FAMILIES.values())


def _token_tiles(spec: MatmulSpec, target: Target, families: Iterable[KernelFamily[Any]]) -> tuple[int, ...]:
    found: set[int] = set()
    for family, kind in product(families, {spec.for_tokens(1), spec}):
        found |= {tile for tile in family.token_tiles(kind, target) if spec.for_tokens(tile) == kind}
    return tuple(sorted(found))


def schedule_for(
    spec: MatmulSpec, tile: int, target: Target, gpu: str | None = None, user: Sequence[Table] = ()
) -> KernelSchedule:
    """The schedule for up to `tile` tokens (one of `token_tiles`). The same arguments give the same schedule.

    gpu   name of the GPU that will run it, as CUDA spells it; None: any GPU of the target's architecture
    user  tables that go before the shipped ones where both know a matmul equally well
    """
    families_for(spec, tile, target)  # raises where there are none
    tables = [t for t in (*user, *shipped_tables()) if t.capability == target.capability]
    tables.sort(key=lambda t: t.gpu != gpu)  # stable: the user's stay first among equals
    return choose(spec, tile, target, tables)


def choose(spec: MatmulSpec, tile: int, target: Target, tables: Sequence[Table]) -> KernelSchedule:
    """The schedule from these tables, the most trusted first, or by the rule."""
    return expected(spec, tile, target, tables).schedule


@dataclass(frozen=True)
class Choice:
    """A schedule, and about how many microseconds a launch with all of its tokens takes."""

    schedule: KernelSchedule
    microseconds: float


def expected(spec: MatmulSpec, tile: int, target: Target, tables: Sequence[Table]) -> Choice:
    """Returns the choice for up to `tile` tokens: the tile's own schedule, or a wider tile's that takes less time. A
    measured schedule gives way only to a measured one."""
    spec = spec.for_tokens(tile)
    known = measured(spec, tile, target, tables)
    best = known or estimated(spec, tile, target, tables)
    for wider in token_tiles(spec, target):
        if wider <= tile:
            continue
        if least_time(spec, wider) >= best.microseconds:
            break
        other = measured(spec, wider, target, tables)
        if other is None and known is None:
            other = estimated(spec, wider, target, tables)
        if other and other.microseconds < best.microseconds:
            best = other
    return best


def measured(spec: MatmulSpec, tile: int, target: Target, tables: Sequence[Table]) -> Choice | None:
    """Returns the entry of the first table that has the very matmul."""
    for entry in filter(None, (table.entries.get(Key.of(spec, tile)) for table in tables)):
        if family_of(entry.schedule).suits(spec, entry.schedule, target, spec):
            return Choice(entry.schedule, entry.microseconds)
    return None


def estimated(spec: MatmulSpec, tile: int, target: Target, tables: Sequence[Table]) -> Choice:
    """The rule's schedule, or that of the nearest neighbour. A neighbour's is expected to take what is predicted, times
    what the prediction was off there; the further apart the two are, the less that counts."""
    rule = predicted(spec, tile, target)
    near = None if tile > MOST_DECODED and any_token_tiles(spec, target) else _neighbour(spec, tile, target, tables)
    return min(near or rule, rule, key=lambda choice: choice.microseconds)


def _neighbour(spec: MatmulSpec, tile: int, target: Target, tables: Sequence[Table]) -> Choice | None:
    def suits(entry: Entry) -> bool:
        return family_of(entry.schedule).suits(spec, entry.schedule, target, entry.key.spec)

    entry = nearest(tables, spec, tile, suits)
    if entry is None:
        return None
    family, s = family_of(entry.schedule), entry.schedule
    here, there = (family.predict(each, tile, s, target) for each in (spec, entry.key.spec))
    alike = 1 - Key.of(spec, tile).distance(entry.key) / REACH
    return Choice(s, here * (entry.microseconds / there) ** alike)


def default_schedule(spec: MatmulSpec, tile: int, target: Target) -> KernelSchedule:
    """The rule: of the candidates of all families for m up to `tile`, the schedule with the least predicted time."""
    return predicted(spec, tile, target).schedule


def predicted(spec: MatmulSpec, tile: int, target: Target) -> Choice:
    """The rule's schedule with its predicted time."""
    found = [
        Choice(schedule, family.predict(spec, tile, schedule, target))
        for family in families_for(spec, tile, target)
        for schedule in family.candidates(spec, tile, target)
    ]
    return min(found, key=lambda choice: choice.microseconds)


def least_time(spec: MatmulSpec, tokens: int) -> float:
    """Microseconds that no schedule is predicted to be below: for reading the weight, and for multiplying it."""
    products = MOST_PRODUCTS * (2 if spec.compute else 1)
    return max(spec.bytes / MOST_BANDWIDTH, spec.n * spec.k * tokens / products)


def fixed_schedule(operation: Operation) -> KernelSchedule:
    """The schedule of an operation for which there is one family, which has no free choices."""
    (family,) = (family for family in FAMILIES.values() if family.operation == operation)
    return family.schedule_type()


def families_for(spec: MatmulSpec, tile: int, target: Target) -> list[KernelFamily[Any]]:
    """The families that have a kernel for up to `tile` tokens. Raises SpecError where there are none."""
    check_tile(tile)
    spec = spec.for_tokens(tile)
    found = [family for family in FAMILIES.values() if tile in family.token_tiles(spec, target)]
    if not found:
        tiles = token_tiles(spec, target)
        check_tile(tile, tiles, "".join(family.tile_limit(spec, target) for family in FAMILIES.values()))
    return found


def check_tile(tile: int, tiles: Sequence[int] = ALL_TILES, where: str = "") -> None:
    """Raises SpecError unless there is a kernel for up to `tile` tokens; `where` ends its message."""
    if tile not in tiles:
        raise SpecError(f"tokens={tile} must be one of {', '.join(map(str, tiles))}{where}")
