"""The schedules worth timing for a matmul: all that fit, put in order by a simple prediction, in two passes.

`candidates` is the coarse pass: the shape of the work (`SHAPE`) decides most, so every shape comes once, with what is
predicted to be best for it, before any comes twice. `neighbours` is the second: what differs in one choice from a
schedule that turned out well.

The prediction is a roofline with three bounds: the weight from memory, slower where too few bytes are in flight; the
weight and x, which every block reads for itself, through the L2 cache; and decoding, fragments and mma, slower where
there are few warps. On top come the rounds of the pipeline, the start and end of a block, multiprocessors that the
last blocks leave idle, and sums over splits. For the 46 matmuls of the H200's table (2026-11) it is within 20 % or so
of what was measured, nf4 aside. The shape of the winner is among the first 40 for 42 of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, replace

from dialect.errors import SpecError
from dialect.spec import MatmulSpec
from passes.plan import Plan
from passes.schedule import Schedule
from passes.schedule_choice import (
    check_schedule,
    default_schedule,
    enough_blocks,
    has_wgmma,
    multiprocessors,
    schedule_for,
    shared_bytes,
)
from passes.target import Target

SHAPE = ("row_blocks", "warps_n", "warps_k", "splits", "wgmma")
SECOND = ("max_blocks",)  # choices that only the second pass makes

# Of an H200: bytes per microsecond, clocks per microsecond.
MEMORY, L2, CLOCK = 3.9e6, 6.5e6, 1800.0
IN_FLIGHT = 26e3  # bytes of the weight that must be on their way to a multiprocessor for its share of the memory
WARPS = 5.5  # on a multiprocessor, to hide the latency of arithmetic
ROUND, BLOCK = 0.07, 0.5  # microseconds: of a round; to start and end a block
SPLIT, CLUSTER = 2.7, 2.4  # microseconds until all splits are there: through device memory; within a cluster
WGMMA = 0.6  # of the time that mma.sync takes
CROWD = 0.15  # of the time, where as many blocks again fit as are needed
BARRIER = 1.5  # what it costs that warps share x, and wait for one another
IDLE = 0.3  # of the time that the last blocks leave multiprocessors idle; the next kernel uses the rest
MOST_WARPS = 16  # of a block
MOST_ACCUMULATORS = 16  # row blocks times blocks of 8 tokens, per warp: more would spill
# Clocks of a multiprocessor to decode 256 codes, by bits.
DECODE = {1: 2.5, 2: 2.8, 3: 4.6, 4: 4.9, 5: 5.0, 6: 6.0, 7: 6.0, 8: 5.8}
DECODE_FLOAT, DECODE_TABLE = 1.4, 9.0  # times as many; clocks whatever the bits


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
        "wgmma": ((0, 1) if tile == 8 else (1,)) if tile >= 8 and has_wgmma(spec, target) else (0,),
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


def predict(spec: MatmulSpec, tile: int, s: Schedule, target: Target) -> float:
    """About how many microseconds a call takes; good for comparing schedules, not for more."""
    plan, processors, bits = Plan(spec, s), multiprocessors(target), spec.packing.bits
    resident = _resident(spec, s, target)
    blocks = plan.tiles * s.splits
    waves = blocks / processors
    side_by_side = min(resident, waves)

    in_flight = side_by_side * s.rows * s.warps_k * s.step_k * bits / 8 * (s.stages - 1)
    memory = spec.bytes / MEMORY * max(1.0, IN_FLIGHT / in_flight)
    cache = (spec.bytes + plan.tiles * tile * spec.k * 2) / L2

    # Clocks per mma's worth of weights: tensor core (two per mma), shared memory (128 bytes a clock), integer units.
    mma = 2 * s.columns / 8
    # wgmma takes half as long for its products, and reads x from shared memory by itself.
    mma, fragments = (mma * WGMMA, 0.0) if s.wgmma else (mma, mma / (4 * s.row_blocks))
    pipes = mma, bits / 2 + fragments, _decode_clocks(spec)
    clocks = (max(pipes) + sum(pipes)) / 2  # they overlap in part
    arithmetic = spec.n * spec.k / 256 / processors * clocks / CLOCK
    arithmetic *= max(1.0, WARPS / (side_by_side * s.threads / 32)) * (BARRIER if s.warps_n > 1 and tile > 1 else 1.0)

    work = max(memory, cache, arithmetic)
    work *= plan.rounds * s.warps_k * s.splits / plan.steps  # steps beyond the last
    work += ROUND * plan.rounds * waves / side_by_side
    # Blocks of the next kernel that start early crowd some multiprocessors, where more fit than are needed.
    work *= 1 + CROWD * (min(2.0, resident / math.ceil(waves)) - 1 if resident > waves else 0.0)
    work *= 1 + IDLE * (math.ceil(waves) / waves - 1)
    ends = BLOCK * max(1.0, waves / side_by_side) * (1.0 if resident == 1 else 2 / 3)
    sums = 2 * plan.tiles * s.splits * s.rows * s.columns * 4 / L2 if s.splits > 1 else 0.0
    sums += 0.0 if s.splits == 1 else SPLIT if s.cluster == 1 else CLUSTER
    return work + ends + sums


def _resident(spec: MatmulSpec, s: Schedule, target: Target) -> int:
    """Blocks that a multiprocessor holds at a time, about."""
    used = 60 + 9 * s.row_blocks * s.columns // 8
    if s.wgmma:
        used = 40 + s.step_k // 8 + s.tokens // 2 * (1 + s.row_blocks)
    registers = min(255, used, target.registers_per_sm // s.threads)
    fitting = min(
        target.shared_per_sm // (shared_bytes(spec, s) + 1024),
        target.max_threads_per_sm // s.threads,
        target.registers_per_sm // (s.threads * registers),
    )
    return max(1, min(fitting, s.max_blocks or fitting))


def _decode_clocks(spec: MatmulSpec) -> float:
    if spec.dtype.kind == "table":
        return DECODE_TABLE
    return DECODE[spec.packing.bits] * (DECODE_FLOAT if spec.dtype.kind == "float" else 1.0)
