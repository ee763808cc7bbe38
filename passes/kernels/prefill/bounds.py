"""Lower bounds of what `prefill.cost_model` predicts, in the way of `persistent.bounds`."""

from __future__ import annotations

from functools import lru_cache

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import PrefillCosts
from lowbit.passes.kernels.persistent.bounds import Bounds, RoundTime
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill import cost_model
from lowbit.passes.target import Target

_PANELS = ((64, 4), (128, 4), (256, 4), (128, 8))  # columns and stages that candidates have
_REGISTERS = 240  # of a thread, for sums, fragments and codes


@lru_cache(maxsize=64)
def prefill_bounds(spec: MatmulSpec, target: Target) -> Bounds:
    """Returns the bounds of the prefill family."""
    costs = target.costs.prefill

    def whole(time: float) -> float:
        return cost_model.with_memory(spec, time, costs)

    plans = (PersistentPlan(spec, PrefillSchedule(panel_k=p, num_stages=n), WGMMA) for p, n in _PANELS)
    rounds = tuple(_round(plan, step, costs) for plan in plans for step in plan.round.steps)
    times = costs.launch, costs.end_per_token, costs.exchange, costs.multicast, costs.idle
    return Bounds(costs, rounds, *times, whole)


def _round(plan: PersistentPlan, step: int, costs: PrefillCosts) -> RoundTime:
    deep = costs.deep if plan.schedule.num_stages == 8 else 1.0
    panel_k = plan.schedule.panel_k
    codes = step * plan.spec.packing.bits // 64

    @lru_cache(maxsize=64)
    def time(tokens: int) -> float:
        return step // panel_k * cost_model.time_of_panel(plan.spec, panel_k, tokens, costs) * deep

    return RoundTime(step, 2 * (_REGISTERS - panel_k // 2 - codes) + 1, time)
