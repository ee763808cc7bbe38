"""The prefill family of targets without wgmma: matmuls of many tokens, in one launch of persistent blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING, ClassVar, TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.persistent import PersistentFamily
from lowbit.passes.kernels.prefill.family import TOKEN_TILES as PREFILL_TILES
from lowbit.passes.kernels.prefill_mma import cost_model, legality
from lowbit.passes.kernels.prefill_mma.plan import PrefillMmaPlan
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

TOKEN_TILES = tuple(tile for tile in PREFILL_TILES if tile > 128)
"""Numbers of tokens that a schedule is chosen for: above those that a few launches of the decode kernel hold."""
_NO_TEMPORARY = 1.1  # times as long a launch may take that needs no memory for the weight as numbers


M = TypeVar("M", bound=PrefillMmaSchedule)


class PersistentMmaFamily(PersistentFamily[M]):
    """The base of families that multiply by mma.sync.

    panels   columns and stages of panels, the most promising first
    """

    panels: ClassVar[tuple[tuple[int, int], ...]]

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[M]:
        """Returns for every tile and its warps the first of `panels` that fits."""
        found: list[M] = []
        for of_tile in self._schedules_by_tile():
            found += islice((s for s in of_tile if self.fits(spec, s, target)), 1)
        return found

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[M]:
        return [s for of_tile in self._schedules_by_tile() for s in of_tile if self.fits(spec, s, target)]

    def shape(self, schedule: M) -> tuple[object, ...]:
        return schedule.tokens, schedule.row_blocks

    def _schedules_by_tile(self) -> Iterator[list[M]]:
        """All that the tuner may try, those of one tile together; `legality` leaves out what does not fit."""
        kind = self.schedule_type
        for tokens, row_blocks in product(kind.allowed["tokens"], kind.allowed["row_blocks"]):
            yield [kind(tokens, *panel, row_blocks=row_blocks) for panel in self.panels]


class PrefillMma(PersistentMmaFamily[PrefillMmaSchedule]):
    """Codes are decoded to the activation's type and multiplied by mma.sync, tile after tile."""

    name: ClassVar[str] = "prefill_mma"
    operation: ClassVar[Operation] = "matmul"
    schedule_type = PrefillMmaSchedule
    panels: ClassVar[tuple[tuple[int, int], ...]] = ((64, 4), (128, 2), (64, 2), (128, 4))
    chosen_for: ClassVar[tuple[int, ...]] = TOKEN_TILES

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        """Returns the token tiles up to the last for which these kernels are predicted to be at most a tenth slower
        than writing the weight out for the vendor's matmul."""
        found = self.candidates(spec, TOKEN_TILES[0], target)
        return _worthwhile(spec, target, tuple(found)) if found else ()

    def spills(self, spec: MatmulSpec, schedule: PrefillMmaSchedule) -> bool:
        return legality.spills(spec, schedule)

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: PrefillMmaSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def check(self, spec: MatmulSpec, schedule: PrefillMmaSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: PrefillMmaSchedule) -> dict[str, bool]:
        return PrefillMmaPlan(spec, schedule).rounding

    def build(self, spec: MatmulSpec, schedule: PrefillMmaSchedule) -> ir.Module:
        from lowbit.passes.kernels.prefill_mma.kernel import prefill_mma_matmul

        return prefill_mma_matmul(spec, schedule)


@lru_cache(maxsize=1024)
def _worthwhile(spec: MatmulSpec, target: Target, found: tuple[PrefillMmaSchedule, ...]) -> tuple[int, ...]:
    """The token tiles up to the last for which the best of some schedules is worth its predicted time."""

    def is_worth(tokens: int) -> bool:
        best = min(cost_model.predict(spec, tokens, schedule, target) for schedule in found)
        return best < _NO_TEMPORARY * cost_model.predict_vendor(spec, tokens, target)

    last = max((tile for tile in TOKEN_TILES if is_worth(tile)), default=0)
    return tuple(tile for tile in TOKEN_TILES if tile <= last)
