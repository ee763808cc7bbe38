"""The schedules worth timing for a matmul: all that fit, put in order by a simple prediction, and the first of them.

The prediction adds up what moves: the weight at the speed of memory, slower where too few bytes are in flight; x, which
every block reads from the L2 cache; partial sums of splits. It is right about order only roughly: of the 32 to 354
schedules that were timed for each of 40 matmuls on an H200 (2026-11), the first 48 hold one within 5 % of the best.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from dialect.errors import SpecError
from dialect.spec import MatmulSpec
from passes.plan import Plan
from passes.schedule import Schedule
from passes.schedule_choice import check_schedule, default_schedule, multiprocessors, schedule_for, shared_bytes
from passes.target import Target

KEEP = 48
MEMORY, L2 = 4.3e6, 5.5e6  # bytes per microsecond of an H200
IN_FLIGHT = 40e3  # bytes of the weight that must be on their way to a multiprocessor for its share of that
REGISTERS = 96  # of a thread, about
SPLIT = 1.0  # microseconds until the last of several splits has seen the others
MOST_ACCUMULATORS = 16  # row blocks times blocks of 8 tokens, per warp: more would spill


def candidates(spec: MatmulSpec, tile: int, target: Target, keep: int = KEEP) -> list[Schedule]:
    """Schedules for m up to `tile`, the most promising first; what is chosen without a search is among them."""
    chosen = [default_schedule(spec, tile, target), schedule_for(spec, tile, target)]
    others = sorted(all_schedules(spec, tile, target), key=lambda s: predict(spec, tile, s, target))
    return list(dict.fromkeys(chosen + others))[: max(keep, len(chosen))]


def all_schedules(spec: MatmulSpec, tile: int, target: Target) -> list[Schedule]:
    """Every schedule of the search space that is allowed, gives every warp two steps or more of work, and leaves no
    more than half of the multiprocessors idle if another does not."""
    chunk, processors = spec.packing.chunk, multiprocessors(target)
    usual = default_schedule(spec, tile, target)
    space = {
        "tokens": (1, 8) if tile == 1 else (tile,),
        "row_blocks": (1, 2, 4, 8),
        "warps_n": (1, 2, 4),
        "warps_k": (1, 2, 4, 8, 16),
        "step_k": (chunk, 2 * chunk) if chunk < 128 else (chunk,),
        "stages": (2, 3, 4, 6),
        "splits": (1, 2, 4),
    }
    found: list[tuple[Schedule, int]] = []
    for values in itertools.product(*space.values()):
        choice = dict(zip(space, values))
        warps = choice["warps_n"] * choice["warps_k"]
        if not 2 <= warps <= 16 or choice["row_blocks"] * (max(8, tile) // 8) > MOST_ACCUMULATORS:
            continue
        s = replace(usual, **choice)
        plan = Plan(spec, s)
        if s.rows < spec.n + 16 * s.row_blocks and plan.rounds >= 2 and _allowed(spec, s, target):
            found.append((s, plan.tiles * s.splits))
    most = max((blocks for _, blocks in found), default=0)
    return [s for s, blocks in found if 2 * blocks >= min(most, processors)]


def _allowed(spec: MatmulSpec, s: Schedule, target: Target) -> bool:
    try:
        check_schedule(spec, s, target)
    except SpecError:
        return False
    return True


def predict(spec: MatmulSpec, tile: int, s: Schedule, target: Target) -> float:
    """About how many microseconds a call takes; good for comparing schedules, not for more."""
    plan, processors = Plan(spec, s), multiprocessors(target)
    shared = shared_bytes(spec, s)
    resident = min(
        target.shared_per_sm // (shared + 1024),
        target.max_threads_per_sm // s.threads,
        target.registers_per_sm // (s.threads * REGISTERS),
    )
    blocks = plan.tiles * s.splits
    stage = s.rows * s.warps_k * s.step_k * spec.packing.bits / 8
    in_flight = min(max(1, resident), blocks / processors) * stage * (s.stages - 1)
    unused_steps = plan.rounds * s.warps_k * s.splits / plan.steps
    weight = spec.bytes / MEMORY * max(1.0, IN_FLIGHT / in_flight) * unused_steps
    x = plan.tiles * tile * spec.k * 2 / L2
    uneven = -(-blocks // processors) * processors / blocks
    sums = SPLIT + 2 * plan.workspace_bytes / L2 if s.splits > 1 else 0.0
    return (weight + x) * uneven + sums
