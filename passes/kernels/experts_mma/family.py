"""The family for weights of several experts: one launch for all of them, whatever the routing.

The kernel is that of `passes.kernels.prefill_mma`, on every target. Tiles are those of `ExpertOrder`, whose table is in
device memory; rows of x are copied as the list of slots names them, and y has a row for each slot. An expert's rows
need not be whole tiles: the last tile of one reads rows of the next, or the last row again, and does not store them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.experts_mma import legality
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.expert_family import ExpertFamily, with_fewest_columns
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_CHOICES = (
    *(((128, 4), 1, 2), ((128, 2), 1, 2), ((64, 4), 1, 2), ((64, 2), 1, 2)),
    *(((64, 4), 2, 1), ((128, 4), 1, 1), ((64, 4), 1, 1), ((128, 2), 1, 1), ((64, 2), 1, 1)),
)
"""Columns and stages of panels, row blocks of a warp, and blocks of a multiprocessor, the most promising first."""


class ExpertsMma(ExpertFamily[ExpertsMmaSchedule]):
    """Codes are decoded to the activation's type and multiplied by mma.sync, by the slots of their expert."""

    name: ClassVar[str] = "experts_mma"
    operation: ClassVar[Operation] = "expert_matmul"
    schedule_type = ExpertsMmaSchedule
    tiles: ClassVar[tuple[int, ...]] = ExpertsMmaSchedule.allowed["tokens"]

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[ExpertsMmaSchedule]:
        """The first that fits of those whose rounds go through the fewest columns, or a tenth more."""
        every = (ExpertsMmaSchedule(token_tile, *panels, row_blocks=b, blocks_per_sm=n) for panels, b, n in _CHOICES)
        return with_fewest_columns({s: PersistentPlan(spec, s, MMA) for s in every if self.fits(spec, s, target)})[:1]

    def every(self, token_tile: int) -> Iterator[ExpertsMmaSchedule]:
        allowed = ExpertsMmaSchedule.allowed
        sizes = product(*(allowed[name] for name in ("panel_k", "num_stages", "row_blocks", "blocks_per_sm")))
        return (ExpertsMmaSchedule(token_tile, k, n, row_blocks=b, blocks_per_sm=many) for k, n, b, many in sizes)

    def spills(self, spec: MatmulSpec, schedule: ExpertsMmaSchedule) -> bool:
        return legality.spills(spec, schedule)

    def check(self, spec: MatmulSpec, schedule: ExpertsMmaSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: ExpertsMmaSchedule) -> dict[str, bool]:
        return PersistentPlan(spec, schedule, MMA).scaling.rounding

    def build(self, spec: MatmulSpec, schedule: ExpertsMmaSchedule) -> ir.Module:
        from lowbit.passes.kernels.prefill_mma.kernel import prefill_mma_matmul

        return prefill_mma_matmul(spec, schedule)
