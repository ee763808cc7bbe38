"""What a schedule of the kernel for experts must obey for a spec on a target, without MLIR."""

from __future__ import annotations

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.legality import check_shared
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_mma.legality import spills as spills_as_dense
from lowbit.passes.kernels.requirements import fits_async_x
from lowbit.passes.target import Target


def spills(spec: MatmulSpec, s: ExpertsMmaSchedule) -> bool:
    """Tells whether a thread is likely to need more registers than there are, as for other tokens."""
    return spills_as_dense(spec, s)


def check_schedule(spec: MatmulSpec, s: ExpertsMmaSchedule, target: Target) -> None:
    """Raises SpecError where a schedule does not fit a spec or a target."""
    if spec.experts == 1:
        raise SpecError(f"schedule: experts_mma is for weights of several experts, ({spec}) has one")
    if not fits_async_x(spec):
        raise SpecError(
            f"schedule: experts_mma copies x in whole 16-byte pieces; {spec.weight} with k={spec.k} and groups of "
            f"{spec.group_size} does not fit; use a matmul per expert"
        )
    if s.tokens == 16 and s.row_blocks > 1:
        raise SpecError(f"schedule: two warps cannot share tokens={s.tokens}; take row_blocks=1, or tokens=32")
    if spec.outliers and s.row_blocks > 1:
        raise SpecError(f"schedule: outliers are found by warps of one row block; {s} needs row_blocks=1")
    check_shared(PersistentPlan(spec, s, MMA), target)
