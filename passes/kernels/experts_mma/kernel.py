"""The matmul kernel for a weight of several experts, whose slots are sorted by expert: the persistent skeleton with
mma.sync, on every target.

Tiles are those of `ExpertOrder`, whose table is in device memory; rows of x are copied as the list of slots names them,
and y has a row for each slot. An expert's rows need not be whole tiles: the last tile of one reads rows of the next, or
the last row again, and does not store them.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent.copied_panels import CopiedPanels
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.mma import MmaMultiplier
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.stores import DirectStore
from lowbit.passes.kernels.persistent.weight import Weight


def experts_mma_matmul(spec: MatmulSpec, schedule: ExpertsMmaSchedule) -> ir.Module:
    """The tile program of a matmul of experts, in a module of its own."""
    plan = PersistentPlan(spec, schedule, MMA)
    parts = Parts(
        panels=CopiedPanels,
        store=DirectStore,
        weight=lambda p: Weight(p, plan),
        multiplier=lambda p, panels, weight: MmaMultiplier(p, plan, panels, weight),
        experts=True,
    )
    return Kernel(plan, parts).build()
