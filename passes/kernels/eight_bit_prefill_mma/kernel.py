"""The kernel for any number of tokens of 8 bits on targets without wgmma: the persistent skeleton with mma.sync.

The idea. Panels of x by cp.async and warps are those of `passes.kernels.prefill_mma.kernel`; codes become bytes, and
products are scaled and added to sums, as in `passes.kernels.eight_bit_prefill.kernel`.

    for panel of `panel_k` columns:
        wait until x is there; barrier
        a = bytes of the panel's codes, less zeros
        for part of the tile's tokens:
            for group in panel:
                product = a x^T                       mma.sync of 16 x 8 x 32, from zero
                sums[part] = sums[part] + scale * product
        copy a later panel of x; load the codes and scales that take the place of these
    at the end of a tile: times the scale of the token, add the bias, convert, store

A part is at most 32 tokens of a warp, so that its products take at most 32 registers beside the sums. Integers with one
scale per row need no promotion: products are added to sums in i32.

Shared memory: x [stages, parts, tokens of a part, panel_k + 16] in bytes, where the 16 spread ldmatrix over all banks.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.eight_bit_prefill_mma.mma import ByteMmaMultiplier
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.persistent.copied_panels import CopiedPanels
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.persistent.kernel import Kernel, Parts
from lowbit.passes.kernels.persistent.stores import DirectStore


def eight_bit_prefill_mma_matmul(spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule) -> ir.Module:
    """The tile program of a matmul of activations of 8 bits, in a module of its own."""
    plan = bytes_plan(spec, schedule, BYTES_MMA)
    parts = Parts(
        panels=CopiedPanels,
        store=DirectStore,
        weight=lambda p: ByteWeight(p, plan.in_f16 if spec.folds else plan),
        multiplier=lambda p, panels, weight: ByteMmaMultiplier(p, plan, schedule.columns_of_part, panels, weight),
    )
    return Kernel(plan.base, parts).build()
