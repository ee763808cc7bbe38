"""About how long the prefill kernel of invariant matmuls takes: as long as that of other matmuls with the same tiles,
and what it takes to add products to sums, and sums of chains to those before.

The constants are estimates from instruction counts, of sm_90: a warp adds an accumulator a clock, and of two warps of a
quarter of a multiprocessor one hides half of what the other does.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.cost_model import waves_of
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill import cost_model
from lowbit.passes.kernels.prefill_in_order.products import Products
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule
from lowbit.passes.target import Target

_PER_TOKEN = 0.0003  # microseconds until a token's products of a group are added
_WAIT = (0.06, 0.02)  # of a part's product until its registers can be read, with one bank and with two
_PER_CHAIN = 0.3  # until a chain's last product has ended and the next one's first has begun


def predict(spec: MatmulSpec, tokens: int, s: PrefillInOrderSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan = PersistentPlan(spec, s, WGMMA)
    products, chains = Products(plan, s), plan.tiles.chains
    of_chain = _PER_CHAIN
    if products.columns:
        count = chains.steps * chains.order.step_k / products.columns
        of_chain += count * (_PER_TOKEN * s.tokens + _WAIT[s.banks - 1] * s.parts)
    return cost_model.predict(spec, tokens, s, target) + waves_of(plan, tokens, target).count * chains.count * of_chain
