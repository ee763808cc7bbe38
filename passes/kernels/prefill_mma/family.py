"""The prefill family of targets without wgmma: matmuls of many tokens, in one launch of persistent blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import islice, product
from typing import TYPE_CHECKING, ClassVar, TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, Operation
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.family import PersistentFamily
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill.family import TOKEN_TILES as PREFILL_TILES
from lowbit.passes.kernels.prefill.legality import misfit
from lowbit.passes.kernels.prefill_mma import cost_model, legality
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

TOKEN_TILES = tuple(tile for tile in PREFILL_TILES if tile > 128)
"""Numbers of tokens that a schedule is chosen for: above those that a few launches of the decode kernel hold."""


M = TypeVar("M", bound=PrefillMmaSchedule)


class PersistentMmaFamily(PersistentFamily[M]):
    """The base of families that multiply by mma.sync.

    panels   columns and stages of panels, the most promising first
    """

    panels: ClassVar[tuple[tuple[int, int], ...]]

    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Iterator[Candidates[M]]:
        """Yields for every tile and its warps the first of `panels` that fits."""
        for of_tile in self._by_tile:
            least = self.least(spec, token_tile, of_tile[0], target)
            yield Candidates(least, partial(self._first, spec, of_tile, target))

    def _first(self, spec: MatmulSpec, of_tile: Sequence[M], target: Target) -> list[M]:
        return list(islice((s for s in of_tile if self.fits(spec, s, target)), 1))

    @abstractmethod
    def least(self, spec: MatmulSpec, token_tile: int, tile: M, target: Target) -> float:
        """Microseconds that a tile is predicted to take at least, in whatever panels."""

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[M]:
        return [s for of_tile in self._by_tile for s in of_tile if self.fits(spec, s, target)]

    @property
    def _most_k(self) -> int:
        """Columns of the widest panels."""
        return max(panel_k for panel_k, _ in self.panels)

    def shape(self, schedule: M) -> tuple[object, ...]:
        return schedule.tokens, schedule.row_blocks

    @cached_property
    def _by_tile(self) -> list[list[M]]:
        """All that the tuner may try, those of one tile together; `legality` leaves out what does not fit."""
        kind = self.schedule_type
        tiles = product(kind.allowed["tokens"], kind.allowed["row_blocks"])
        return [[kind(tokens, *panel, row_blocks=rows) for panel in self.panels] for tokens, rows in tiles]


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
        if target.has_wgmma or misfit(spec):
            return ()
        decoding = cost_model.decoding(spec)
        plans = [(of_tile, PersistentPlan(spec, of_tile[0], MMA)) for of_tile in self._by_tile]
        bounds = [(t, p, cost_model.least_clocks_of_tile(p, decoding, self._most_k, target)) for t, p in plans]

        def is_worthwhile(tokens: int) -> bool:
            limit = cost_model.longest_worthwhile(spec, tokens, target)
            tiles = (t for t, p, clocks in bounds if cost_model.time_of_tiles(p, tokens, clocks, target) < limit)
            found = (s for of_tile in tiles for s in self._first(spec, of_tile, target))
            return any(self.predict(spec, tokens, s, target) < limit for s in found)

        last = next((i for i in range(len(TOKEN_TILES), 0, -1) if is_worthwhile(TOKEN_TILES[i - 1])), 0)
        return TOKEN_TILES[:last]

    def least(self, spec: MatmulSpec, token_tile: int, tile: PrefillMmaSchedule, target: Target) -> float:
        plan = PersistentPlan(spec, tile, MMA)
        return cost_model.least_time_of_tiles(plan, token_tile, cost_model.decoding(spec), self._most_k, target)

    def spills(self, spec: MatmulSpec, schedule: PrefillMmaSchedule) -> bool:
        return legality.spills(spec, schedule)

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: PrefillMmaSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def check(self, spec: MatmulSpec, schedule: PrefillMmaSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: PrefillMmaSchedule) -> dict[str, bool]:
        return PersistentPlan(spec, schedule, MMA).scaling.rounding

    def build(self, spec: MatmulSpec, schedule: PrefillMmaSchedule) -> ir.Module:
        from lowbit.passes.kernels.prefill_mma.kernel import prefill_mma_matmul

        return prefill_mma_matmul(spec, schedule)
