"""What a schedule of the prefill kernel of invariant matmuls for activations of 8 bits must obey, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_in_order.schedule import EightBitInOrderSchedule
from lowbit.passes.kernels.eight_bit_prefill import legality as prefill
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.requirements import can_use_wgmma
from lowbit.passes.target import Target

_SUMS_OF_X = 24  # registers


def misfit(spec: MatmulSpec, target: Target) -> str:
    """Returns what of an invariant spec has no kernel for many tokens of 8 bits in an order of sums, or "" if all has.
    It is served by kernels for few tokens then, launch after launch."""
    return misfit_of_weight(spec) or ("" if can_use_wgmma(spec, target) else f"k={spec.k} on {target}")


def misfit_of_weight(spec: MatmulSpec) -> str:
    """Returns the same, whatever the target."""
    if not spec.compute or spec.experts > 1 or not spec.multiplies_codes:
        return "experts, and weights that are scaled before they are multiplied"
    signed = spec.zeros != "none" or spec.dtype.kind == "int"
    if spec.compute == "f8e4m3" and spec.group_size is None and signed:
        return "sums of x in f8e4m3 over whole rows, which depend on their order"
    return ""


def products_of(spec: MatmulSpec) -> tuple[str, ...]:
    """Returns `SumOrder.products` of the kernel."""
    return ("bytes", "by wgmma", "raw codes") if spec.compute == "f8e4m3" else ("bytes",)


def check_schedule(spec: MatmulSpec, s: EightBitInOrderSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    if not spec.invariant:
        raise SpecError("schedule: eight_bit_in_order is for invariant matmuls; take an EightBitPrefillSchedule")
    if why := misfit(spec, target):
        raise SpecError(f"schedule: eight_bit_in_order does not serve {why}; {prefill.OTHERS}")
    prefill.check_schedule(spec, s, target)
    check_rounds(bytes_plan(spec, s, WGMMA).base)


def check_rounds(plan: PersistentPlan) -> None:
    """Raises SpecError where rounds or panels do not fit the chains of an order."""
    chains, panel_k = plan.tiles.chains, plan.schedule.panel_k
    columns, why = chains.product_columns, chains.misfit
    if columns and panel_k % columns:
        why = why or f"panels of panel_k={panel_k} columns do not hold products of {columns}"
    if why:
        raise SpecError(f"schedule: {why}; take another panel_k, num_stages or order_step_k")


def spills(spec: MatmulSpec, s: EightBitInOrderSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: those of the kernel without an order, for the
    sums of the chains before, and for sums of x beside products."""
    base = bytes_plan(spec, s, WGMMA).base
    of_x = _SUMS_OF_X if base.scaling.sums_x and base.tiles.chains.product_columns else 0
    return prefill.spills(spec, s, more=s.tokens // 2 + of_x)
