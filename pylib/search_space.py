"""The schedules worth timing for a matmul: all that fit, put in order by a simple prediction, in two passes.

`candidates` is the coarse pass: the shape of the work (`SHAPE`) decides most, so every shape comes once, with what is
predicted to be best for it, before any comes twice. `neighbours` is the second: what differs in one choice from a
schedule that turned out well.

What is predicted is `passes.cost_model`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace

from dialect.errors import SpecError
from dialect.spec import MatmulSpec
from passes.cost_model import predict
from passes.plan import Plan
from passes.schedule import Schedule
from passes.schedule_check import check_schedule, enough_blocks, has_wgmma, multiprocessors
from passes.schedule_choice import default_schedule, schedule_for
from passes.target import Target

SHAPE = ("row_blocks", "warps_n", "warps_k", "splits", "wgmma")
SECOND = ("max_blocks",)  # choices that only the second pass makes

MOST_WARPS = 16  # of a block
MOST_ACCUMULATORS = 16  # row blocks times blocks of 8 tokens, per warp: more would spill


def space(spec: MatmulSpec, tile: int, target: Target) -> dict[str, tuple[int, ...]]:
    """What each field of a `Schedule` may be, in order; but for `cluster`, which follows from splits."""
    chunk = spec.packing.chunk
    return {
        "tokens": (1, 8) if tile == 1 else (tile,),
        "row_blocks": (1, 2, 4, 8),
        "warps_n": (1, 2, 4, 8),
        "warps_k": (1, 2, 3, 4, 5, 6, 8, 16),
        "step_k": tuple(step for step in (32, 64, 128, 256) if step % chunk == 0 and step <= 4 * chunk),
        "stages": (2, 3, 4, 6, 8),
        "splits": (1, 2, 4, 8) if target.has_clusters else (1, 2, 4),
        "wgmma": ((0, 1) if tile <= 8 else (1,)) if has_wgmma(spec, target) else (0,),
        "max_blocks": (0, 1, 2),
    }


def candidates(spec: MatmulSpec, tile: int, target: Target, count: int) -> list[Schedule]:
    """At most `count` schedules for m up to `tile`, the most promising first; but before them what is chosen without
    a search, by the rule and from the tables. Kinds of kernels (with splits, with wgmma) take turns: how the prediction
    compares them is a guess."""
    chosen = [default_schedule(spec, tile, target), schedule_for(spec, tile, target)]
    ordered = sorted(all_schedules(spec, tile, target), key=lambda s: predict(spec, tile, s, target))
    shapes: dict[tuple[int, ...], Schedule] = {}
    for s in ordered:
        shapes.setdefault(tuple(getattr(s, name) for name in SHAPE), s)
    kinds: dict[tuple[bool, int], list[Schedule]] = {}
    for s in shapes.values():
        kinds.setdefault((s.splits > 1, s.wgmma), []).append(s)
    in_turn = [s for row in itertools.zip_longest(*kinds.values()) for s in row if s]
    return list(dict.fromkeys([*chosen, *in_turn, *ordered]))[: max(count, len(chosen))]


def neighbours(spec: MatmulSpec, tile: int, target: Target, around: Schedule) -> list[Schedule]:
    """The schedules one step of one field away from another, the most promising first."""
    found: list[Schedule] = []
    for name, values in space(spec, tile, target).items():
        now = getattr(around, name)
        for value in [v for v in values if v < now][-1:] + [v for v in values if v > now][:1]:
            found += _schedules(asdict(around) | {name: value}, spec, target)
    found = [s for s in dict.fromkeys(found) if s != around]
    return sorted(found, key=lambda s: predict(spec, tile, s, target))


def all_schedules(spec: MatmulSpec, tile: int, target: Target) -> list[Schedule]:
    """Every schedule of the first pass that is allowed, gives every warp two steps or more of work, and leaves no
    more than half of the multiprocessors idle if another does not."""
    fields = {name: values for name, values in space(spec, tile, target).items() if name not in SECOND}
    found: list[Schedule] = []
    for values in itertools.product(*fields.values()):
        found += itertools.islice(_schedules(dict(zip(fields, values)), spec, target), 1)
    most = max((_blocks(spec, s) for s in found), default=0)
    return [s for s in found if 2 * _blocks(spec, s) >= min(most, multiprocessors(target))]


def _blocks(spec: MatmulSpec, s: Schedule) -> int:
    return Plan(spec, s).tiles * s.splits


def _usual_blocks(spec: MatmulSpec, s: Schedule, target: Target) -> int:
    """What `max_blocks` is, as long as only the first pass was made."""
    return enough_blocks(spec, s, target) if s.wgmma else 0


def _schedules(choice: dict[str, int], spec: MatmulSpec, target: Target) -> Iterator[Schedule]:
    """Those of these fields that are worth trying: with splits in a cluster, where there are, then without."""
    if not 2 <= choice["warps_n"] * choice["warps_k"] <= MOST_WARPS:
        return
    for cluster in dict.fromkeys((choice["splits"] if target.has_clusters else 1, 1)):
        try:
            s = Schedule(**choice | {"cluster": cluster})
        except SpecError:
            continue
        if "max_blocks" not in choice:
            s = replace(s, max_blocks=_usual_blocks(spec, s, target))
        if _worth(spec, s, target):
            yield s


def _worth(spec: MatmulSpec, s: Schedule, target: Target) -> bool:
    """Whether a schedule is allowed, and no other is plainly better."""
    if s.row_blocks * (s.columns // 8) > MOST_ACCUMULATORS:
        return False
    if s.rows >= spec.n + 16 * s.row_blocks or Plan(spec, s).rounds < 2:
        return False
    try:
        check_schedule(spec, s, target)
    except SpecError:
        return False
    return True
