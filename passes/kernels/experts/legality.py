"""What a schedule of the kernel for experts on Hopper must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.legality import check_shared
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.requirements import check_experts, check_in_act
from lowbit.passes.target import Target


def check_schedule(spec: MatmulSpec, s: ExpertsSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_experts("experts", spec)
    check_in_act("experts", spec, "EightBitExpertsSchedule")
    if not target.has_wgmma:
        raise SpecError(f"schedule: experts needs sm_90a, the target is {target}; take an ExpertsMmaSchedule")
    check_shared(PersistentPlan(spec, s, WGMMA), target)
