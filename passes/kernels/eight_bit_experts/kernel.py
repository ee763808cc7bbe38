"""The matmul kernel for a weight of several experts and activations of 8 bits on Hopper: what is multiplied is that of
`passes.kernels.eight_bit_prefill.kernel`, and whose it is that of `passes.kernels.experts.kernel`.

Where rows of x come by cp.async, codes go straight to registers, since a thread counts the copies that it has begun.
The scale of a slot is that of its row of x, which the list of slots names.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_experts.schedule import EightBitExpertsSchedule
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill.registers import with_numbers_ahead
from lowbit.passes.kernels.eight_bit_prefill.wgmma import ByteWgmmaMultiplier
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.listed_panels import ListedPanels
from lowbit.passes.kernels.persistent.panels import BoxPanels
from lowbit.passes.kernels.persistent.stores import StagedStore


def eight_bit_experts_matmul(spec: MatmulSpec, schedule: EightBitExpertsSchedule) -> ir.Module:
    """The tile program of a matmul of experts and activations of 8 bits, in a module of its own."""
    plan, banks = with_numbers_ahead(bytes_plan(spec, schedule, WGMMA)), schedule.banks
    parts = Parts(
        panels=ListedPanels if schedule.gather else BoxPanels,
        store=StagedStore,
        weight=lambda p: ByteWeight(p, plan.in_f16 if spec.folds else plan),
        multiplier=lambda p, panels, weight: ByteWgmmaMultiplier(p, plan, banks, panels, weight),
    )
    return Kernel(plan.base, parts).build()
