"""The matmul kernel for any number of tokens on targets without wgmma: the persistent skeleton with mma.sync.

x comes by cp.async, to which all threads contribute. A barrier per panel says that a panel is there and that all warps
have left the one before, whose stage is filled again: [stages, tokens, panel_k + 8], where the 8 spread ldmatrix over
all banks.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.copied_panels import CopiedPanels
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.mma import MmaMultiplier
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.stores import DirectStore
from lowbit.passes.kernels.persistent.weight import Weight
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule


def prefill_mma_matmul(spec: MatmulSpec, schedule: PrefillMmaSchedule) -> ir.Module:
    """The tile program of a matmul, in a module of its own."""
    plan = PersistentPlan(spec, schedule, MMA)
    parts = Parts(
        panels=CopiedPanels,
        store=DirectStore,
        weight=lambda p: Weight(p, plan),
        multiplier=lambda p, panels, weight: MmaMultiplier(p, plan, panels, weight),
    )
    return Kernel(plan, parts).build()
