"""What a schedule of the kernel for few slots of each expert must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.experts_decode.schedule import ExpertsDecodeSchedule
from lowbit.passes.kernels.requirements import check_experts, check_in_act
from lowbit.passes.kernels.streaming import legality
from lowbit.passes.kernels.streaming.cost_model import blocks_per_sm
from lowbit.passes.kernels.streaming.plan import known_plan
from lowbit.passes.target import Target


def check_schedule(spec: MatmulSpec, s: ExpertsDecodeSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_in_act("experts_decode", spec, "EightBitExpertsDecodeSchedule")
    if spec.outliers:
        raise SpecError("schedule: experts_decode adds no outliers; take an ExpertsMmaSchedule")
    check_streaming("experts_decode", spec, s, target)


def check_streaming(family: str, spec: MatmulSpec, s: ExpertsDecodeSchedule, target: Target) -> None:
    """Raises SpecError where blocks that take turns at experts' tiles do not fit a spec or a target."""
    check_experts(family, spec)
    legality.check_schedule(spec, s, target)
    room = blocks_per_sm(known_plan(spec, s), target)
    if room < s.max_blocks_per_sm:
        given = f"max_blocks_per_sm={s.max_blocks_per_sm}, but {target} has room for {room} of these blocks"
        raise SpecError(f"schedule: {given}; take fewer, or a smaller num_stages, warps_k or step_k")
