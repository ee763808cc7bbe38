"""What a schedule of the prefill kernel of invariant matmuls for activations of 8 bits with mma.sync must obey, without
MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_in_order import legality as by_wgmma
from lowbit.passes.kernels.eight_bit_mma_in_order.schedule import EightBitMmaInOrderSchedule
from lowbit.passes.kernels.eight_bit_prefill.legality import OTHERS
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill_mma import legality as prefill
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.target import Target

_MOST_REGISTERS = 160  # of a thread for sums and codes, where the tensor core adds up all products of a chain;
_MOST_PROMOTED, _MOST_WITH_SUMS_OF_X = 96, 64  # for sums, where products are added to them, and beside sums of x


def misfit(spec: MatmulSpec, target: Target) -> str:
    """Returns what of an invariant spec has no kernel for many tokens of 8 bits in an order of sums, or "" if all has.
    It is served by kernels for few tokens then, launch after launch."""
    return f"{target}, which has wgmma" if target.has_wgmma else by_wgmma.misfit_of_weight(spec)


def products_of(spec: MatmulSpec) -> tuple[str, ...]:
    """Returns `SumOrder.products` of the kernel."""
    return ("bytes", "by mma.sync", "raw codes") if spec.compute == "f8e4m3" else ("bytes",)


def check_schedule(spec: MatmulSpec, s: EightBitMmaInOrderSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    if not spec.invariant:
        raise SpecError("schedule: eight_bit_mma_in_order is for invariant matmuls; take an EightBitPrefillMmaSchedule")
    if why := misfit(spec, target):
        raise SpecError(f"schedule: eight_bit_mma_in_order does not serve {why}; {OTHERS}")
    prefill.check_schedule(spec, s, target)
    by_wgmma.check_rounds(bytes_plan(spec, s, BYTES_MMA).base)


def spills(spec: MatmulSpec, s: EightBitMmaInOrderSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are: those of the kernel without an order, and for
    the sums of the chains before."""
    plan = bytes_plan(spec, s, BYTES_MMA)
    chains, before = plan.base.tiles.chains, s.tokens // 2
    before *= 2 if chains.are_apart else 1 if chains.count > 1 else 0
    if plan.products.keeps_sums:
        return s.tokens // 2 + before + plan.held.code_registers > _MOST_REGISTERS
    most = _MOST_WITH_SUMS_OF_X if plan.base.scaling.sums_x else _MOST_PROMOTED
    return s.tokens // 2 + before > most
