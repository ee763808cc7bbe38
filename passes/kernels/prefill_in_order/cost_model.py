"""About how long the prefill kernel of invariant matmuls takes: as long as that of other matmuls with the same tiles,
and what it takes to add products to sums, sums of chains to those before, and x where its sums make up for zeros.

The constants are of an H200: those of sums of x were fitted to 60 launches of five formats with zeros or offsets (which
they predict to 8 %), the others are estimates from instruction counts.
"""

from __future__ import annotations

import math

from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.cost_model import waves_of
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.prefill import cost_model
from lowbit.passes.kernels.prefill_in_order.plan import InOrderPlan
from lowbit.passes.kernels.prefill_in_order.products import MMA_TOKENS, Products
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule
from lowbit.passes.target import Target

_PER_TOKEN = 0.0003  # microseconds until a token's products of a group are added
_WAIT = (0.06, 0.02)  # of a part's product until its registers can be read, with one bank and with two
_PER_SUM = 0.0083  # until an instruction of each warp has added to sums of x
_PER_PANEL = 0.17  # until all warps have those of a panel
_PER_SHARED = 0.0046  # to read and write the totals of a token in shared memory
_SHARED = 5.0  # for every tile with some, whose y is turned around few tokens at a time
_PER_CHAIN = 0.3  # until a chain's last product has ended and the next one's first has begun


def predict(spec: MatmulSpec, tokens: int, s: PrefillInOrderSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan = InOrderPlan(spec, s, WGMMA)
    products, chains = plan.products, plan.tiles.chains
    of_chain = _PER_CHAIN + _PER_SHARED * plan.shared_tokens
    if products.columns:
        count = chains.steps * chains.order.step_k / products.columns
        of_chain += count * (_PER_TOKEN * s.tokens + _WAIT[s.banks - 1] * s.parts)
        if plan.scaling.sums_x:
            of_chain += count * (_PER_TOKEN * s.tokens + _sums_of_x(s, products) / products.per_panel)
    elif plan.scaling.sums_x:
        of_chain += chains.steps * chains.order.step_k / s.panel_k * _sums_of_x(s, products)
    of_tile = chains.count * of_chain + _SHARED * (plan.shared_tokens > 0)
    return cost_model.predict(spec, tokens, s, target) + waves_of(plan, tokens, target).count * of_tile


def _sums_of_x(s: PrefillInOrderSchedule, products: Products) -> float:
    """Microseconds for the sums of x of a panel."""
    instructions = s.tokens // MMA_TOKENS * (s.panel_k // BLOCK_K)
    return _PER_PANEL + _PER_SUM * instructions / math.prod(products.sharing(s.tokens))
