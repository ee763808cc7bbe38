"""About how long the prefill kernel of invariant matmuls for activations of 8 bits with mma.sync takes: as long as that
of other matmuls with the same tiles (`passes.kernels.eight_bit_prefill_mma.cost_model`), and the instructions that add
sums of x, and sums of chains to those before. Nothing was timed.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_mma_in_order.schedule import EightBitMmaInOrderSchedule
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan, bytes_plan
from lowbit.passes.kernels.eight_bit_prefill_mma import cost_model
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.prefill_mma.cost_model import least_time_of_tiles, predict_tiles
from lowbit.passes.target import Target

_ADD = 4.0  # instructions of a warp to add 16 x 8 numbers to others


def predict(spec: MatmulSpec, tokens: int, s: EightBitMmaInOrderSchedule, target: Target) -> float:
    """About how many microseconds a launch for so many tokens takes."""
    plan = bytes_plan(spec, s, BYTES_MMA)
    return predict_tiles(plan.base, tokens, _beside(plan), target)


def least(spec: MatmulSpec, tokens: int, s: EightBitMmaInOrderSchedule, most_k: int, target: Target) -> float:
    """The same at least, with panels of up to `most_k` columns."""
    plan = bytes_plan(spec, s, BYTES_MMA)
    return least_time_of_tiles(plan.base, tokens, cost_model.decoding(spec), most_k, target)


def _beside(plan: BytesPlan[EightBitMmaInOrderSchedule]) -> float:
    """Instructions of a warp for a fragment of weights, besides its products."""
    chains, of_fragment = plan.base.tiles.chains, plan.spec.x.mma_k
    of_sums = _ADD * plan.schedule.warp_tokens / 8  # to add to all of a warp's sums
    found = cost_model.decoding(plan.spec) + cost_model.adding(plan)
    if plan.base.scaling.sums_x and chains.product_columns:
        found += of_sums * of_fragment / chains.product_columns
    return found + of_sums * chains.count * of_fragment / plan.spec.packing.padded_k
