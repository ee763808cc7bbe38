"""What a prefill schedule must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.legality import has_wgmma
from lowbit.passes.kernels.prefill.plan import STEPS, PrefillPlan
from lowbit.passes.kernels.prefill.schedule import PrefillSchedule
from lowbit.passes.target import Target

_MOST_REGISTERS = 240  # of a thread, beside those for addresses and on the way to fragments
_LEAST_ROUNDS = 2  # of one round, the assembler orders products and the sums' first values wrongly, and says so (C7514)


def check_schedule(spec: MatmulSpec, s: PrefillSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    plan = PrefillPlan(spec, s)
    if why := _misfit(plan, target):
        raise SpecError(f"schedule: {why}")
    if plan.shared_bytes > target.max_shared_per_block:
        raise SpecError(
            f"schedule: {s} needs {plan.shared_bytes} bytes of shared memory, {target} allows "
            f"{target.max_shared_per_block}; take fewer tokens or num_stages, or a smaller panel_k"
        )


def _misfit(plan: PrefillPlan, target: Target) -> str:
    """Returns what does not fit and what to do about it, or "" if all does."""
    spec, others = plan.spec, "take a Schedule of the decode family"
    if not target.has_wgmma:
        return f"prefill needs sm_90a, the target is {target}; {others}"
    if not has_wgmma(spec, target):
        return (
            f"prefill multiplies {spec.act} by {spec.act} in whole 16-byte pieces of x; {spec.weight} with k={spec.k} "
            f"and groups of {spec.group_size} does not fit; {others}"
        )
    if not plan.step:
        most = STEPS[1]
        return f"groups of {spec.group_size} and rounds of up to {most} columns must divide one another; {others}"
    if plan.rounds < _LEAST_ROUNDS:
        return f"k={spec.k} must be more than one round of {plan.step} columns; {others}"
    more = [name for name in ("outliers", "row_scales", "bilevel") if getattr(spec, name)]
    more += ["offsets"] * (spec.zeros == "offset") + ["activations of 8 bits"] * (spec.compute is not None)
    if more:
        return f"prefill takes no {more[0]}; {others}"
    if plan.groups and not plan.scales_weights:
        return f"{spec} has scales of groups that are no numbers of {spec.act}, which weights are rounded to; {others}"
    if spec.zeros == "float" and not plan.groups:
        return f"{spec} has zeros that take sums of x; {others}"
    return ""


def spills(spec: MatmulSpec, s: PrefillSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: for sums, for two panels' fragments, and for
    what is loaded of a round."""
    plan = PrefillPlan(spec, s)
    loaded = plan.step * spec.packing.bits // 64 + plan.groups * (1 if spec.zeros == "none" else 2)
    return s.tokens // 2 + s.panel_k // 2 + loaded > _MOST_REGISTERS
