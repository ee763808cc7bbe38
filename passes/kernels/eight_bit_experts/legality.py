"""What a schedule of the kernel for experts and activations of 8 bits on Hopper must obey for a spec on a target. No
MLIR is needed here."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_experts.schedule import EightBitExpertsSchedule
from lowbit.passes.kernels.eight_bit_prefill.legality import check_sums, check_weight
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.legality import check_shared
from lowbit.passes.kernels.requirements import PER_EXPERT, check_compute, check_experts
from lowbit.passes.target import Target


def check_schedule(spec: MatmulSpec, s: EightBitExpertsSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_experts("eight_bit_experts", spec)
    check_compute(spec, target)
    if not target.has_wgmma:
        what = "eight_bit_experts needs sm_90a"
        raise SpecError(f"schedule: {what}, the target is {target}; take an EightBitExpertsMmaSchedule")
    plan = bytes_plan(spec, s, WGMMA)
    check_sums(plan)
    check_weight(plan, PER_EXPERT)
    check_shared(plan.base, target)
