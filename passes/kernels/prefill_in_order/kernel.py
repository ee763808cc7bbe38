"""The prefill kernel of invariant matmuls: `prefill_in_order_matmul`, which adds up as kernels for few tokens do.

The idea, the loop nest and the map of shared memory are those of `passes.kernels.persistent.kernel`, but that k is
visited chain by chain, and that scales multiply what they do in kernels for few tokens: products of groups, or weights
(`chain_multiplier`).
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.panels import BoxPanels
from lowbit.passes.kernels.persistent.stores import StagedStore
from lowbit.passes.kernels.prefill_in_order.chain_multiplier import ChainMultiplier, OrderedWeight
from lowbit.passes.kernels.prefill_in_order.plan import InOrderPlan
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule


def prefill_in_order_matmul(spec: MatmulSpec, schedule: PrefillInOrderSchedule) -> ir.Module:
    """The tile program of an invariant matmul, in a module of its own."""
    plan = InOrderPlan(spec, schedule, WGMMA)
    parts = Parts(
        panels=BoxPanels,
        store=StagedStore,
        weight=lambda p: OrderedWeight(p, plan),
        multiplier=lambda p, panels, weight: ChainMultiplier(p, plan, panels, weight),
    )
    return Kernel(plan, parts).build()
