"""About how long a prefill schedule takes: a tile's time is that of its panels and its end, and tiles come in waves.

Constants are those of a target (`PrefillCosts`). A panel is multiplied while the next one is decoded, so it takes the
longer of the two and a part of the shorter. Reading the weight from memory adds as one leg of a right triangle to the
other: so it is within 8 % for 20 of 24 timings of 48 to 112 tokens, where it shows.
"""

from __future__ import annotations

import math

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import PrefillCosts
from lowbit.passes.kernels.persistent.cost_model import both, clusters, exchange, late, margin, streamed, waves_of
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.tiles import TileShape, Waves
from lowbit.passes.target import Target


def predict(spec: MatmulSpec, tokens: int, s: PrefillSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan, costs = PersistentPlan(spec, s, WGMMA), target.costs.prefill
    if s.streams:
        round_ = plan.round.panels * _panel(plan, s.tokens, costs) * (costs.deep if s.num_stages == 8 else 1.0)
        tiles = streamed(
            s, plan.tiles.shares(tokens, clusters(s, target)), round_, costs.end_per_token * s.tokens, costs
        )
    else:
        waves = waves_of(plan, tokens, target)
        pace = _pace(s, waves, costs)
        tiles = waves.full * _tile(plan, plan.tiles.whole, pace, costs)
        tiles += (waves.busy > 0) * _tile(plan, waves.last, pace, costs)
    return with_memory(spec, costs.launch + late(s, target) + tiles, costs) * margin(s, costs)


def with_memory(spec: MatmulSpec, time: float, costs: PrefillCosts) -> float:
    """Microseconds of a launch that would take so many, if the weight were there at once."""
    return math.hypot(time, spec.bytes / costs.memory)


def _pace(s: PrefillSchedule, waves: Waves, costs: PrefillCosts) -> float:
    """How much of their time panels take: less where blocks share x, and in a single wave that leaves others idle."""
    if waves.count > 1:
        return costs.multicast if s.cluster > 1 else 1.0
    return 1.0 if waves.full else 1 - costs.idle * (1 - waves.busy)


def _tile(plan: PersistentPlan, shape: TileShape, pace: float, costs: PrefillCosts) -> float:
    """Microseconds of a tile or slice; pace: what the time of its panels is multiplied by."""
    panels = shape.rounds * plan.round.panels * _panel(plan, shape.tokens, costs) * pace
    return panels + costs.end_per_token * shape.share + exchange(shape, costs.exchange, costs)


def _panel(plan: PersistentPlan, tokens: int, costs: PrefillCosts) -> float:
    return time_of_panel(plan.spec, plan.schedule.panel_k, tokens, costs)


def time_of_panel(spec: MatmulSpec, panel_k: int, tokens: int, costs: PrefillCosts) -> float:
    """Microseconds of a panel of so many columns, in a tile of so many tokens."""
    columns = panel_k / 64
    products = columns * (costs.per_columns + costs.per_token * tokens)
    decoding = costs.per_panel + columns * costs.decoding[spec.dtype.kind]
    return both(products, decoding, costs.shown)
