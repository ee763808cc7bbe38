"""Bytes, multiplied by mma.sync of 8-bit types: `ByteMmaMultiplier`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.layouts.fragments import MMA_M16N8K32_B_NK
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
from lowbit.passes.kernels.eight_bit_prefill.sums_of_x import SumsOfX
from lowbit.passes.kernels.persistent.chain_by_chain import Total, chain_by_chain, rounds_of_chain
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.mma import MmaLayouts
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.tile_order import Order, Turn
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters


@dataclass(frozen=True)
class _Weights:
    """The weights of a product.

    a       their bytes
    scale   of every row; None where nothing is scaled
    offset  what sums of x are multiplied by, and where these are; None where no sums of x make up for zeros
    """

    columns: GroupColumns
    a: Tile
    scale: Tile | None
    offset: tuple[Tile, Memory] | None


class ByteMmaMultiplier:
    """Multiplies tiles in program `p`. columns: of eight tokens each, which a warp has of a part of the tile's."""

    def __init__(
        self, p: Program, plan: BytesPlan[PrefillSchedule], columns: int, panels: Panels, weight: ByteWeight
    ) -> None:
        self.p, self.plan, self.panels, self.weight, s = p, plan, panels, weight, plan.base.schedule
        self._parts, self._tokens = plan.products.parts_of(s.tokens), plan.base.schedule.tokens
        self._layouts = MmaLayouts(s, columns, MMA_M16N8K32_B_NK, SUM_COLUMNS)
        self._element = plan.spec.x.sums if plan.products.keeps_sums else "f32"
        self._chains = plan.base.tiles.chains
        self._of_x = SumsOfX(p, plan) if plan.base.scaling.sums_x else None

    def await_first(self) -> None:
        """Does nothing: scales come straight to registers."""

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], Iterable[Tile]]:
        if self.plan.base.schedule.order:
            return self._tile_in_order(turn, carried)
        with self.p.loop(0, self.plan.base.tiles.rounds, [*carried, *self._zeros()]) as loop:
            loop.results = self._round(turn, loop.index, loop.carried)
        carried, sums = loop.carried[: -self._parts], loop.carried[-self._parts :]
        return carried, map(self._as_f32, sums)

    def _tile_in_order(self, turn: Turn, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
        """The same chain by chain."""
        p, chains, layout = self.p, self._chains, self._layouts.sums

        def round_(index: Scalar, carried: list[Tile]) -> list[Tile]:
            return self._round(turn, index, carried)

        def chain(number: Scalar, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
            found = rounds_of_chain(p, chains, number, [*carried, *self._zeros()], round_)
            carried, sums = found[: -self._parts], found[-self._parts :]
            if self._of_x and not chains.product_columns:
                of_x = self._of_x.of_chain(turn, number)
                sums_of_x: list[Tile | None] = [self._sums_of_x(of_x, part) for part in range(self._parts)]
            else:
                sums_of_x = [None] * self._parts
            scaled = self.weight.scaled
            each = zip(sums, sums_of_x, strict=True)
            return carried, [scaled(total, turn.here.row_tile, of_x) for total, of_x in each]

        return chain_by_chain(p, chains, [Total(layout)] * self._parts, carried, chain)

    def _zeros(self) -> list[Tile]:
        """The sums of all parts, from zero."""
        return [self.p.constant(0.0, self._element, self._layouts.sums) for _ in range(self._parts)]

    def _sums_of_x(self, of_x: Memory, part: int) -> Tile:
        """The sums of x of a part of the tokens, as those of products have their columns."""
        first = part * self.plan.base.schedule.part_tokens
        return self.p.load(of_x, (0, first), self._layouts.sums.reduce((0,)))

    def leave(self) -> None:
        """Waits for copies of panels that nobody reads."""
        self.p.wait()

    def _round(self, turn: Turn, index: Scalar, carried: list[Tile]) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        registers, sums = self.weight.registers.like(carried[: -self._parts]), carried[-self._parts :]
        row_tile, following = turn.coming(index)
        here, coming = (turn.here.row_tile, self._chains.start(index)), (row_tile, self._chains.start(following))
        of_x = self._of_x if self._chains.product_columns else None
        for panel in range(self.plan.base.round.panels):
            read = of_x.read(turn, index, panel) if of_x else None
            stage, weights = self.panels.wait(turn, index, panel), self._weights(panel, registers, of_x)
            if of_x and read is not None:
                of_x.write(read, panel)
            for part, total in enumerate(sums):
                x = self._layouts.load_x(self.p, self.p.stage(stage, part), self._tokens)
                sums[part] = self._add_products(total, part, weights, x)
            self.panels.copy_later(turn, index, panel)
            self.weight.load_later(registers, panel, here, coming)
        return [*registers.flat(), *sums]

    def _weights(self, panel: int, registers: WeightRegisters, of_x: SumsOfX | None) -> list[_Weights]:
        """The weights of a panel by product. of_x: the sums of x over their columns, where these make up for zeros."""
        made, found = self.weight.bytes, list[_Weights]()
        for i, some in enumerate(self.plan.products.of_panel(panel)):
            offset = (self.weight.offsets.of_product(some, registers), of_x.of(panel, i)) if of_x else None
            found.append(_Weights(some, made.of(some, panel, registers), made.scale_of(some, registers), offset))
        for some in found:
            self.p.materialize(some.a)
        return found

    def _add_products(self, total: Tile, part: int, weights: list[_Weights], x: Tile) -> Tile:
        """The sums of a part, and the products of a panel."""
        for some in weights:
            total = self._added(total, some, self.p.slice(x, 1, some.columns.start, some.columns.width), part)
        self.p.materialize(total)  # before the next part: the registers of products are free again
        return total

    def _added(self, total: Tile, some: _Weights, x: Tile, part: int) -> Tile:
        """total + scale * a x^T, where a is less its zeros"""
        p = self.p
        if self.plan.products.keeps_sums:
            return p.mma(some.a, x, total)
        product = self._as_f32(p.mma(some.a, x, p.constant(0.0, self.plan.spec.x.sums, self._layouts.sums)))
        if some.offset:
            offset, of_x = some.offset
            product = p.fma(offset, self._sums_of_x(of_x, part), product)
        return p.add(total, product) if some.scale is None else p.fma(product, some.scale, total)

    def _as_f32(self, total: Tile) -> Tile:
        return self.p.cast(total, "f32", "signed")
