"""What a schedule of the prefill kernel of invariant matmuls with mma.sync must obey, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.legality import loaded_registers
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_in_order import legality as by_wgmma
from lowbit.passes.kernels.prefill_mma import legality as prefill
from lowbit.passes.kernels.prefill_mma_in_order.schedule import PrefillMmaInOrderSchedule
from lowbit.passes.target import Target

_MOST_REGISTERS = 150  # of a thread for sums and for what is loaded of a round
_LONG = 64  # columns of products, of which few are begun at a time
_WHOLE, _FRAGMENTS = (1, 2, 4, 8), 128  # bits of codes that fill words; of others, row blocks times columns of a panel


def misfit(spec: MatmulSpec, target: Target) -> str:
    """Returns what of an invariant spec has no kernel for many tokens in an order of sums, or "" if all has. It is
    served by kernels for few tokens then, launch after launch."""
    return f"{target}, which has wgmma" if target.has_wgmma else by_wgmma.misfit(spec)


def check_schedule(spec: MatmulSpec, s: PrefillMmaInOrderSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    if not spec.invariant:
        raise SpecError("schedule: prefill_mma_in_order is for invariant matmuls; take a PrefillMmaSchedule")
    if why := misfit(spec, target):
        raise SpecError(f"schedule: prefill_mma_in_order does not serve {why}; {prefill.OTHERS}")
    prefill.check_schedule(spec, s, target)
    by_wgmma.check_rounds(PersistentPlan(spec, s, MMA))


def spills(spec: MatmulSpec, s: PrefillMmaInOrderSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are. It follows what the assembler was seen to do:
    it begins products of many groups, and adds up x for them, before it scales the first."""
    plan = PersistentPlan(spec, s, MMA)
    chains, columns = plan.tiles.chains, plan.tiles.chains.product_columns
    sums = s.tokens // 2 * (3 if chains.are_apart else 2 if chains.count > 1 else 1)
    if sums + s.row_blocks * loaded_registers(plan) > _MOST_REGISTERS:
        return True
    whole = spec.dtype.bits in _WHOLE
    if not whole and s.row_blocks * s.panel_k > _FRAGMENTS:
        return True
    if plan.scaling.sums_x:
        most = 64 if columns >= _LONG and whole else 32
    else:
        most = 128 if not columns else 96 if columns >= _LONG // 2 else 64
    return s.tokens > max(32, most * 2 // (3 if chains.are_apart else 2))
