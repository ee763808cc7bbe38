"""The matmul kernel for a weight of several experts on Hopper: the persistent skeleton with wgmma, for many slots.

Tiles are those of `ExpertOrder`. Rows of x come as boxes where each slot has the row of its own number, else as in
`ListedPanels`. y has a row for each slot.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.listed_panels import ListedPanels
from lowbit.passes.kernels.persistent.panels import BoxPanels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.stores import StagedStore
from lowbit.passes.kernels.persistent.weight import Weight
from lowbit.passes.kernels.persistent.wgmma import WgmmaMultiplier


def experts_matmul(spec: MatmulSpec, schedule: ExpertsSchedule) -> ir.Module:
    """The tile program of a matmul of experts, in a module of its own."""
    plan = PersistentPlan(spec, schedule, WGMMA)
    parts = Parts(
        panels=ListedPanels if schedule.gather else BoxPanels,
        store=StagedStore,
        weight=lambda p: Weight(p, plan),
        multiplier=lambda p, panels, weight: WgmmaMultiplier(p, plan, panels, weight),
    )
    return Kernel(plan, parts).build()
