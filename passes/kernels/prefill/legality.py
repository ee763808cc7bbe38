"""What a prefill schedule must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.plan import fits_async_x
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.schedule import PrefillSchedule
from lowbit.passes.lowering.recipes import compute_element
from lowbit.passes.target import Target

OTHERS = "take a Schedule of the decode family"
_MOST_REGISTERS = 240  # of a thread, beside those for addresses and on the way to fragments
_LEAST_ROUNDS = 2  # of one round, the assembler orders products and the sums' first values wrongly, and says so (C7514)


def check_schedule(spec: MatmulSpec, s: PrefillSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    plan = PrefillPlan(spec, s)
    if not target.has_wgmma:
        raise SpecError(f"schedule: prefill needs sm_90a, the target is {target}; {OTHERS}")
    check_plan(plan, target)
    if plan.rounds < _LEAST_ROUNDS:
        raise SpecError(f"schedule: k={spec.k} must be more than one round of {plan.step} columns; {OTHERS}")


def check_plan(plan: PrefillPlan, target: Target) -> None:
    """Raises SpecError where a kernel that scales weights in registers does not fit a spec, or a target's memory."""
    s = plan.schedule
    if why := _misfit(plan):
        raise SpecError(f"schedule: {why}; {OTHERS}")
    if plan.shared_bytes > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {s} needs {plan.shared_bytes} bytes of shared memory, {target} allows "
            f"{target.max_shared_per_block}; take fewer tokens or num_stages, or a smaller panel_k"
        )


def _misfit(plan: PrefillPlan) -> str:
    """Returns what of a spec does not fit, or "" if all does."""
    spec = plan.spec
    if compute_element(spec.dtype, spec.act) != spec.act or not fits_async_x(spec):
        return (
            f"prefill multiplies {spec.act} by {spec.act} in whole 16-byte pieces of x; {spec.weight} with k={spec.k} "
            f"and groups of {spec.group_size} does not fit"
        )
    if not plan.step:
        _, most = plan.steps
        return f"groups of {spec.group_size} and rounds of up to {most} columns must divide one another"
    more = [name for name in ("outliers", "row_scales", "bilevel") if getattr(spec, name)]
    more += ["offsets"] * (spec.zeros == "offset") + ["activations of 8 bits"] * (spec.compute is not None)
    if more:
        return f"prefill takes no {more[0]}"
    if plan.groups and not plan.scales_weights:
        return f"{spec} has scales of groups that are no numbers of {spec.act}, which weights are rounded to"
    if spec.zeros == "float" and not plan.groups:
        return f"{spec} has zeros that take sums of x"
    return ""


def spills(spec: MatmulSpec, s: PrefillSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: for sums, for two panels' fragments, and for
    what is loaded of a round."""
    plan = PrefillPlan(spec, s)
    loaded = plan.step * spec.packing.bits // 64 + plan.groups * (1 if spec.zeros == "none" else 2)
    return s.tokens // 2 + s.panel_k // 2 + loaded > _MOST_REGISTERS
