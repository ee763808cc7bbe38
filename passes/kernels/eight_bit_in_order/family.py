"""The prefill family of invariant matmuls for activations of 8 bits: the kernel of `passes.kernels.eight_bit_prefill`,
which visits k chain by chain in the order of sums that the kernels for few tokens have. Beside f8e4m3 it multiplies
codes as they are stored, as these do, and makes up for zeros and signs by sums of x; products of integers are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, Operation
from lowbit.passes.kernels.eight_bit_in_order import cost_model, legality
from lowbit.passes.kernels.eight_bit_in_order.schedule import EightBitInOrderSchedule
from lowbit.passes.kernels.eight_bit_prefill.bounds import eight_bit_prefill_bounds
from lowbit.passes.kernels.eight_bit_prefill.family import PRODUCTS
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.in_order_family import InOrderFamily
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE
from lowbit.passes.kernels.persistent.slices import with_slices
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_TOKENS = (32, 64, 96, 128, 160)  # of a tile
_PANELS = ((128, 4), (256, 4), (128, 6), (128, 5), (128, 8))
"""Columns and stages of panels, the most promising first."""


class EightBitInOrder(InOrderFamily[EightBitInOrderSchedule]):
    """Codes become bytes and are multiplied by wgmma of 8-bit types, chain after chain."""

    name: ClassVar[str] = "eight_bit_in_order"
    operation: ClassVar[Operation] = "quantized_matmul"
    schedule_type = EightBitInOrderSchedule

    def misfit(self, spec: MatmulSpec, target: Target) -> str:
        return legality.misfit(spec, target)

    def products_of(self, spec: MatmulSpec) -> tuple[str, ...]:
        return legality.products_of(spec)

    def of_cut(
        self, spec: MatmulSpec, token_tile: int, target: Target, cut: Mapping[str, Any]
    ) -> Iterator[Candidates[EightBitInOrderSchedule]]:
        bounds = eight_bit_prefill_bounds(spec, target)
        for tokens, cluster in product(_TOKENS, (1, 2)):
            choices: dict[str, Any] = {"cluster": cluster, **cut}
            kind = EightBitInOrderSchedule(tokens, **choices)
            if spec.n > ROWS_OF_TILE * (cluster - 1):
                least = bounds.of_kind(spec, kind, token_tile, target)
                yield Candidates(least, partial(self._of_kind, spec, token_tile, target, kind))

    def _of_kind(
        self, spec: MatmulSpec, token_tile: int, target: Target, kind: EightBitInOrderSchedule
    ) -> list[EightBitInOrderSchedule]:
        """The candidates of a kind: with its products and panels, and cuts of the last tiles."""
        found = with_slices(spec, token_tile, _with_panels(self, spec, target, kind), target)
        return [s for s in found if self.fits(spec, s, target)]

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: EightBitInOrderSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def shape(self, schedule: EightBitInOrderSchedule) -> tuple[object, ...]:
        return schedule.tokens, schedule.parts, schedule.banks, schedule.cluster, schedule.last_tokens > 0

    def check(self, spec: MatmulSpec, schedule: EightBitInOrderSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def x_boxes(self, spec: MatmulSpec, schedule: EightBitInOrderSchedule) -> Mapping[str, tuple[int, int]]:
        return bytes_plan(spec, schedule, WGMMA).base.x.boxes

    def build(self, spec: MatmulSpec, schedule: EightBitInOrderSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_prefill.kernel import eight_bit_prefill_matmul

        return eight_bit_prefill_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: EightBitInOrderSchedule) -> bool:
        return legality.spills(spec, schedule)


@lru_cache(maxsize=1024)  # the kinds of some orders, which all token tiles have
def _with_panels(
    family: EightBitInOrder, spec: MatmulSpec, target: Target, kind: EightBitInOrderSchedule
) -> tuple[EightBitInOrderSchedule, ...]:
    """Returns a kind with the first of `PRODUCTS` that leave registers enough, in the panels of which chains take the
    fewest columns, as one schedule; none where none fit."""
    for parts, banks in PRODUCTS:
        if kind.tokens % (16 * parts) == 0:
            some = replace(kind, parts=parts, banks=banks)
            panels = (replace(some, panel_k=panel_k, num_stages=stages) for panel_k, stages in _PANELS)
            if fitting := [s for s in panels if family.fits(spec, s, target)]:
                return (min(fitting, key=lambda s: bytes_plan(spec, s, WGMMA).base.tiles.columns),)
    return ()
