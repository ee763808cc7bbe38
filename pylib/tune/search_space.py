"""The schedules that the tuner times for a matmul: those of all kernel families, put in order by their predicted time.

Every shape of the work comes once, with what is predicted to be best for it, before any comes twice; docs/tuning.md
says how early winners come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, KernelSchedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.scheduling.choice import Chooser, trusted_tables
from lowbit.passes.scheduling.expert_choice import choose_for_slots, families_of_slots
from lowbit.passes.scheduling.expert_rule import tile_for, tiles_of
from lowbit.passes.scheduling.tables import Key, shipped_tables
from lowbit.passes.target import Target


def candidates(spec: MatmulSpec, token_tile: int, target: Target, count: int) -> list[KernelSchedule]:
    """Returns at most `count` schedules for m up to `token_tile`.

    First come those that are chosen without a search, by the rule and from the tables, and the best for this size
    with other zeros, groups or act; then the best of every shape; then the rest. In each part, the least predicted
    time comes first. Of an invariant matmul all have its order of sums.
    """
    if spec.experts > 1:
        return _candidates_of_slots(spec, token_tile, target)[:count]
    chooser = Chooser(spec, target)
    chosen = [chooser.predicted(token_tile).schedule, chooser.schedule(token_tile)]
    chosen = list(dict.fromkeys([*chosen, *same_size_entries(spec, token_tile, target)]))
    predicted = [
        (family.predict(spec, token_tile, s, target), family, s)
        for family in chooser.families(token_tile)
        for s in _space(chooser, family, spec, token_tile, target)
    ]
    predicted.sort(key=lambda found: found[0])
    shapes: dict[Any, KernelSchedule] = {}
    for _, family, s in predicted:
        shapes.setdefault((family.name, family.shape(s)), s)
    every = dict.fromkeys([*chosen, *shapes.values(), *(s for *_, s in predicted)])
    return [s for s in every if chooser.has_order(s)][: max(count, len(chosen))]


def _space(
    chooser: Chooser, family: KernelFamily[Any], spec: MatmulSpec, token_tile: int, target: Target
) -> Sequence[KernelSchedule]:
    """Returns a family's search space; of an invariant matmul all schedules that have its order of sums."""
    if chooser.order is None:
        return family.search_space(spec, token_tile, target)
    return [s for group in family.in_order(spec, token_tile, target, chooser.order) for s in group.schedules]


def _candidates_of_slots(spec: MatmulSpec, slots: int, target: Target) -> list[KernelSchedule]:
    """Returns the schedules for so many slots of experts, in token tiles of the size that they have in a layer.

    First comes what is chosen without a search, then the rest of its family, then those of others.
    """
    tile = tile_for(tiles_of(spec, target), slots, spec.experts)
    tables = ([], trusted_tables(target))
    chosen = [choose_for_slots(spec, tile, slots, target, each).schedule for each in tables]
    families, chooser = families_of_slots(spec, tile, target), Chooser(spec, target)
    families.sort(key=lambda family: family is not family_of(chosen[0]))
    found = list(dict.fromkeys(chosen))
    for family in families:
        space = _space(chooser, family, spec, tile, target)
        found += sorted(space, key=lambda s: family.predict(spec, tile, s, target))
    return list(dict.fromkeys(found))


def same_size_entries(spec: MatmulSpec, token_tile: int, target: Target) -> list[KernelSchedule]:
    """Returns the schedules that the shipped tables have for this format and size, as far as they are allowed here."""

    def about(key: Key) -> tuple[object, ...]:
        return key.spec.weight, key.spec.n, key.spec.k, key.tokens, key.spec.compute

    entries = [e for t in shipped_tables() if t.capability == target.capability for e in t.entries.values()]
    same = [e for e in entries if about(e.key) == about(Key.of(spec, token_tile))]
    return [e.schedule for e in same if family_of(e.schedule).allows(spec, e.schedule, target)]


def neighbours(spec: MatmulSpec, token_tile: int, target: Target, around: KernelSchedule) -> list[KernelSchedule]:
    """Returns the schedules that differ from `around` in one field, the most promising first; of an invariant matmul
    those of its order of sums."""
    tile, chooser = cast(Any, around).tokens if spec.experts > 1 else token_tile, Chooser(spec, target)
    return [s for s in family_of(around).neighbours(spec, tile, target, around) if chooser.has_order(s)]
