"""The prefill family of targets without wgmma for activations of 8 bits: one launch of persistent blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.formats.byte_codes import MOST_UNFOLDED
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, Operation
from lowbit.passes.kernels.eight_bit_prefill.family import TOKEN_TILES, served_tiles
from lowbit.passes.kernels.eight_bit_prefill_mma import cost_model, legality
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_PANELS = ((128, 2), (256, 2), (128, 4), (256, 4))  # columns and stages, the most promising first


class EightBitPrefillMma(KernelFamily[EightBitPrefillMmaSchedule]):
    """Codes become bytes and are multiplied by mma.sync of 8-bit types, tile after tile."""

    name: ClassVar[str] = "eight_bit_prefill_mma"
    operation: ClassVar[Operation] = "quantized_matmul"
    schedule_type = EightBitPrefillMmaSchedule
    takes_any_tokens: ClassVar[bool] = True

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        """All of them: there is no other way to multiply x of 8 bits but launches that each read the whole weight."""
        serves = spec.compute and not target.has_wgmma and self.candidates(spec, TOKEN_TILES[0], target)
        return served_tiles(spec, MOST_UNFOLDED + 1) if serves else ()

    def serves(self, schedule: EightBitPrefillMmaSchedule, token_tile: int) -> bool:
        return token_tile in TOKEN_TILES

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[EightBitPrefillMmaSchedule]:
        """Returns for every tile and its warps the first of _PANELS that fits."""
        found: list[EightBitPrefillMmaSchedule] = []
        for of_tile in _schedules_by_tile():
            found += islice((s for s in of_tile if self._fits(spec, s, target)), 1)
        return found

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[EightBitPrefillMmaSchedule]:
        return [s for of_tile in _schedules_by_tile() for s in of_tile if self._fits(spec, s, target)]

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: EightBitPrefillMmaSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def suits(
        self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule, target: Target, measured: MatmulSpec
    ) -> bool:
        """Tiles come in waves, which are others for other sizes: the prediction is better than a neighbour."""
        same = (spec.n, spec.k, spec.compute) == (measured.n, measured.k, measured.compute)
        return same and self.allows(spec, schedule, target)

    def shape(self, schedule: EightBitPrefillMmaSchedule) -> tuple[object, ...]:
        return schedule.tokens, schedule.row_blocks

    def check(self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule) -> dict[str, bool]:
        return {"folded": spec.fold_scales}

    def build(self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_prefill_mma.kernel import eight_bit_prefill_mma_matmul

        return eight_bit_prefill_mma_matmul(spec, schedule)

    def _fits(self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule, target: Target) -> bool:
        return self.allows(spec, schedule, target) and not legality.spills(spec, schedule)


def _schedules_by_tile() -> Iterator[list[EightBitPrefillMmaSchedule]]:
    """All that the tuner may try, those of one tile together; `legality` leaves out what does not fit."""
    allowed = EightBitPrefillMmaSchedule.allowed
    for tokens, row_blocks in product(allowed["tokens"], allowed["row_blocks"]):
        yield [EightBitPrefillMmaSchedule(tokens, *panel, row_blocks=row_blocks) for panel in _PANELS]
