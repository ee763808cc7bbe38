"""The family for weights of several experts: one launch for all of them, whatever the routing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, Operation
from lowbit.passes.kernels.experts_mma import legality
from lowbit.passes.kernels.experts_mma.schedule import ExpertsMmaSchedule
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


TILES: tuple[int, ...] = ExpertsMmaSchedule.allowed["tokens"]
_PANELS = (((128, 4), 1), ((64, 4), 2), ((64, 4), 1), ((128, 2), 1), ((64, 2), 1))
"""Columns and stages of panels, and row blocks of a warp, the most promising first."""


class ExpertsMma(KernelFamily[ExpertsMmaSchedule]):
    """Codes are decoded to the activation's type and multiplied by mma.sync, by the slots of their expert."""

    name: ClassVar[str] = "experts_mma"
    operation: ClassVar[Operation] = "expert_matmul"
    schedule_type = ExpertsMmaSchedule
    takes_any_tokens: ClassVar[bool] = True

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        """Slots of a tile, of which a kernel serves any number."""
        return tuple(tile for tile in TILES if self.candidates(spec, tile, target)) if spec.experts > 1 else ()

    def serves(self, schedule: ExpertsMmaSchedule, token_tile: int) -> bool:
        return schedule.tokens == token_tile

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[ExpertsMmaSchedule]:
        """The first of `_PANELS` that fits."""
        every = (ExpertsMmaSchedule(token_tile, *panels, row_blocks=blocks) for panels, blocks in _PANELS)
        return list(islice((s for s in every if self._fits(spec, s, target)), 1))

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[ExpertsMmaSchedule]:
        allowed = ExpertsMmaSchedule.allowed
        sizes = product(allowed["panel_k"], allowed["num_stages"], allowed["row_blocks"])
        every = (ExpertsMmaSchedule(token_tile, k, stages, row_blocks=blocks) for k, stages, blocks in sizes)
        return [s for s in every if self._fits(spec, s, target)]

    def _fits(self, spec: MatmulSpec, schedule: ExpertsMmaSchedule, target: Target) -> bool:
        return self.allows(spec, schedule, target) and not legality.spills(spec, schedule)

    def check(self, spec: MatmulSpec, schedule: ExpertsMmaSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: ExpertsMmaSchedule) -> dict[str, bool]:
        return PersistentPlan(spec, schedule, MMA).scaling.rounding

    def build(self, spec: MatmulSpec, schedule: ExpertsMmaSchedule) -> ir.Module:
        from lowbit.passes.kernels.experts_mma.kernel import experts_mma_matmul

        return experts_mma_matmul(spec, schedule)
