"""What a schedule of the prefill kernel with mma.sync must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.legality import OTHERS, check_plan
from lowbit.passes.kernels.prefill_mma.plan import PrefillMmaPlan
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.target import Target

_MOST_REGISTERS = 180  # of a thread, beside those for addresses and on the way to fragments


def check_schedule(spec: MatmulSpec, s: PrefillMmaSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    if target.has_wgmma:
        raise SpecError(f"schedule: prefill_mma is for targets without wgmma, {target} has it; {OTHERS}")
    check_plan(PrefillMmaPlan(spec, s), target)


def spills(spec: MatmulSpec, s: PrefillMmaSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: for sums, and for what is loaded of a round."""
    plan = PrefillMmaPlan(spec, s)
    factors = 1.5 * plan.groups * (1 if spec.zeros == "none" else 2)
    loaded = s.row_blocks * (plan.step * spec.packing.bits / 64 + factors)
    return s.tokens // 2 + loaded > _MOST_REGISTERS
