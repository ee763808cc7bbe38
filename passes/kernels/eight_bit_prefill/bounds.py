"""Lower bounds of what `eight_bit_prefill.cost_model` predicts, in the way of `prefill.bounds`."""

from __future__ import annotations

from functools import lru_cache

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill import cost_model
from lowbit.passes.kernels.eight_bit_prefill.plan import EightBitPrefillPlan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.prefill.bounds import Bounds, Round

_PANELS = ((128, 256), (256, 64))  # columns, and the most tokens of a tile with such panels


@lru_cache(maxsize=64)
def eight_bit_prefill_bounds(spec: MatmulSpec) -> Bounds:
    """Returns the bounds of the eight_bit_prefill family."""

    def whole(time: float) -> float:
        return max(time, spec.bytes / cost_model.MEMORY)

    rounds = tuple(_round(EightBitPrefillPlan(spec, EightBitPrefillSchedule(panel_k=p)), most) for p, most in _PANELS)
    model = cost_model
    return Bounds(rounds, model.LAUNCH, model.END_PER_TOKEN, model.EXCHANGE, model.MULTICAST, 0.0, whole)


def _round(plan: EightBitPrefillPlan, most_tokens: int) -> Round:
    @lru_cache(maxsize=64)
    def time(tokens: int) -> float:
        return cost_model.time_of_round(plan, tokens)

    return Round(plan.step, most_tokens, time)
