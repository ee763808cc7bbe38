"""What a schedule of the prefill kernel of invariant matmuls must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.raw_codes import can_be_raw
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.legality import loaded_registers
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill import legality as prefill
from lowbit.passes.kernels.prefill_in_order.products import Products
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule
from lowbit.passes.target import Target

_MOST_REGISTERS = 262  # of a thread, by this count: so many do not spill


def misfit(spec: MatmulSpec) -> str:
    """Returns what of an invariant spec has no kernel for many tokens in an order of sums, or "" if all has. It is
    served by kernels for few tokens then, launch after launch."""
    if spec.experts > 1 or spec.compute or spec.outliers:
        return "experts, products of 8 bits and outliers"
    if spec.bilevel or spec.zeros not in ("none", "int"):
        return "scales that are codes, and zeros and offsets that sums of x make up for"
    if compute_element(spec.dtype, spec.act) != spec.act:
        return "codes that x's type does not hold"
    return ""


def products_of(spec: MatmulSpec) -> tuple[str, ...]:
    """Returns `SumOrder.products` of the kernel."""
    unsigned = spec.dtype.kind == "uint" and spec.zeros == "none"
    raw = unsigned and can_be_raw(spec.dtype, compute_element(spec.dtype, spec.act))
    return ("mma", "raw codes") if raw else ("mma",)


def check_schedule(spec: MatmulSpec, s: PrefillInOrderSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    if not spec.invariant:
        raise SpecError("schedule: prefill_in_order is for invariant matmuls; take a PrefillSchedule")
    if why := misfit(spec):
        raise SpecError(f"schedule: prefill_in_order does not serve {why}; {prefill.OTHERS}")
    prefill.check_schedule(spec, s, target)
    plan = PersistentPlan(spec, s, WGMMA)
    if why := plan.tiles.chains.misfit or Products(plan, s).misfit:
        raise SpecError(f"schedule: {why}; take another panel_k, num_stages or order_step_k")
    if not plan.tiles.chains.are_whole and plan.tensors.staged:
        given, step = s.order_step_k, plan.round.step
        raise SpecError(f"schedule: order_step_k={given} must be a multiple of {step} for small groups")


def spills(spec: MatmulSpec, s: PrefillInOrderSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: for the sums of a chain and of those before,
    for products, for two panels' fragments, and for what is loaded of a round."""
    plan = PersistentPlan(spec, s, WGMMA)
    banks = s.banks * s.part_tokens // 2 if Products(plan, s).columns else 0
    return s.tokens + banks + s.panel_k // 2 + loaded_registers(plan) > _MOST_REGISTERS
