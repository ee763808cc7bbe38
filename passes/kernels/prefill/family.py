"""The prefill family: matmuls of many tokens, in one launch of persistent blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, Operation
from lowbit.passes.kernels.persistent.candidates import kinds, shared_kinds
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.family import PersistentFamily
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE, PrefillSchedule
from lowbit.passes.kernels.persistent.slices import with_slices
from lowbit.passes.kernels.prefill import cost_model, legality
from lowbit.passes.kernels.prefill.bounds import prefill_bounds
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

TOKEN_TILES = (
    *(80, 88, 96, 104, 112, 120, 128, 160, 192, 256, 320, 384, 512, 640),
    *(768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192),
)
"""Numbers of tokens that a schedule is chosen for. Any schedule serves any number: these are as far apart as choices
differ."""
_TOKENS = (32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 224, 256)  # of a tile


class Prefill(PersistentFamily[PrefillSchedule]):
    """Codes are decoded to the activation's type and multiplied by wgmma, tile after tile."""

    name: ClassVar[str] = "prefill"
    operation: ClassVar[Operation] = "matmul"
    schedule_type = PrefillSchedule
    chosen_for: ClassVar[tuple[int, ...]] = TOKEN_TILES

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        if not target.has_wgmma or legality.misfit(spec):
            return ()
        return TOKEN_TILES if any(self._widest(spec, target, PrefillSchedule(tile)) for tile in _TOKENS) else ()

    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Iterator[Candidates[PrefillSchedule]]:
        every = kinds(PrefillSchedule, _TOKENS, spec, token_tile, target)
        return self._groups(spec, token_tile, target, every)

    def new_groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Iterator[Candidates[PrefillSchedule]]:
        every = shared_kinds(PrefillSchedule, spec, token_tile, target)
        return self._groups(spec, token_tile, target, every)

    def _groups(
        self, spec: MatmulSpec, token_tile: int, target: Target, every: Iterable[PrefillSchedule]
    ) -> Iterator[Candidates[PrefillSchedule]]:
        bounds = prefill_bounds(spec, target)
        for kind in every:
            least = bounds.of_kind(spec, kind, token_tile, target)
            yield Candidates(least, partial(self._of_kind, spec, token_tile, target, kind))

    def least_time(self, spec: MatmulSpec, token_tile: int, target: Target) -> float:
        shares = token_tile <= target.thresholds.sharing
        return prefill_bounds(spec, target).of_all(spec, token_tile, target, shares=shares)

    def _of_kind(
        self, spec: MatmulSpec, token_tile: int, target: Target, kind: PrefillSchedule
    ) -> list[PrefillSchedule]:
        """The candidates of a kind, with the panels, stages and cuts that the rule may take."""
        widest = self._widest(spec, target, kind)
        found = _staged(widest) if widest else ()
        return [s for s in with_slices(spec, token_tile, found, target) if self.fits(spec, s, target)]

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: PrefillSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[PrefillSchedule]:
        choices = product(kinds(PrefillSchedule, _TOKENS, spec, token_tile, target), (64, 128, 256), (4, 6, 8))
        every = (replace(kind, panel_k=panel_k, num_stages=stages) for kind, panel_k, stages in choices)
        return [s for s in with_slices(spec, token_tile, every, target) if self.fits(spec, s, target)]

    def shape(self, schedule: PrefillSchedule) -> tuple[object, ...]:
        return schedule.tokens, schedule.cluster, schedule.split_k, schedule.stream_k, schedule.last_tokens > 0

    def check(self, spec: MatmulSpec, schedule: PrefillSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: PrefillSchedule) -> dict[str, bool]:
        return PersistentPlan(spec, schedule, WGMMA).scaling.rounding

    def x_boxes(self, spec: MatmulSpec, schedule: PrefillSchedule) -> Mapping[str, tuple[int, int]]:
        return PersistentPlan(spec, schedule, WGMMA).x.boxes

    def build(self, spec: MatmulSpec, schedule: PrefillSchedule) -> ir.Module:
        from lowbit.passes.kernels.prefill.kernel import prefill_matmul

        return prefill_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: PrefillSchedule) -> bool:
        return legality.spills(spec, schedule)

    def _widest(self, spec: MatmulSpec, target: Target, kind: PrefillSchedule) -> PrefillSchedule | None:
        """The schedule of a kind of which the rule may take one: with the widest panels for which there are registers,
        since what a panel takes besides its products is the same for all; first those whose rounds fit the groups."""
        panels = [replace(kind, panel_k=panel_k) for panel_k in (256, 128, 64)]
        panels.sort(key=lambda s: not PersistentPlan(spec, s, WGMMA).round.divides_groups)
        fitting = (s for s in panels if self.fits(spec, s, target))
        return next(fitting, None) if spec.n > ROWS_OF_TILE * (kind.cluster - 1) else None


def _staged(s: PrefillSchedule) -> Iterator[PrefillSchedule]:
    """Yields a schedule with more stages, if its panels have 128 columns or may have as few, and the schedule. Where
    eight have room, they take 3 to 12 % less time, which is predicted for shared rounds alone."""
    if s.panel_k == 256 and s.streams:
        yield replace(s, panel_k=128, num_stages=8)
    if s.panel_k == 128:
        yield replace(s, num_stages=8)
    yield s
