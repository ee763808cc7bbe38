"""The prefill family of invariant matmuls on targets without wgmma: the kernel of `passes.kernels.prefill_mma`, which
visits k chain by chain in the order of sums that the kernels for few tokens have, and scales products of groups as they
do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, Operation
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.in_order_family import InOrderFamily
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_in_order.legality import products_of
from lowbit.passes.kernels.prefill_mma.family import TOKEN_TILES
from lowbit.passes.kernels.prefill_mma_in_order import cost_model, legality
from lowbit.passes.kernels.prefill_mma_in_order.schedule import PrefillMmaInOrderSchedule
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_TOKENS = (32, 64, 96, 128)  # of a tile
_PANELS = ((64, 2), (64, 4), (128, 2), (128, 4), (256, 2))
"""Columns and stages of panels, the most promising first."""
_MOST_K = max(panel_k for panel_k, _ in _PANELS)


class PrefillMmaInOrder(InOrderFamily[PrefillMmaInOrderSchedule]):
    """Codes are decoded to the activation's type and multiplied by mma.sync, tile after tile, chain after chain."""

    name: ClassVar[str] = "prefill_mma_in_order"
    operation: ClassVar[Operation] = "matmul"
    schedule_type = PrefillMmaInOrderSchedule
    chosen_for: ClassVar[tuple[int, ...]] = TOKEN_TILES

    def misfit(self, spec: MatmulSpec, target: Target) -> str:
        return legality.misfit(spec, target)

    def products_of(self, spec: MatmulSpec) -> tuple[str, ...]:
        return products_of(spec)

    def of_cut(
        self, spec: MatmulSpec, token_tile: int, target: Target, cut: Mapping[str, Any]
    ) -> Iterator[Candidates[PrefillMmaInOrderSchedule]]:
        for tokens, row_blocks in product(_TOKENS, PrefillMmaInOrderSchedule.allowed["row_blocks"]):
            tile = PrefillMmaInOrderSchedule(tokens, row_blocks=row_blocks, **cut)
            least = cost_model.least(spec, token_tile, tile, _MOST_K, target)
            yield Candidates(least, partial(self._of_tile, spec, tile, target))

    def _of_tile(
        self, spec: MatmulSpec, tile: PrefillMmaInOrderSchedule, target: Target
    ) -> list[PrefillMmaInOrderSchedule]:
        """The candidate of a tile: with the panels of which chains take the fewest columns."""
        panels = (replace(tile, panel_k=panel_k, num_stages=stages) for panel_k, stages in _PANELS)
        fitting = [s for s in panels if self.fits(spec, s, target)]
        return sorted(fitting, key=lambda s: PersistentPlan(spec, s, MMA).tiles.columns)[:1]  # stable

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: PrefillMmaInOrderSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def shape(self, schedule: PrefillMmaInOrderSchedule) -> tuple[object, ...]:
        return schedule.tokens, schedule.row_blocks

    def check(self, spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def build(self, spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule) -> ir.Module:
        from lowbit.passes.kernels.prefill_mma_in_order.kernel import prefill_mma_in_order_matmul

        return prefill_mma_in_order_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule) -> bool:
        return legality.spills(spec, schedule)
