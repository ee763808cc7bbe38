"""The prefill kernel of invariant matmuls with mma.sync: `prefill_mma_in_order_matmul`, which adds up as kernels for
few tokens do.

Panels of x, warps and stores are those of `passes.kernels.prefill_mma.kernel`; k is visited chain by chain, and
products of groups are scaled, in place of weights (`chain_multiplier`). A part of the tokens is so small that its
products take 16 registers beside the sums of the chain and those of the chains before.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.copied_panels import CopiedPanels
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.stores import DirectStore
from lowbit.passes.kernels.prefill_in_order.ordered_weight import OrderedWeight
from lowbit.passes.kernels.prefill_mma_in_order.chain_multiplier import MmaChainMultiplier
from lowbit.passes.kernels.prefill_mma_in_order.schedule import PrefillMmaInOrderSchedule


def prefill_mma_in_order_matmul(spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule) -> ir.Module:
    """The tile program of an invariant matmul, in a module of its own."""
    plan, columns = PersistentPlan(spec, schedule, MMA), schedule.columns_of_part
    parts = Parts(
        panels=CopiedPanels,
        store=DirectStore,
        weight=lambda p: OrderedWeight(p, plan),
        multiplier=lambda p, panels, weight: MmaChainMultiplier(p, plan, columns, panels, weight),
    )
    return Kernel(plan, parts).build()
