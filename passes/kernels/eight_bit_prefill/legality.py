"""What a prefill schedule for activations of 8 bits must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan, bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.registers import MOST_REGISTERS, registers
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.legality import check_shared, check_split
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.requirements import can_use_wgmma, check_compute
from lowbit.passes.target import Target

OTHERS = "take an EightBitSchedule"

def check_schedule(spec: MatmulSpec, s: EightBitPrefillSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    check_compute(spec, target)
    plan = bytes_plan(spec, s, WGMMA)
    if why := _misfit(plan, target):
        raise SpecError(f"schedule: {why}")
    check_sums(plan)
    check_weight(plan, OTHERS)
    check_split(plan.base, target)
    check_shared(plan.base, target)


def _misfit(plan: BytesPlan[EightBitPrefillSchedule], target: Target) -> str:
    """Returns what of a target or a schedule does not fit and what to do about it, or "" if all does."""
    spec, s = plan.spec, plan.schedule
    if not can_use_wgmma(spec, target):
        return f"eight_bit_prefill needs sm_90a and x in whole 16-byte pieces, {target} has k={spec.k}; {OTHERS}"
    if max(s.parts, s.split_k) % min(s.parts, s.split_k):
        return f"parts={s.parts} and split_k={s.split_k} must divide one another"
    return ""


def check_sums(plan: BytesPlan[EightBitPrefillSchedule]) -> None:
    """Raises SpecError for registers for products, where these are never apart from sums."""
    spec, s = plan.spec, plan.schedule
    if plan.products.keeps_sums and (s.parts, s.banks) != (1, 1):
        sums = f"{spec.weight} in {spec.compute} has sums that the tensor core adds up"
        raise SpecError(f"schedule: {sums}: it needs parts=1 and banks=1")


def check_weight(plan: BytesPlan[PrefillSchedule], others: str) -> None:
    """Raises SpecError where groups and rounds do not fit one another, or codes less their zeros are no bytes.

    others: what to take instead
    """
    spec = plan.spec
    if not plan.base.round.divides_groups:
        groups = f"groups of {spec.group_size} and rounds of {plan.base.round.step} columns"
        raise SpecError(f"schedule: {groups} must divide one another; {others}")
    if spec.zeros == "int" and spec.dtype.bits == 8 and not spec.folds and plan.subtracts:
        differences = f"{spec.weight} with zeros={spec.zeros!r} has differences of codes and zeros"
        raise SpecError(f"schedule: {differences} that are no bytes; {others}")


def spills(spec: MatmulSpec, s: EightBitPrefillSchedule, more: int = 0) -> bool:
    """Whether a thread is likely to need more registers than there are, and so many more."""
    return registers(bytes_plan(spec, s, WGMMA)) + more > MOST_REGISTERS
