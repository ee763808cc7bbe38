"""About how long a prefill schedule for activations of 8 bits takes, in the way of `prefill.cost_model`.
Constants are those of a target (`EightBitPrefillCosts`).
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import Costs, EightBitPrefillCosts
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan, bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.cost_model import both, clusters, exchange, late, margin, streamed, waves_of
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.tiles import TileShape
from lowbit.passes.target import Target


def predict(spec: MatmulSpec, tokens: int, s: EightBitPrefillSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan, costs, shared = bytes_plan(spec, s, WGMMA), target.costs.eight_bit_prefill, target.costs.prefill
    if s.streams:
        shares = plan.base.tiles.shares(tokens, clusters(s, target))
        tiles = streamed(s, shares, time_of_round(plan, s.tokens, costs), costs.end_per_token * s.tokens, shared)
        return max(costs.launch + tiles, spec.bytes / costs.memory) * margin(s, shared)
    waves = waves_of(plan.base, tokens, target)
    sharing = costs.multicast if s.cluster > 1 and waves.count > 1 and s.tokens > costs.narrow else 1.0
    tiles = waves.full * _tile(plan, plan.base.tiles.whole, sharing, target.costs)
    tiles += (waves.busy > 0) * _tile(plan, waves.last, sharing, target.costs)
    return max(costs.launch + late(s, target) + tiles, spec.bytes / costs.memory) * margin(s, shared)


def _tile(plan: BytesPlan[EightBitPrefillSchedule], shape: TileShape, sharing: float, all_costs: Costs) -> float:
    """Microseconds of a tile or slice; sharing: what the time of its rounds is multiplied by."""
    costs = all_costs.eight_bit_prefill
    end = costs.end_per_token * shape.share + exchange(shape, costs.exchange, all_costs.prefill)
    return shape.rounds * time_of_round(plan, shape.tokens, costs) * sharing + end


def time_of_round(plan: BytesPlan[EightBitPrefillSchedule], tokens: int, costs: EightBitPrefillCosts) -> float:
    """Microseconds of a round of a tile of so many tokens."""
    spec, columns = plan.spec, plan.base.round.step / 128
    added = 0 if plan.products.keeps_sums else plan.products.of_round
    products = (columns * costs.per_token + added * costs.per_sum) * tokens
    more = costs.folding * spec.folds + costs.table * (spec.dtype.kind == "table") + costs.wide * (spec.dtype.bits == 8)
    more += costs.zeros * (plan.offset > 0 or (plan.subtracts and spec.zeros == "int"))
    decoding = plan.base.round.panels * costs.per_panel + columns * (costs.decoding + more)
    return both(products, decoding, costs.shown)
