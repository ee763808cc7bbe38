"""The prefill family of invariant matmuls for activations of 8 bits on targets without wgmma: the kernel of
`passes.kernels.eight_bit_prefill_mma`, which visits k chain by chain in the order of sums that the kernels for few
tokens have, and multiplies codes as they are stored, as these do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, Operation
from lowbit.passes.kernels.eight_bit_mma_in_order import cost_model, legality
from lowbit.passes.kernels.eight_bit_mma_in_order.schedule import EightBitMmaInOrderSchedule
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.persistent.in_order_family import InOrderFamily
from lowbit.passes.kernels.prefill_mma.family import TOKEN_TILES
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_TOKENS = (32, 64, 96, 128)  # of a tile
_PANELS = ((128, 2), (64, 2), (256, 2), (128, 4))
"""Columns and stages of panels, the most promising first."""
_MOST_K = max(panel_k for panel_k, _ in _PANELS)


class EightBitMmaInOrder(InOrderFamily[EightBitMmaInOrderSchedule]):
    """Codes become bytes as they are stored and are multiplied by mma.sync of 8-bit types, chain after chain."""

    name: ClassVar[str] = "eight_bit_mma_in_order"
    operation: ClassVar[Operation] = "quantized_matmul"
    schedule_type = EightBitMmaInOrderSchedule
    chosen_for: ClassVar[tuple[int, ...]] = TOKEN_TILES

    def misfit(self, spec: MatmulSpec, target: Target) -> str:
        return legality.misfit(spec, target)

    def products_of(self, spec: MatmulSpec) -> tuple[str, ...]:
        return legality.products_of(spec)

    def of_cut(
        self, spec: MatmulSpec, token_tile: int, target: Target, cut: Mapping[str, Any]
    ) -> Iterator[Candidates[EightBitMmaInOrderSchedule]]:
        for tokens, row_blocks in product(_TOKENS, EightBitMmaInOrderSchedule.allowed["row_blocks"]):
            tile = EightBitMmaInOrderSchedule(tokens, row_blocks=row_blocks, **cut)
            least = cost_model.least(spec, token_tile, tile, _MOST_K, target)
            yield Candidates(least, partial(self._of_tile, spec, tile, target))

    def _of_tile(
        self, spec: MatmulSpec, tile: EightBitMmaInOrderSchedule, target: Target
    ) -> list[EightBitMmaInOrderSchedule]:
        """The candidate of a tile: with the panels of which chains take the fewest columns."""
        panels = (replace(tile, panel_k=panel_k, num_stages=stages) for panel_k, stages in _PANELS)
        fitting = [s for s in panels if self.fits(spec, s, target)]
        return sorted(fitting, key=lambda s: bytes_plan(spec, s, BYTES_MMA).base.tiles.columns)[:1]  # stable

    def predict(
        self, spec: MatmulSpec, token_tile: int, schedule: EightBitMmaInOrderSchedule, target: Target
    ) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def shape(self, schedule: EightBitMmaInOrderSchedule) -> tuple[object, ...]:
        return schedule.tokens, schedule.row_blocks

    def check(self, spec: MatmulSpec, schedule: EightBitMmaInOrderSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def build(self, spec: MatmulSpec, schedule: EightBitMmaInOrderSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_prefill_mma.kernel import eight_bit_prefill_mma_matmul

        return eight_bit_prefill_mma_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: EightBitMmaInOrderSchedule) -> bool:
        return legality.spills(spec, schedule)
