"""About how long the prefill kernel of invariant matmuls with mma.sync takes: as long as that of other matmuls with the
same tiles (`passes.kernels.prefill_mma.cost_model`), and the instructions that add products to sums and sums of chains
to those before. Nothing was timed.
"""

from __future__ import annotations

from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import WARPS
from lowbit.passes.kernels.prefill_mma.cost_model import decoding, least_time_of_tiles, predict_tiles
from lowbit.passes.kernels.prefill_mma_in_order.schedule import PrefillMmaInOrderSchedule
from lowbit.passes.target import Target

_ADD = 4.0  # instructions of a warp to add a product of 16 x 8 to sums, or as many sums to others


def predict(spec: MatmulSpec, tokens: int, s: PrefillMmaInOrderSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes."""
    plan = PersistentPlan(spec, s, MMA)
    return predict_tiles(plan, tokens, _beside(plan), target)


def least(spec: MatmulSpec, tokens: int, s: PrefillMmaInOrderSchedule, most_k: int, target: Target) -> float:
    """The same at least, with panels of up to `most_k` columns."""
    plan = PersistentPlan(spec, s, MMA)
    return least_time_of_tiles(plan, tokens, _beside(plan), most_k, target)


def _beside(plan: PersistentPlan) -> float:
    """Instructions of a warp for a fragment of weights, besides its products: to decode it, to add up x where that
    makes up for zeros, and to add products and sums."""
    chains, columns = plan.tiles.chains, plan.schedule.warp_tokens / 8
    found, row_blocks = decoding(plan.spec), WARPS // plan.schedule.warps[0]
    if of_product := chains.product_columns:
        added = _ADD * columns * (2 if plan.scaling.sums_x else 1)
        found += added * BLOCK_K / of_product
    if plan.scaling.sums_x:
        found += columns / row_blocks
    return found + _ADD * columns * chains.count * BLOCK_K / plan.spec.packing.padded_k
