"""What a schedule of the prefill kernel with mma.sync must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.legality import loaded_registers
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill.legality import OTHERS, check_plan
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.target import Target

_MOST_REGISTERS = 164  # of a thread, beside those for addresses and on the way to fragments
_LOOKUP, _IN_F32, _OUTLIERS = 16, 24, 72  # more on the way: addresses in a table, weights in f32, a panel's outliers


def check_schedule(spec: MatmulSpec, s: PrefillMmaSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    if target.has_wgmma:
        raise SpecError(f"schedule: prefill_mma is for targets without wgmma, {target} has it; {OTHERS}")
    check_plan(PersistentPlan(spec, s, MMA), target)
    if spec.outliers and s.row_blocks > 1:
        raise SpecError(f"schedule: outliers are found by warps of one row block; {s} needs row_blocks=1")


def spills(spec: MatmulSpec, s: PrefillMmaSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: for sums, and for what is loaded of a round."""
    plan = PersistentPlan(spec, s, MMA)
    more = _LOOKUP * (spec.dtype.kind == "table") + _IN_F32 * plan.scaling.in_f32 + _OUTLIERS * spec.outliers
    return s.tokens // 2 + s.row_blocks * loaded_registers(plan) + more > _MOST_REGISTERS
