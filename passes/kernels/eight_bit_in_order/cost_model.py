"""About how long the prefill kernel of invariant matmuls for activations of 8 bits takes: as long as that of other
matmuls with the same tiles, and what it takes to add sums of chains to those before, and x where its sums make up for
zeros. The constants are those that were fitted for x of 16 bits; nothing was timed.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_in_order.schedule import EightBitInOrderSchedule
from lowbit.passes.kernels.eight_bit_prefill import cost_model
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.persistent.cost_model import waves_of
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.target import Target

_PER_TOKEN = 0.0003  # microseconds until a token's sums of x times an offset are added to those of a product
_PER_PANEL = 0.17  # until all warps have the sums of x of a panel
_PER_CHAIN = 0.3  # until a chain's last product has ended and the next one's first has begun


def predict(spec: MatmulSpec, tokens: int, s: EightBitInOrderSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes: for comparing schedules."""
    plan = bytes_plan(spec, s, WGMMA)
    chains, of_chain = plan.base.tiles.chains, _PER_CHAIN
    if plan.base.scaling.sums_x:
        columns, of_product = chains.steps * chains.order.step_k, chains.product_columns
        of_chain += _PER_PANEL * (columns // s.panel_k if of_product else 1)
        of_chain += _PER_TOKEN * s.tokens * (columns // of_product if of_product else 1)
    of_tile = chains.count * of_chain
    return cost_model.predict(spec, tokens, s, target) + waves_of(plan.base, tokens, target).count * of_tile
