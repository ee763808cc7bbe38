"""The schedules of the decode families that are worth timing for a matmul, for the two passes of the tuner.

`all_schedules` is the first pass: the shape of the work (`SHAPE`) decides most. `neighbours` is the second: what
differs in one choice from a schedule that turned out well. `pylib.tune.search_space` puts them in order.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any, TypeVar, get_args

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily
from lowbit.passes.kernels.decode.schedule import MOST_BLOCKS_PER_SM, REFILL_AFTER_MMA, Refill, Schedule, usual_refill
from lowbit.passes.kernels.requirements import can_use_wgmma
from lowbit.passes.kernels.streaming.arithmetic import can_use_raw_codes
from lowbit.passes.kernels.streaming.candidates import without_room
from lowbit.passes.kernels.streaming.cost_model import predict, spills
from lowbit.passes.kernels.streaming.engine_plans import can_spread
from lowbit.passes.kernels.streaming.legality import enough_blocks, shared_room
from lowbit.passes.kernels.streaming.plan import known_plan
from lowbit.passes.kernels.streaming.scaling import MOST_SCALED
from lowbit.passes.target import Target

S = TypeVar("S", bound=Schedule)

SHAPE = ("row_blocks", "warps_n", "warps_k", "split_k", "wgmma", "preload_weights", "spread_k")
# Only the second pass varies these; in the first they follow.
SECOND = (
    *("cluster", "max_blocks_per_sm", "min_blocks", "prefetch_limit"),
    *("refill", "overlap_groups", "raw_codes", "outliers_by_step"),
)
MOST_WARPS = 16  # of a block
MOST_ACCUMULATORS = 16  # row blocks times blocks of 8 tokens, per warp: more would spill


def space(
    spec: MatmulSpec, token_tile: int, target: Target, kind: type[Schedule] = Schedule
) -> dict[str, tuple[Any, ...]]:
    """Returns the values that each field of a schedule of this type may have, in order."""
    chunk = spec.packing.chunk
    splits = (1, 2, 4, 8) if target.has_clusters else (1, 2, 4)
    may_use_wgmma = token_tile >= 8 and can_use_wgmma(spec, target)
    found: dict[str, tuple[Any, ...]] = {
        "tokens": (1, 8) if token_tile == 1 else (token_tile,),
        "row_blocks": (1, 2, 4, 8),
        "warps_n": (1, 2, 4, 8, 16),
        "warps_k": (1, 2, 3, 4, 5, 6, 8, 16),
        "step_k": tuple(step for step in (32, 64, 128, 256) if step % chunk == 0 and step <= 4 * chunk),
        "num_stages": (1, 2, 3, 4, 6, 8),  # 1 for preloaded weights, and only for them
        "split_k": splits,
        "cluster": splits if target.has_clusters else (1,),
        "wgmma": ((False, True) if token_tile == 8 else (True,)) if may_use_wgmma else (False,),
        "max_blocks_per_sm": (0, 1, 2),
        "min_blocks": (0, target.multiprocessors, 2 * target.multiprocessors),
        "prefetch_limit": (0, 1, 2),
        "refill": get_args(Refill) if token_tile >= REFILL_AFTER_MMA // 2 else ("before_mma",),
        "preload_weights": (False, True),
        "overlap_groups": (False, True) if may_use_wgmma else (False,),
        "raw_codes": (False, True) if can_use_raw_codes(spec) else (False,),
        "outliers_by_step": (False, True) if may_use_wgmma and spec.outliers else (False,),
        "spread_k": (False, True) if token_tile == 1 and can_spread(spec) else (False,),
    }
    limits = ("tokens", "warps_n", "wgmma", "preload_weights", "raw_codes", "spread_k")
    fixed = limits if kind.integer_mma else ()
    return found | {name: found[name][:1] for name in fixed}


def neighbours(spec: MatmulSpec, token_tile: int, target: Target, around: S, family: KernelFamily[S]) -> list[S]:
    """The family's schedules one step of one field away from another, or any in a field of `SECOND`, the most promising
    first. A field of `SECOND` that is as in the first pass follows the others, as it did there."""

    kind = family.schedule_type

    def limited(s: S) -> S:
        """Alike for schedules that make the same kernel, as a limit to what shared memory has no room for is none."""
        room = min(shared_room(known_plan(spec, s), target), MOST_BLOCKS_PER_SM)
        return replace(s, max_blocks_per_sm=min(s.max_blocks_per_sm or room, room))

    fields = asdict(around)
    first = _completed(kind, {name: value for name, value in fields.items() if name not in SECOND}, spec, target)
    fields = {name: value for name, value in fields.items() if name not in SECOND or value != getattr(first, name)}
    found: list[S | None] = []
    for name, values in space(spec, token_tile, target, kind).items():
        now = getattr(around, name)
        near = [v for v in values if v < now][-1:] + [v for v in values if v > now][:1]
        found += [_schedule(family, fields | {name: v}, spec, target) for v in (values if name in SECOND else near)]
    kernels = {limited(around): around}
    for s in filter(None, found):
        kernels.setdefault(limited(s), s)
    return sorted(list(kernels.values())[1:], key=lambda s: predict(spec, token_tile, s, target))


def all_schedules(spec: MatmulSpec, token_tile: int, target: Target, family: KernelFamily[S]) -> list[S]:
    """Every schedule of a family's first pass that is allowed, gives every warp two steps or more of work, and leaves
    no more than half of the multiprocessors idle if another does not."""
    every_field = space(spec, token_tile, target, family.schedule_type)
    fields = {name: values for name, values in every_field.items() if name not in SECOND}
    choices = (dict(zip(fields, values)) for values in itertools.product(*fields.values()))
    every = (_schedule(family, choice, spec, target) for choice in choices)
    found = [s for s in every if s]
    most = max((_blocks(spec, s) for s in found), default=0)
    processors = target.multiprocessors
    return [s for s in found if 2 * _blocks(spec, s) >= min(most, processors) * (0.9 if s.preload_weights else 1)]


def _blocks(spec: MatmulSpec, s: Schedule) -> int:
    return known_plan(spec, s).steps.tiles * s.split_k


def _schedule(family: KernelFamily[S], choice: dict[str, Any], spec: MatmulSpec, target: Target) -> S | None:
    """The schedule with these fields, if it is worth trying."""
    if not 2 <= choice["warps_n"] * choice["warps_k"] <= MOST_WARPS:
        return None
    if choice["preload_weights"] != (choice["num_stages"] == 1):
        return None
    try:
        s = _completed(family.schedule_type, choice, spec, target)
    except SpecError:
        return None
    return s if _worth(spec, s, target) and family.allows(spec, s, target) else None


def _completed(kind: type[S], choice: dict[str, Any], spec: MatmulSpec, target: Target) -> S:
    """Returns the schedule with these fields. Fields of `SECOND` that are absent have the first pass's values.

    Splits form a cluster where they can. No more blocks run at a time than there are, or than are needed. Tiles of many
    tokens refill their buffers after the first product and let each warp run on its own. Where blocks of two kernels
    are to overlap, the grid fills the multiprocessors.
    """
    splits = choice["split_k"]
    cluster = splits if target.has_clusters and splits <= 8 else 1
    loops = choice["wgmma"] and not choice["preload_weights"]
    refill = usual_refill(choice["tokens"], choice["warps_n"]) if loops else "before_mma"
    usual: dict[str, Any] = {"cluster": cluster, "refill": refill}
    s = kind(**(usual | choice))
    most = known_plan(spec, s).steps.rounds + 1
    if s.num_stages > most:  # the same kernel
        s = replace(s, num_stages=most)
    if 0 < s.prefetch_limit >= s.num_stages - 1:
        s = replace(s, prefetch_limit=0)
    if s.preload_weights:
        processors = target.multiprocessors
        filled = -(-_blocks(spec, s) // processors) * processors
        return s if "min_blocks" in choice else replace(s, min_blocks=filled)
    if "max_blocks_per_sm" in choice:
        return s
    if not s.wgmma:
        return without_room(known_plan(spec, s), s, target)
    return replace(s, max_blocks_per_sm=enough_blocks(_blocks(spec, s), target))


def _worth(spec: MatmulSpec, s: Schedule, target: Target) -> bool:
    """Whether no other schedule is plainly better, if this one is allowed."""
    if s.row_blocks > 1 and s.row_blocks * (s.mma_columns // 8) > MOST_ACCUMULATORS:
        return False
    plan = known_plan(spec, s)
    if s.tokens > MOST_SCALED and spills(plan, target):
        return False
    if s.rows >= spec.n + 16 * s.row_blocks or (plan.steps.rounds < 2 and not s.preload_weights):
        return False
    # Preloaded weights are for multiprocessors that have one block or two.
    return not (s.preload_weights and (spills(plan, target) or _blocks(spec, s) > 2 * target.multiprocessors))
