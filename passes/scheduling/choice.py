"""Which kernel a matmul gets: the family and its schedule, without MLIR. This runs before the disk cache is asked.

`schedule_for` takes, in this order: what was measured for the very same matmul; what was measured for one like it
(`passes.scheduling.tables`); a rule, which is the least predicted of the candidates of all families. docs/tuning.md
says how far each is from the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, KernelSchedule, Operation
from lowbit.passes.kernels.decode.schedule import TOKEN_TILES
from lowbit.passes.kernels.prefill.family import TOKEN_TILES as PREFILL_TILES
from lowbit.passes.kernels.registry import FAMILIES, family_of
from lowbit.passes.scheduling.tables import Entry, Key, Table, nearest, shipped_tables
from lowbit.passes.target import Target

MOST_DECODED = 128  # tokens up to which kernels of the decode families are the faster ones, mostly
ALL_TILES = tuple(sorted({*TOKEN_TILES, *PREFILL_TILES}))


def any_token_tiles(spec: MatmulSpec, target: Target) -> tuple[int, ...]:
    """Of these, those with a kernel that serves any number of tokens."""
    families = (family for family in FAMILIES.values() if family.takes_any_tokens)
    return tuple(sorted({tile for family in families for tile in family.token_tiles(spec, target)}))


def token_tiles(spec: MatmulSpec, target: Target) -> tuple[int, ...]:
    """The token tiles that a matmul has kernels for, of whatever family."""
    return tuple(sorted({tile for family in FAMILIES.values() for tile in family.token_tiles(spec, target)}))


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

    waves = tile > MOST_DECODED and len(any_token_tiles(spec, target)) > 0

    def fits(entry: Entry) -> bool:
        if waves and entry.key != Key.of(spec, tile):  # what fills waves is another thing for every size
            return False
        return family_of(entry.schedule).suits(spec, entry.schedule, target, entry.key.spec)

    return nearest(tables, spec, tile, fits) or default_schedule(spec, tile, target)


def default_schedule(spec: MatmulSpec, tile: int, target: Target) -> KernelSchedule:
    """The rule: of the candidates of all families for m up to `tile`, the schedule with the least predicted time."""
    found = [
        (family.predict(spec, tile, schedule, target), schedule)
        for family in families_for(spec, tile, target)
        for schedule in family.candidates(spec, tile, target)
    ]
    return min(found, key=lambda pair: pair[0])[1]


def fixed_schedule(operation: Operation) -> KernelSchedule:
    """The schedule of an operation for which there is one family, which has no free choices."""
    (family,) = (family for family in FAMILIES.values() if family.operation == operation)
    return family.schedule_type()


def families_for(spec: MatmulSpec, tile: int, target: Target) -> list[KernelFamily[Any]]:
    """The families that have a kernel for up to `tile` tokens. Raises SpecError where there are none."""
    check_tile(tile)
    found = [family for family in FAMILIES.values() if tile in family.token_tiles(spec, target)]
    if not found:
        tiles = token_tiles(spec, target)
        check_tile(tile, tiles, "".join(family.tile_limit(spec, target) for family in FAMILIES.values()))
    return found


def check_tile(tile: int, tiles: Sequence[int] = ALL_TILES, where: str = "") -> None:
    """Raises SpecError unless there is a kernel for up to `tile` tokens; `where` ends its message."""
    if tile not in tiles:
        raise SpecError(f"tokens={tile} must be one of {', '.join(map(str, tiles))}{where}")
