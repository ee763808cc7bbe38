"""The family for weights of several experts on Hopper, for many slots of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.experts import legality
from lowbit.passes.kernels.experts.schedule import ExpertsSchedule, short_slots
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.expert_family import ExpertFamily, with_fewest_columns
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill.legality import spills
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

MOST_BY_MMA = 32  # slots of a tile, up to which mma.sync serves them better (docs/lab-notebook/experts.md)
_PANELS = ((128, 4), (64, 6), (64, 8), (64, 4))  # columns and stages, the most promising first


class Experts(ExpertFamily[ExpertsSchedule]):
    """Codes are decoded to the activation's type and multiplied by wgmma, by the slots of their expert."""

    name: ClassVar[str] = "experts"
    operation: ClassVar[Operation] = "expert_matmul"
    schedule_type = ExpertsSchedule
    tiles: ClassVar[tuple[int, ...]] = tuple(n for n in ExpertsSchedule.allowed["tokens"] if n > MOST_BY_MMA)

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[ExpertsSchedule]:
        """The first of `_PANELS` that fits, of those whose rounds go through the fewest columns."""
        short = short_slots(token_tile)
        every = (ExpertsSchedule(token_tile, *panels, last_tokens=short) for panels in _PANELS)
        fitting = {s: PersistentPlan(spec, s, WGMMA) for s in every if self.fits(spec, s, target)}
        return with_fewest_columns(fitting, most_wasted=1.0)[:1]

    def every(self, token_tile: int) -> Iterator[ExpertsSchedule]:
        allowed, short = ExpertsSchedule.allowed, short_slots(token_tile)
        sizes = product(allowed["panel_k"], allowed["num_stages"], dict.fromkeys((0, short)))
        return (ExpertsSchedule(token_tile, panel_k, stages, last_tokens=last) for panel_k, stages, last in sizes)

    def spills(self, spec: MatmulSpec, schedule: ExpertsSchedule) -> bool:
        return spills(spec, schedule)

    def check(self, spec: MatmulSpec, schedule: ExpertsSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: ExpertsSchedule) -> dict[str, bool]:
        return PersistentPlan(spec, schedule, WGMMA).scaling.rounding

    def x_boxes(self, spec: MatmulSpec, schedule: ExpertsSchedule) -> Mapping[str, tuple[int, int]]:
        return PersistentPlan(spec, schedule, WGMMA).x.boxes

    def build(self, spec: MatmulSpec, schedule: ExpertsSchedule) -> ir.Module:
        from lowbit.passes.kernels.experts.kernel import experts_matmul

        return experts_matmul(spec, schedule)
