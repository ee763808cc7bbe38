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

_FEW = 24  # columns, up to which every multiple of 8 will do (PTX ISA 9.7.15.5.1)


def check_schedule(spec: MatmulSpec, s: EightBitExpertsSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_experts("eight_bit_experts", spec)
    check_compute(spec, target)
    if not target.has_wgmma:
        what = "eight_bit_experts needs sm_90a"
        raise SpecError(f"schedule: {what}, the target is {target}; take an EightBitExpertsMmaSchedule")
    if spec.compute == "i8" and s.last_tokens > _FEW and s.last_tokens % 16:
        columns = f"wgmma of integers has 8, 16, {_FEW} or a multiple of 16 columns"
        raise SpecError(f"schedule: last_tokens={s.last_tokens} must be 0 with tokens={s.tokens}: {columns}")
    plan = bytes_plan(spec, s, WGMMA)
    check_sums(plan)
    check_weight(plan, PER_EXPERT)
    check_shared(plan.base, target)
