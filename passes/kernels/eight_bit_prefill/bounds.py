"""Lower bounds of what `eight_bit_prefill.cost_model` predicts, in the way of `persistent.bounds`."""

from __future__ import annotations

from functools import lru_cache

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import EightBitPrefillCosts
from lowbit.passes.kernels.eight_bit_prefill import cost_model
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan, bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.bounds import Bounds, RoundTime
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.target import Target

_PANELS = ((128, 256), (256, 64))  # columns, and the most tokens of a tile with such panels


@lru_cache(maxsize=64)
def eight_bit_prefill_bounds(spec: MatmulSpec, target: Target) -> Bounds:
    """Returns the bounds of the eight_bit_prefill family."""
    costs = target.costs.eight_bit_prefill

    def whole(time: float) -> float:
        return max(time, spec.bytes / costs.memory)

    plans = ((bytes_plan(spec, EightBitPrefillSchedule(panel_k=p), WGMMA), most) for p, most in _PANELS)
    rounds = tuple(_round(plan, step, most, costs) for plan, most in plans for step in plan.base.round.steps)
    times = costs.launch, costs.end_per_token, costs.exchange, costs.multicast, 0.0
    return Bounds(target.costs.prefill, rounds, *times, whole)


def _round(
    plan: BytesPlan[EightBitPrefillSchedule], step: int, most_tokens: int, costs: EightBitPrefillCosts
) -> RoundTime:
    @lru_cache(maxsize=64)
    def time(tokens: int) -> float:
        return cost_model.time_of_round(plan, tokens, costs) * step / plan.base.round.step

    return RoundTime(step, most_tokens, time)
