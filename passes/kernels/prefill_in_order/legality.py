"""What a schedule of the prefill kernel of invariant matmuls must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.scaling import multiplies_raw_codes
from lowbit.passes.kernels.prefill import legality as prefill
from lowbit.passes.kernels.prefill_in_order.plan import InOrderPlan
from lowbit.passes.kernels.prefill_in_order.products import Products
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule
from lowbit.passes.kernels.scales.in_order import scales_weights
from lowbit.passes.target import Target


def misfit(spec: MatmulSpec) -> str:
    """Returns what of an invariant spec has no kernel for many tokens in an order of sums, or "" if all has. It is
    served by kernels for few tokens then, launch after launch."""
    if spec.experts > 1 or spec.compute or spec.outliers:
        return "experts, products of 8 bits and outliers"
    if compute_element(spec.dtype, spec.act) != spec.act:
        return "codes that x's type does not hold"
    return ""


def products_of(spec: MatmulSpec) -> tuple[str, ...]:
    """Returns `SumOrder.products` of the kernel."""
    if scales_weights(spec):
        return ("mma", "scaled weights") if spec.zeros == "int" else ("mma", "scaled weights", "rounded zeros")
    return ("mma", "raw codes") if multiplies_raw_codes(spec) else ("mma",)


def check_schedule(spec: MatmulSpec, s: PrefillInOrderSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    if not spec.invariant:
        raise SpecError("schedule: prefill_in_order is for invariant matmuls; take a PrefillSchedule")
    prefill.check_target(target)
    if why := misfit(spec):
        raise SpecError(f"schedule: prefill_in_order does not serve {why}; {prefill.OTHERS}")
    plan = InOrderPlan(spec, s, WGMMA)
    prefill.check_plan(plan, target)
    check_rounds(plan)


def check_rounds(plan: PersistentPlan) -> None:
    """Raises SpecError where rounds, panels or scales do not fit the chains of an order."""
    chains, step_k = plan.tiles.chains, plan.tiles.chains.order.step_k
    if why := chains.misfit or Products(plan).misfit:
        raise SpecError(f"schedule: {why}; take another panel_k, num_stages or order_step_k")
    runs = plan.round.step // chains.unit
    if any(tensor.row_block_bytes // runs % 4 for tensor in plan.tensors.staged.values()):
        raise SpecError(
            f"schedule: scales of {step_k} columns are copied 4 bytes at a time; take another order_step_k"
        )
