"""The matmul kernel for a weight of several experts and activations of 8 bits with mma.sync: what is multiplied is that
of `passes.kernels.eight_bit_prefill_mma.kernel`, and whose it is that of `passes.kernels.experts_mma.kernel`. The scale
of a slot is that of its row of x, which the list of slots names.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_experts_mma.schedule import EightBitExpertsMmaSchedule
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill_mma.mma import ByteMmaMultiplier
from lowbit.passes.kernels.persistent.copied_panels import CopiedPanels
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.stores import DirectStore


def eight_bit_experts_mma_matmul(spec: MatmulSpec, schedule: EightBitExpertsMmaSchedule) -> ir.Module:
    """The tile program of a matmul of experts and activations of 8 bits, in a module of its own."""
    plan = bytes_plan(spec, schedule, BYTES_MMA)
    parts = Parts(
        panels=CopiedPanels,
        store=DirectStore,
        weight=lambda p: ByteWeight(p, plan.in_f16 if spec.folds else plan),
        multiplier=lambda p, panels, weight: ByteMmaMultiplier(p, plan, schedule.columns_of_part, panels, weight),
        experts=True,
    )
    return Kernel(plan.base, parts).build()
