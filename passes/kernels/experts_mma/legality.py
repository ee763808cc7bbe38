"""What a schedule of the kernel for experts must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.legality import check_shared, loaded_registers
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_mma.legality import spills as spills_alone
from lowbit.passes.kernels.requirements import check_experts, check_in_act
from lowbit.passes.target import Target

_MOST_SHARED = 120  # registers of a thread, of 128 that it has where two blocks share a multiprocessor
_OF_SYSTEM = 1024  # bytes that the system takes for each block


def spills(spec: MatmulSpec, s: ExpertsMmaSchedule) -> bool:
    """Tells whether a thread is likely to need more registers than there are: as in kernels for other tokens, and where
    two blocks share a multiprocessor, for sums, for fragments of x, and for what is loaded of a round."""
    if s.blocks_per_sm == 1:
        return spills_alone(spec, s)
    plan = PersistentPlan(spec, s, MMA)
    return 3 * s.tokens // 2 + s.row_blocks * loaded_registers(plan) > _MOST_SHARED


def check_schedule(spec: MatmulSpec, s: ExpertsMmaSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_experts("experts_mma", spec)
    check_in_act("experts_mma", spec, "EightBitExpertsMmaSchedule")
    if spec.outliers and s.row_blocks > 1:
        raise SpecError(f"schedule: outliers are found by warps of one row block; {s} needs row_blocks=1")
    plan = PersistentPlan(spec, s, MMA)
    check_shared(plan, target)
    check_blocks(plan, s, target)


def check_blocks(plan: PersistentPlan, s: ExpertsMmaSchedule, target: Target) -> None:
    """Raises SpecError where warps cannot share tiles of so few slots, or blocks a multiprocessor."""
    if s.tokens == 16 and s.row_blocks > 1:
        raise SpecError(f"schedule: two warps cannot share tokens={s.tokens}; take row_blocks=1, or tokens=32")
    if s.blocks_per_sm * (plan.shared_bytes + _OF_SYSTEM) > target.shared_per_sm:
        needed = f"{plan.shared_bytes} bytes of shared memory each"
        raise SpecError(
            f"schedule: blocks_per_sm={s.blocks_per_sm} of {needed} do not fit {target}, whose multiprocessors have "
            f"{target.shared_per_sm}; take blocks_per_sm=1, fewer tokens or num_stages, or a smaller panel_k"
        )
