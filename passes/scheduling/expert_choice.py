"""Which kernel multiplies the slots of experts: what was measured for the weight and about so many slots, or what the
rule takes (`passes.scheduling.expert_rule`). No MLIR is needed here.

A token has a slot for each of its experts, and a kernel sees slots alone: m tokens of k experts are m k of them. So the
key of an entry has their number as its tokens. Its schedule serves token tiles of the size that it names, from half to
twice as many slots, where no other entry is nearer. How many slots a token tile has is no choice of one matmul: both of
a layer share the table of tiles, and their number follows from the slots of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import OF_EXPERTS, KernelFamily, KernelSchedule
from lowbit.passes.kernels.registry import FAMILIES, family_of
from lowbit.passes.scheduling.choice import Chooser, Origin
from lowbit.passes.scheduling.expert_rule import schedule_for_few
from lowbit.passes.scheduling.tables import REACH, Entry, Key, Table
from lowbit.passes.target import Target


class ExpertChoice(NamedTuple):
    """A schedule for slots of experts, and where it comes from."""

    schedule: KernelSchedule
    origin: Origin


def choose_for_slots(
    spec: MatmulSpec, tile: int, slots: int, target: Target, tables: Sequence[Table]
) -> ExpertChoice:
    """Returns the schedule for so many slots in token tiles of so many.

    tables   the most trusted first

    Raises SpecError for a tile that no kernel has.
    """
    spec = spec.for_tokens(tile)
    if entry := _nearest(spec, tile, max(slots, 1), target, tables):
        return ExpertChoice(entry.schedule, "measured" if entry.key.tokens == slots else "like one measured")
    found = schedule_for_few(spec, tile, slots, target)
    if found is None:
        raise SpecError(f"no kernel has tiles of {tile} slots for ({spec}) on {target}")
    return ExpertChoice(found, "rule")


def families_of_slots(spec: MatmulSpec, tile: int, target: Target) -> list[KernelFamily[Any]]:
    """Returns the families with kernels for token tiles of so many slots."""
    spec, of_experts = spec.for_tokens(tile), (f for f in FAMILIES.values() if f.operation in OF_EXPERTS)
    return [family for family in of_experts if tile in family.token_tiles(spec, target)]


def where_choices_change(spec: MatmulSpec, tables: Sequence[Table]) -> list[int]:
    """Returns numbers of slots, in order: nowhere else does another entry of the tables begin or cease to be taken."""
    measured = sorted({entry.key.tokens for entry in _entries(spec, tables)})
    ends = {n for slots in measured for n in (-(-slots // 2), 2 * slots + 1)}
    between = {math.isqrt(a * b) + 1 for a in measured for b in measured if a < b}
    return sorted({1, *ends, *between})


def _nearest(
    spec: MatmulSpec, tile: int, slots: int, target: Target, tables: Sequence[Table]
) -> Entry | None:
    """Returns the entry for the number of slots that is nearest, up to an octave away; of equals, that in the first
    table."""

    chooser = Chooser(spec, target)

    def distance(entry: Entry) -> float:
        return abs(math.log2(slots / entry.key.tokens))

    def fits(entry: Entry) -> bool:
        schedule = cast(Any, entry.schedule)
        fits = schedule.tokens == tile and family_of(schedule).allows(spec, schedule, target)
        return fits and chooser.has_order(schedule)

    near = (entry for entry in _entries(spec, tables) if distance(entry) <= REACH and fits(entry))
    return min(near, key=distance, default=None)


def _entries(spec: MatmulSpec, tables: Sequence[Table]) -> list[Entry]:
    """Returns all that was measured for a weight."""
    same = Key.of(spec, 1).spec
    return [entry for table in tables for entry in table.by_spec.get(same, ())]
