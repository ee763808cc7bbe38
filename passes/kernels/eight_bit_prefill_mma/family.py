"""The prefill family of targets without wgmma for activations of 8 bits: one launch of persistent blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.formats.byte_codes import MOST_UNFOLDED
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.eight_bit_prefill.family import TOKEN_TILES, served_tiles
from lowbit.passes.kernels.eight_bit_prefill_mma import cost_model, legality
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_mma.cost_model import least_time_of_tiles
from lowbit.passes.kernels.prefill_mma.family import PersistentMmaFamily
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


class EightBitPrefillMma(PersistentMmaFamily[EightBitPrefillMmaSchedule]):
    """Codes become bytes and are multiplied by mma.sync of 8-bit types, tile after tile."""

    name: ClassVar[str] = "eight_bit_prefill_mma"
    operation: ClassVar[Operation] = "quantized_matmul"
    schedule_type = EightBitPrefillMmaSchedule
    panels: ClassVar[tuple[tuple[int, int], ...]] = ((128, 2), (256, 2), (128, 4), (256, 4))
    chosen_for: ClassVar[tuple[int, ...]] = TOKEN_TILES

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        """All of them: there is no other way to multiply x of 8 bits but launches that each read the whole weight."""
        if not spec.compute or target.has_wgmma:
            return ()
        some = any(self._first(spec, of_tile, target) for of_tile in self._by_tile)
        return served_tiles(spec, MOST_UNFOLDED + 1) if some else ()

    def least(self, spec: MatmulSpec, token_tile: int, tile: EightBitPrefillMmaSchedule, target: Target) -> float:
        plan = PersistentPlan(spec, tile, BYTES_MMA)
        return least_time_of_tiles(plan, token_tile, cost_model.decoding(spec), self._most_k, target)

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: EightBitPrefillMmaSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def check(self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule) -> dict[str, bool]:
        return {"folded": spec.fold_scales}

    def build(self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_prefill_mma.kernel import eight_bit_prefill_mma_matmul

        return eight_bit_prefill_mma_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: EightBitPrefillMmaSchedule) -> bool:
        return legality.spills(spec, schedule)
