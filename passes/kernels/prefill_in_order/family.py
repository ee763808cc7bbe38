"""The prefill family of invariant matmuls: the kernel of `passes.kernels.prefill`, which visits k chain by chain in the
order of sums that the kernels for few tokens have, and scales products of groups or weights as these do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, Operation
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.in_order_family import InOrderFamily
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE
from lowbit.passes.kernels.persistent.slices import with_slices
from lowbit.passes.kernels.prefill.bounds import prefill_bounds
from lowbit.passes.kernels.prefill_in_order import cost_model, legality
from lowbit.passes.kernels.prefill_in_order.plan import InOrderPlan
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule
from lowbit.passes.kernels.scales.in_order import scales_products
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_TILES = (
    *((32, 1, 2), (48, 1, 2), (64, 1, 2), (64, 2, 2), (80, 1, 1), (80, 2, 2), (96, 1, 1), (96, 2, 1), (96, 2, 2)),
    *((96, 3, 2), (112, 2, 1), (112, 2, 2), (128, 2, 1), (128, 4, 2), (144, 3, 1), (160, 4, 1), (176, 2, 1)),
)
"""Tokens of a tile, their parts, and banks."""
_WHOLE_TILES = tuple((tokens, 1, 1) for tokens in (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256))
"""The same where products are added to the sums of a chain directly."""
_PANELS = (*((128, stages) for stages in (4, 5, 6, 7, 8)), *((64, stages) for stages in (4, 5, 6, 7, 8)), (256, 4))
"""Columns and stages of panels, the most promising first."""


class PrefillInOrder(InOrderFamily[PrefillInOrderSchedule]):
    """Codes are decoded to the activation's type and multiplied by wgmma, tile after tile, chain after chain."""

    name: ClassVar[str] = "prefill_in_order"
    operation: ClassVar[Operation] = "matmul"
    schedule_type = PrefillInOrderSchedule

    def misfit(self, spec: MatmulSpec, target: Target) -> str:
        return legality.misfit(spec) if target.has_wgmma else f"{target}, which has no wgmma"

    def products_of(self, spec: MatmulSpec) -> tuple[str, ...]:
        return legality.products_of(spec)

    def of_cut(
        self, spec: MatmulSpec, token_tile: int, target: Target, cut: Mapping[str, Any]
    ) -> Iterator[Candidates[PrefillInOrderSchedule]]:
        bounds, tiles = prefill_bounds(spec, target), _TILES if scales_products(spec) else _WHOLE_TILES
        for (tokens, parts, banks), cluster in product(tiles, (1, 2)):
            choices: dict[str, Any] = {"cluster": cluster, "parts": parts, "banks": banks}
            kind = PrefillInOrderSchedule(tokens, **choices, **cut)
            if spec.n > ROWS_OF_TILE * (cluster - 1):
                least = bounds.of_kind(spec, kind, token_tile, target)
                yield Candidates(least, partial(self._of_kind, spec, token_tile, target, kind))

    def _of_kind(
        self, spec: MatmulSpec, token_tile: int, target: Target, kind: PrefillInOrderSchedule
    ) -> list[PrefillInOrderSchedule]:
        """The candidates of a kind: with its panels, and cuts of the last tiles."""
        found = with_slices(spec, token_tile, _with_panels(self, spec, target, kind), target)
        return [s for s in found if self.fits(spec, s, target)]

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: PrefillInOrderSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def shape(self, schedule: PrefillInOrderSchedule) -> tuple[object, ...]:
        return schedule.tokens, schedule.parts, schedule.banks, schedule.cluster, schedule.last_tokens > 0

    def check(self, spec: MatmulSpec, schedule: PrefillInOrderSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: PrefillInOrderSchedule) -> dict[str, bool]:
        return InOrderPlan(spec, schedule, WGMMA).scaling.rounding

    def x_boxes(self, spec: MatmulSpec, schedule: PrefillInOrderSchedule) -> Mapping[str, tuple[int, int]]:
        return InOrderPlan(spec, schedule, WGMMA).x.boxes

    def build(self, spec: MatmulSpec, schedule: PrefillInOrderSchedule) -> ir.Module:
        from lowbit.passes.kernels.prefill_in_order.kernel import prefill_in_order_matmul

        return prefill_in_order_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: PrefillInOrderSchedule) -> bool:
        return InOrderPlan(spec, schedule, WGMMA).spills


@lru_cache(maxsize=1024)  # the kinds of some orders, which all token tiles have
def _with_panels(
    family: PrefillInOrder, spec: MatmulSpec, target: Target, kind: PrefillInOrderSchedule
) -> tuple[PrefillInOrderSchedule, ...]:
    """Returns a kind with the panels of which chains take the fewest columns, as one schedule; none where none fit."""
    panels = (replace(kind, panel_k=panel_k, num_stages=stages) for panel_k, stages in _PANELS)
    fitting = [s for s in panels if family.fits(spec, s, target)]
    return tuple(sorted(fitting, key=lambda s: InOrderPlan(spec, s, WGMMA).tiles.columns)[:1])  # stable
