"""Bytes, multiplied by mma.sync of 8-bit types: `ByteMmaMultiplier`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.layouts.fragments import MMA_M16N8K32_B_NK
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.mma import MmaLayouts
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.tile_order import Order, Turn
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters


@dataclass(frozen=True)
class _Weights:
    """The weights of a product: its columns, their bytes, and the scale of every row; None where nothing is scaled."""

    columns: GroupColumns
    a: Tile
    scale: Tile | None


class ByteMmaMultiplier:
    """Multiplies tiles in program `p`. columns: of eight tokens each, which a warp has of a part of the tile's."""

    def __init__(
        self, p: Program, plan: BytesPlan[PrefillSchedule], columns: int, panels: Panels, weight: ByteWeight
    ) -> None:
        self.p, self.plan, self.panels, self.weight, s = p, plan, panels, weight, plan.base.schedule
        self._parts, self._tokens = plan.products.parts_of(s.tokens), plan.base.schedule.tokens
        self._layouts = MmaLayouts(s, columns, MMA_M16N8K32_B_NK, SUM_COLUMNS)
        self._element = plan.spec.x.sums if plan.products.keeps_sums else "f32"

    def await_first(self) -> None:
        """Does nothing: scales come straight to registers."""

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], Iterable[Tile]]:
        p, parts = self.p, self._parts
        zeros = [p.constant(0.0, self._element, self._layouts.sums) for _ in range(parts)]
        with p.loop(0, self.plan.base.tiles.rounds, [*carried, *zeros]) as loop:
            loop.results = self._round(turn, loop.index, loop.carried)
        carried, sums = loop.carried[:-parts], loop.carried[-parts:]
        return carried, map(self._as_f32, sums)

    def leave(self) -> None:
        """Waits for copies of panels that nobody reads."""
        self.p.wait()

    def _round(self, turn: Turn, index: Scalar, carried: list[Tile]) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        registers, sums = self.weight.registers.like(carried[: -self._parts]), carried[-self._parts :]
        here, coming = (turn.here.row_tile, index), turn.coming(index)
        for panel in range(self.plan.base.round.panels):
            stage, weights = self.panels.wait(turn, index, panel), self._weights(panel, registers)
            for part, total in enumerate(sums):
                x = self._layouts.load_x(self.p, self.p.stage(stage, part), self._tokens)
                sums[part] = self._add_products(total, weights, x)
            self.panels.copy_later(turn, index, panel)
            self.weight.load_later(registers, panel, here, coming)
        return [*registers.flat(), *sums]

    def _weights(self, panel: int, registers: WeightRegisters) -> list[_Weights]:
        """The weights of a panel by product."""
        made, columns = self.weight.bytes, self.plan.products.of_panel(panel)
        weights = [_Weights(some, made.of(some, panel, registers), made.scale_of(some, registers)) for some in columns]
        for some in weights:
            self.p.materialize(some.a)
        return weights

    def _add_products(self, total: Tile, weights: list[_Weights], x: Tile) -> Tile:
        """The sums of a part, and the products of a panel."""
        for some in weights:
            total = self._added(total, some, self.p.slice(x, 1, some.columns.start, some.columns.width))
        self.p.materialize(total)  # before the next part: the registers of products are free again
        return total

    def _added(self, total: Tile, some: _Weights, x: Tile) -> Tile:
        """total + scale * a x^T"""
        p = self.p
        if self.plan.products.keeps_sums:
            return p.mma(some.a, x, total)
        product = self._as_f32(p.mma(some.a, x, p.constant(0.0, self.plan.spec.x.sums, self._layouts.sums)))
        return p.add(total, product) if some.scale is None else p.fma(product, some.scale, total)

    def _as_f32(self, total: Tile) -> Tile:
        return self.p.cast(total, "f32", "signed")
