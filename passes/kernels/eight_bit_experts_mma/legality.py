"""What a schedule of the kernel for experts and activations of 8 bits with mma.sync must obey for a spec on a target,
without MLIR."""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_experts_mma.schedule import EightBitExpertsMmaSchedule
from lowbit.passes.kernels.eight_bit_prefill.legality import check_weight
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill_mma.legality import spills as spills_alone
from lowbit.passes.kernels.experts_mma.legality import check_blocks
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.persistent.legality import check_shared
from lowbit.passes.kernels.requirements import PER_EXPERT, check_compute, check_experts
from lowbit.passes.target import Target

_MOST_SHARED = 32  # slots of a tile where two blocks share a multiprocessor
_MOST_PROMOTED = 64  # slots of a tile, where products are added to sums in f32 beside what the table of tiles says


def spills(spec: MatmulSpec, s: EightBitExpertsMmaSchedule) -> bool:
    """Tells whether a thread is likely to need more registers than there are: as in kernels for other tokens, and of
    larger tiles; where two blocks share a multiprocessor, for what folded weights have besides codes and scales."""
    if s.blocks_per_sm > 1:
        has_more = spec.bilevel is not None or spec.zeros in ("float", "offset")
        return s.tokens > _MOST_SHARED or (spec.folds and has_more)
    promotes = not bytes_plan(spec, s, BYTES_MMA).products.keeps_sums
    return (promotes and s.tokens > _MOST_PROMOTED) or spills_alone(spec, s)


def check_schedule(spec: MatmulSpec, s: EightBitExpertsMmaSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_experts("eight_bit_experts_mma", spec)
    check_compute(spec, target)
    plan = bytes_plan(spec, s, BYTES_MMA)
    check_weight(plan, PER_EXPERT)
    check_shared(plan.base, target)
    check_blocks(plan.base, s, target)
