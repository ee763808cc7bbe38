"""The schedules worth timing for a matmul: all that fit, put in order by a simple prediction, in two passes.

`candidates` is the coarse pass: the shape of the work (`SHAPE`) decides most, so every shape comes once, with what is
predicted to be best for it, before any comes twice. `neighbours` is the second: what differs in one choice from a
schedule that turned out well.

The prediction is that of `passes.scheduling.cost_model`; docs/tuning.md says how early winners come.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any, get_args

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.plan import MOST_SCALED, KernelPlan, can_use_raw_codes
from lowbit.passes.kernels.decode.schedule import Refill, Schedule
from lowbit.passes.scheduling.choice import REFILL_AFTER_MMA, default_schedule, schedule_for, usual_refill
from lowbit.passes.scheduling.cost_model import predict, spills
from lowbit.passes.scheduling.legality import (
    enough_blocks,
    has_integer_mma,
    has_wgmma,
    is_allowed,
    multiprocessors,
    shared_room,
)
from lowbit.passes.scheduling.tables import shipped_tables
from lowbit.passes.target import Target

SHAPE = ("row_blocks", "warps_n", "warps_k", "split_k", "wgmma", "integer_mma", "preload_weights")
# Only the second pass varies these; in the first they follow.
SECOND = ("cluster", "max_blocks_per_sm", "min_blocks", "prefetch_limit", "refill", "overlap_groups", "raw_codes")
MOST_WARPS = 16  # of a block
MOST_ACCUMULATORS = 16  # row blocks times blocks of 8 tokens, per warp: more would spill


def space(spec: MatmulSpec, tile: int, target: Target) -> dict[str, tuple[Any, ...]]:
    """What each field of a `Schedule` may be, in order."""
    chunk = spec.packing.chunk
    splits = (1, 2, 4, 8) if target.has_clusters else (1, 2, 4)
    return {
        "tokens": (1, 8) if tile == 1 else (tile,),
        "row_blocks": (1, 2, 4, 8),
        "warps_n": (1, 2, 4, 8, 16),
        "warps_k": (1, 2, 3, 4, 5, 6, 8, 16),
        "step_k": tuple(step for step in (32, 64, 128, 256) if step % chunk == 0 and step <= 4 * chunk),
        "num_stages": (1, 2, 3, 4, 6, 8),  # 1 for resident ones, and only for them
        "split_k": splits,
        "cluster": splits if target.has_clusters else (1,),
        "wgmma": ((False, True) if tile == 8 else (True,)) if tile >= 8 and has_wgmma(spec, target) else (False,),
        "max_blocks_per_sm": (0, 1, 2),
        "min_blocks": (0, multiprocessors(target), 2 * multiprocessors(target)),
        "prefetch_limit": (0, 1, 2),
        "refill": get_args(Refill) if tile >= REFILL_AFTER_MMA // 2 else ("before_mma",),
        "preload_weights": (False, True),
        "overlap_groups": (False, True) if tile >= 8 and has_wgmma(spec, target) else (False,),
        "raw_codes": (False, True) if can_use_raw_codes(spec) else (False,),
        "integer_mma": (False, True) if tile == 1 and has_integer_mma(spec) else (False,),
    }


def candidates(spec: MatmulSpec, tile: int, target: Target, count: int) -> list[Schedule]:
    """At most `count` schedules for m up to `tile`: what is chosen without a search, by the rule and from the tables,
    and what is the best for this size with other zeros, groups or act; then the best of every shape; then the rest.
    Each of them the least predicted time first."""
    known = [default_schedule(spec, tile, target), schedule_for(spec, tile, target), *same_size_entries(spec, tile,
    target)]
    chosen = list(dict.fromkeys(known))
    ordered = sorted(all_schedules(spec, tile, target), key=lambda s: predict(spec, tile, s, target))
    shapes: dict[tuple[Any, ...], Schedule] = {}
    for s in ordered:
        shapes.setdefault(tuple(getattr(s, name) for name in SHAPE), s)
    return list(dict.fromkeys([*chosen, *shapes.values(), *ordered]))[: max(count, len(chosen))]


def same_size_entries(spec: MatmulSpec, tile: int, target: Target) -> list[Schedule]:
    """Those that the shipped tables have for the same format and size and that are allowed here."""
    entries = [e for t in shipped_tables() if t.capability == target.capability for e in t.entries.values()]
    same = [e for e in entries if (e.key.weight, e.key.n, e.key.k, e.key.tokens) == (spec.weight, spec.n, spec.k, tile)]
    return [e.schedule for e in same if is_allowed(spec, e.schedule, target)]


def neighbours(spec: MatmulSpec, tile: int, target: Target, around: Schedule) -> list[Schedule]:
    """The schedules one step of one field away from another, or any in a field of `SECOND`, the most promising first.
    A field of `SECOND` that is as in the first pass follows the others, as it did there."""

    def limited(s: Schedule) -> Schedule:
        """Alike for schedules that make the same kernel, as a limit to what shared memory has no room for is none."""
        room = shared_room(spec, s, target)
        return replace(s, max_blocks_per_sm=min(s.max_blocks_per_sm or room, room))

    fields = asdict(around)
    first = _completed({name: value for name, value in fields.items() if name not in SECOND}, spec, target)
    fields = {name: value for name, value in fields.items() if name not in SECOND or value != getattr(first, name)}
    found: list[Schedule | None] = []
    for name, values in space(spec, tile, target).items():
        now = getattr(around, name)
        near = [v for v in values if v < now][-1:] + [v for v in values if v > now][:1]
        found += [_schedule(fields | {name: v}, spec, target) for v in (values if name in SECOND else near)]
    kernels = {limited(around): around}
    for s in filter(None, found):
        kernels.setdefault(limited(s), s)
    return sorted(list(kernels.values())[1:], key=lambda s: predict(spec, tile, s, target))


def all_schedules(spec: MatmulSpec, tile: int, target: Target) -> list[Schedule]:
    """Every schedule of the first pass that is allowed, gives every warp two steps or more of work, and leaves no
    more than half of the multiprocessors idle if another does not."""
    fields = {name: values for name, values in space(spec, tile, target).items() if name not in SECOND}
    every = (_schedule(dict(zip(fields, values)), spec, target) for values in itertools.product(*fields.values()))
    found = [s for s in every if s]
    most = max((_blocks(spec, s) for s in found), default=0)
    processors = multiprocessors(target)
    return [s for s in found if 2 * _blocks(spec, s) >= min(most, processors) * (0.9 if s.preload_weights else 1)]


def _blocks(spec: MatmulSpec, s: Schedule) -> int:
    return KernelPlan(spec, s).tiles * s.split_k


def _schedule(choice: dict[str, Any], spec: MatmulSpec, target: Target) -> Schedule | None:
    """The schedule with these fields, if it is worth trying."""
    if not 2 <= choice["warps_n"] * choice["warps_k"] <= MOST_WARPS:
        return None
    if choice["preload_weights"] != (choice["num_stages"] == 1):
        return None
    try:
        s = _completed(choice, spec, target)
    except SpecError:
        return None
    return s if _worth(spec, s, target) else None


def _completed(choice: dict[str, Any], spec: MatmulSpec, target: Target) -> Schedule:
    """The schedule with these fields; those of `SECOND` that are not there as in the first pass: splits in a cluster,
    no more blocks of warpgroups at a time than there are, copies of many tokens after the first product and warps that
    drift apart, and where blocks of two kernels are to run side by side, grids that fill the multiprocessors."""
    splits = choice["split_k"]
    cluster = splits if target.has_clusters and splits <= 8 else 1
    loops = choice["wgmma"] and not choice["preload_weights"]
    refill = usual_refill(choice["tokens"], choice["warps_n"]) if loops else "before_mma"
    s = Schedule(**{"cluster": cluster, "refill": refill} | choice)
    most = KernelPlan(spec, s).rounds + 1
    if s.num_stages > most:  # the same kernel
        s = replace(s, num_stages=most)
    if 0 < s.prefetch_limit >= s.num_stages - 1:
        s = replace(s, prefetch_limit=0)
    if s.preload_weights:
        processors = multiprocessors(target)
        filled = -(-_blocks(spec, s) // processors) * processors
        return s if "min_blocks" in choice else replace(s, min_blocks=filled)
    if "max_blocks_per_sm" in choice or not s.wgmma:
        return s
    return replace(s, max_blocks_per_sm=enough_blocks(_blocks(spec, s), target))


def _worth(spec: MatmulSpec, s: Schedule, target: Target) -> bool:
    """Whether a schedule is allowed, and no other is plainly better."""
    if s.row_blocks > 1 and s.row_blocks * (s.mma_columns // 8) > MOST_ACCUMULATORS:
        return False
    if s.tokens > MOST_SCALED and spills(spec, s, target):
        return False
    if s.rows >= spec.n + 16 * s.row_blocks or (KernelPlan(spec, s).rounds < 2 and not s.preload_weights):
        return False
    if s.preload_weights and (spills(spec, s, target) or _blocks(spec, s) > 2 * multiprocessors(target)):
        return False  # they are for multiprocessors that have one block or two
    return is_allowed(spec, s, target)
