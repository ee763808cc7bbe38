"""Bytes, multiplied by wgmma of 8-bit types: `ByteWgmmaMultiplier`."""

from __future__ import annotations

from collections.abc import Iterable

from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
from lowbit.passes.kernels.eight_bit_prefill.product_sums import KeptSums, Product, PromotedSums, Sums, Zeros
from lowbit.passes.kernels.eight_bit_prefill.sums_of_x import SumsOfX
from lowbit.passes.kernels.persistent.chain_by_chain import Total, chain_by_chain, rounds_of_chain
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.persistent.tile_order import Order, Turn
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters


class ByteWgmmaMultiplier:
    """Multiplies tiles in program `p`. banks: sets of registers for products, where these are added to sums."""

    def __init__(
        self, p: Program, plan: BytesPlan[PrefillSchedule], banks: int, panels: Panels, weight: ByteWeight
    ) -> None:
        self.p, self.plan, self.panels, self.weight = p, plan, panels, weight
        self._sums = {tokens: self._sums_of(tokens, banks) for tokens in plan.base.tiles.tokens}
        self._of_x = SumsOfX(p, plan) if plan.base.scaling.sums_x else None

    def _sums_of(self, tokens: int, banks: int) -> Sums:
        """The sums of a tile or slice of so many tokens."""
        p, products, element = self.p, self.plan.products, self.plan.spec.x.sums
        parts, layout = products.parts_of(tokens), self._layout(tokens)
        return KeptSums(p, layout, element) if products.keeps_sums else PromotedSums(p, layout, parts, element, banks)

    def _layout(self, tokens: int) -> Layout:
        """The layout of the sums of a part of the tokens of a tile or slice."""
        of_part = tokens // self.plan.products.parts_of(tokens)
        return self.plan.base.tiles.rows.local(1, of_part // MMA_M16N8_D.shape[1]) * MMA_M16N8_D

    def await_first(self) -> None:
        """Does nothing: scales come straight to registers."""

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], Iterable[Tile]]:
        if self.plan.base.schedule.order:
            return self._tile_in_order(turn, order, carried)
        p, sums = self.p, self._sums[turn.shape.tokens]
        sums.begin_tile()
        with p.loop(turn.first_round, turn.rounds, carried) as loop:
            loop.results = self._round(turn, sums, loop.index, self.weight.registers.like(loop.carried))
        self.panels.copy_first_of_slice(turn, order)
        return loop.carried, (p.cast(some, "f32", "signed") for some in sums.end_tile())

    def _tile_in_order(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], Iterable[Tile]]:
        """The same chain by chain."""
        tokens, chains = turn.shape.tokens, self.plan.base.tiles.chains
        sums, layout, parts = self._sums[tokens], self._layout(tokens), self.plan.products.parts_of(tokens)

        def round_(index: Scalar, carried: list[Tile]) -> list[Tile]:
            return self._round(turn, sums, index, self.weight.registers.like(carried))

        def chain(number: Scalar, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
            sums.begin_tile()
            carried = rounds_of_chain(self.p, chains, number, carried, round_)
            of_chain = list(sums.end_tile())
            adds_up = self._of_x if not chains.product_columns else None  # else products have zeros
            row = layout.reduce((0,))
            of_x = self.p.load(adds_up.of_chain(turn, number), (0, 0), row) if adds_up else None
            return carried, [self.weight.scaled(each, turn.here.row_tile, of_x) for each in of_chain]

        found = chain_by_chain(self.p, chains, [Total(layout)] * parts, carried, chain)
        self.panels.copy_first_of_slice(turn, order)
        return found

    def leave(self) -> None:
        """Waits for copies of codes or panels that nobody reads."""
        if self.plan.held.code_stages or not self.plan.base.x.by_boxes:
            self.p.wait()

    def _round(self, turn: Turn, sums: Sums, index: Scalar, registers: WeightRegisters) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        weight, early, chains = self.weight, self.plan.held.early, self.plan.base.tiles.chains
        row_tile, following = turn.coming(index)
        here, coming = (turn.here.row_tile, chains.start(index)), (row_tile, chains.start(following))
        of_x = self._of_x if chains.product_columns else None
        for panel in range(self.plan.base.round.panels):
            columns = list(self.plan.products.of_panel(panel))
            weight.read_codes(panel)
            read = of_x.read(turn, index, panel) if of_x else None
            ready = [weight.bytes.of(some, panel, registers) for some in columns]
            scales = [weight.bytes.scale_of(some, registers) for some in columns]
            for a in ready:
                self.p.materialize(a)
            if early:
                weight.load_later(registers, panel, here, coming)
            x = self.panels.wait(turn, index, panel)
            zeros = self._zeros(of_x, columns, panel, registers)
            products = zip(ready, columns, scales, zeros, strict=True)
            sums.begin_panel([Product(a, x, some.start, scale, zero) for a, some, scale, zero in products])
            if of_x and read is not None:
                of_x.write(read, panel)
            self.panels.copy_later(turn, index, panel)
            self.panels.release_before(turn, index, panel)
            sums.begin_others()
            if not early:
                weight.load_later(registers, panel, here, coming)
            sums.end_panel()
        sums.end_round()
        return registers.flat()

    def _zeros(
        self, of_x: SumsOfX | None, columns: list[GroupColumns], panel: int, registers: WeightRegisters
    ) -> list[Zeros | None]:
        """What is added beside each product of a panel: nothing where no sums of x make up for zeros."""
        if of_x is None:
            return [None] * len(columns)
        offsets = [self.weight.offsets.of_product(some, registers) for some in columns]
        return [Zeros(offset, of_x.of(panel, i)) for i, offset in enumerate(offsets)]
