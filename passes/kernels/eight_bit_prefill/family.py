"""The eight_bit_prefill family: matmuls of many tokens of 8 bits, in one launch of persistent blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, Operation
from lowbit.passes.kernels.eight_bit_prefill import cost_model, legality
from lowbit.passes.kernels.eight_bit_prefill.plan import EightBitPrefillPlan
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule
from lowbit.passes.kernels.prefill.family import TOKEN_TILES as PREFILL_TILES
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

TOKEN_TILES = tuple(tile for tile in PREFILL_TILES if tile > 128)
"""Numbers of tokens that a schedule is chosen for: above those that the eight_bit kernels serve."""
_TOKENS = (32, 64, 96, 128, 192, 256)  # of a tile
_PRODUCTS = ((1, 2), (2, 2), (3, 2), (4, 2), (6, 2), (1, 1), (2, 1), (4, 1), (8, 1))
"""Parts and banks, the most promising first."""


class EightBitPrefill(KernelFamily[EightBitPrefillSchedule]):
    """Codes become bytes and are multiplied by wgmma of 8-bit types, tile after tile."""

    name: ClassVar[str] = "eight_bit_prefill"
    operation: ClassVar[Operation] = "quantized_matmul"
    schedule_type = EightBitPrefillSchedule
    takes_any_tokens: ClassVar[bool] = True

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        return TOKEN_TILES if spec.compute and self.candidates(spec, TOKEN_TILES[0], target) else ()

    def serves(self, schedule: EightBitPrefillSchedule, tokens: int) -> bool:
        return tokens in TOKEN_TILES

    def candidates(self, spec: MatmulSpec, tokens: int, target: Target) -> Sequence[EightBitPrefillSchedule]:
        """For every tile the first of `_PRODUCTS` for which there are registers."""
        found: list[EightBitPrefillSchedule] = []
        for of_tile in _schedules_by_tile((128,), (4,)):
            found += islice((s for s in of_tile if self._fits(spec, s, target)), 1)
        return [s for s in found if spec.n > ROWS_OF_TILE * (s.cluster - 1)]

    def search_space(self, spec: MatmulSpec, tokens: int, target: Target) -> Sequence[EightBitPrefillSchedule]:
        every = (s for of_tile in _schedules_by_tile((128, 256), (4, 8)) for s in of_tile)
        return [s for s in every if self._fits(spec, s, target)]

    def predict(self, spec: MatmulSpec, tokens: int, schedule: EightBitPrefillSchedule, target: Target) -> float:
        return cost_model.predict(spec, tokens, schedule, target)

    def suits(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule, target: Target, measured: MatmulSpec) -> bool:
        """Tiles come in waves, which are others for other sizes: the prediction is better than a neighbour."""
        same = (spec.n, spec.k, spec.compute) == (measured.n, measured.k, measured.compute)
        return same and self.allows(spec, schedule, target)

    def shape(self, schedule: EightBitPrefillSchedule) -> tuple[object, ...]:
        return schedule.tokens, schedule.parts, schedule.cluster

    def check(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def x_box(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule) -> tuple[int, int]:
        return EightBitPrefillPlan(spec, schedule).box

    def build(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_prefill.kernel import eight_bit_prefill_matmul

        return eight_bit_prefill_matmul(spec, schedule)

    def _fits(self, spec: MatmulSpec, schedule: EightBitPrefillSchedule, target: Target) -> bool:
        return self.allows(spec, schedule, target) and not legality.spills(spec, schedule)


def _schedules_by_tile(
    panels: Sequence[int], stages: Sequence[int]
) -> Iterator[list[EightBitPrefillSchedule]]:
    """All schedules with these panels and stages, those of one tile together."""
    for tokens, cluster in product(_TOKENS, (1, 2)):
        choices = product(panels, stages, _PRODUCTS)
        yield [
            EightBitPrefillSchedule(tokens, panel_k, num_stages, cluster, parts, banks)
            for panel_k, num_stages, (parts, banks) in choices
            if tokens % (16 * parts) == 0
        ]
