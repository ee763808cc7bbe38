"""The family for weights of several experts and activations of 8 bits on Hopper, for many slots of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.eight_bit_experts import legality
from lowbit.passes.kernels.eight_bit_experts.schedule import EightBitExpertsSchedule
from lowbit.passes.kernels.eight_bit_prefill.family import PRODUCTS
from lowbit.passes.kernels.eight_bit_prefill.legality import spills
from lowbit.passes.kernels.experts.family import Experts
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.expert_family import ExpertFamily, with_fewest_columns
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_PANELS = ((128, 4), (256, 4))  # columns and stages


class EightBitExperts(ExpertFamily[EightBitExpertsSchedule]):
    """Codes become bytes and are multiplied by wgmma of 8-bit types, by the slots of their expert."""

    name: ClassVar[str] = "eight_bit_experts"
    operation: ClassVar[Operation] = "quantized_expert_matmul"
    schedule_type = EightBitExpertsSchedule
    tiles: ClassVar[tuple[int, ...]] = Experts.tiles

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[EightBitExpertsSchedule]:
        """The first that fits of those whose rounds go through the fewest columns, or a tenth more."""
        every = self._with_short_tiles(self._with_panels(token_tile, _PANELS))
        plans = {s: PersistentPlan(spec, s, WGMMA) for s in every if self.fits(spec, s, target)}
        return with_fewest_columns(plans)[:1]

    def every(self, token_tile: int) -> Iterator[EightBitExpertsSchedule]:
        allowed = EightBitExpertsSchedule.allowed
        whole = self._with_panels(token_tile, list(product(allowed["panel_k"], allowed["num_stages"])))
        return self._with_short_tiles(whole)

    def _with_panels(self, token_tile: int, panels: Sequence[tuple[int, int]]) -> Iterator[EightBitExpertsSchedule]:
        """Yields schedules with these columns and stages of panels."""
        for (panel_k, stages), (parts, banks) in product(panels, PRODUCTS):
            if token_tile % (16 * parts) == 0:
                yield EightBitExpertsSchedule(token_tile, panel_k, stages, parts=parts, banks=banks)

    def _with_short_tiles(self, schedules: Iterable[EightBitExpertsSchedule]) -> Iterator[EightBitExpertsSchedule]:
        """Yields these schedules, first with narrower products for short tiles where there may be such."""
        for s in schedules:
            yield from (*(replace(s, last_tokens=short) for short in s.slice_sizes(1)), s)

    def x_boxes(self, spec: MatmulSpec, schedule: EightBitExpertsSchedule) -> Mapping[str, tuple[int, int]]:
        return PersistentPlan(spec, schedule, WGMMA).x.boxes

    def spills(self, spec: MatmulSpec, schedule: EightBitExpertsSchedule) -> bool:
        return spills(spec, schedule)

    def check(self, spec: MatmulSpec, schedule: EightBitExpertsSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: EightBitExpertsSchedule) -> dict[str, bool]:
        return {"folded": spec.for_tokens(schedule.tokens).fold_scales}

    def build(self, spec: MatmulSpec, schedule: EightBitExpertsSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_experts.kernel import eight_bit_experts_matmul

        return eight_bit_experts_matmul(spec, schedule)
