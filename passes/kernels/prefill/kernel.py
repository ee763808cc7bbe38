"""The matmul kernel for any number of tokens on Hopper: the persistent skeleton with wgmma.

x comes by the copy engine (TMA), asked for by one thread: no thread computes addresses of x, and what lies beyond the
last token or column arrives as zeros. wgmma reads it from shared memory, where two warpgroups with rows of their own
share it: [stages, panel_k / 64, tokens, 64], swizzled in rows of 128 bytes.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.panels import BoxPanels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.stores import StagedStore
from lowbit.passes.kernels.persistent.weight import Weight
from lowbit.passes.kernels.persistent.wgmma import WgmmaMultiplier


def prefill_matmul(spec: MatmulSpec, schedule: PrefillSchedule) -> ir.Module:
    """The tile program of a matmul, in a module of its own."""
    plan = PersistentPlan(spec, schedule, WGMMA)
    parts = Parts(
        panels=BoxPanels,
        store=StagedStore,
        weight=lambda p: Weight(p, plan),
        multiplier=lambda p, panels, weight: WgmmaMultiplier(p, plan, panels, weight),
    )
    return Kernel(plan, parts).build()
