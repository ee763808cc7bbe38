"""What a schedule of the prefill kernel for activations of 8 bits with mma.sync must obey for a spec on a target. No
MLIR is needed here."""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.legality import OTHERS, check_weight
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.persistent.legality import check_shared
from lowbit.passes.kernels.requirements import check_compute
from lowbit.passes.target import Target

_MOST_REGISTERS = 160  # of a thread for sums and codes, where the tensor core adds up all products
_FOLDING = 24  # of these, for weights in f16 that are rounded to 8 bits
_MOST_PROMOTED = 128  # tokens of a tile, where products are added to sums in f32


def check_schedule(spec: MatmulSpec, s: EightBitPrefillMmaSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target. Targets with wgmma have a faster family, but
    this one runs there, too."""
    check_compute(spec, target)
    plan = bytes_plan(spec, s, BYTES_MMA)
    check_weight(plan, OTHERS)
    check_shared(plan.base, target)


def spills(spec: MatmulSpec, s: EightBitPrefillMmaSchedule) -> bool:
    """Whether a thread is likely to need more registers than there are. It follows what the assembler was seen to do:
    products that wait for their scales take registers beside the sums, and the assembler begins many at once."""
    plan = bytes_plan(spec, s, BYTES_MMA)
    if plan.products.keeps_sums:
        loaded = plan.held.code_registers + _FOLDING * spec.folds
        return s.tokens // 2 + loaded > _MOST_REGISTERS
    return s.tokens > _MOST_PROMOTED
