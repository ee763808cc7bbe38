"""Bytes, multiplied by wgmma of 8-bit types: `ByteWgmmaMultiplier`."""

from __future__ import annotations

from collections.abc import Iterable

from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.byte_weight import ByteWeight
from lowbit.passes.kernels.eight_bit_prefill.plan import BytesPlan
from lowbit.passes.kernels.eight_bit_prefill.product_sums import KeptSums, Product, PromotedSums, Sums
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

    def _sums_of(self, tokens: int, banks: int) -> Sums:
        """The sums of a tile or slice of so many tokens."""
        p, products, element = self.p, self.plan.products, self.plan.spec.x.sums
        parts = products.parts_of(tokens)
        layout = self.plan.base.tiles.rows.local(1, tokens // parts // MMA_M16N8_D.shape[1]) * MMA_M16N8_D
        return KeptSums(p, layout, element) if products.keeps_sums else PromotedSums(p, layout, parts, element, banks)

    def await_first(self) -> None:
        """Does nothing: scales come straight to registers."""

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], Iterable[Tile]]:
        p, sums = self.p, self._sums[turn.shape.tokens]
        sums.begin_tile()
        with p.loop(turn.first_round, turn.rounds, carried) as loop:
            loop.results = self._round(turn, sums, loop.index, self.weight.registers.like(loop.carried))
        self.panels.copy_first_of_slice(turn, order)
        return loop.carried, sums.end_tile()

    def leave(self) -> None:
        """Waits for copies of codes or panels that nobody reads."""
        if self.plan.held.code_stages or not self.plan.base.x.by_boxes:
            self.p.wait()

    def _round(self, turn: Turn, sums: Sums, index: Scalar, registers: WeightRegisters) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        weight, early, coming = self.weight, self.plan.held.early, turn.coming(index)
        here = turn.here.row_tile, index
        for panel in range(self.plan.base.round.panels):
            columns = list(self.plan.products.of_panel(panel))
            weight.read_codes(panel)
            ready = [weight.bytes.of(some, panel, registers) for some in columns]
            scales = [weight.bytes.scale_of(some, registers) for some in columns]
            for a in ready:
                self.p.materialize(a)
            if early:
                weight.load_later(registers, panel, here, coming)
            x = self.panels.wait(turn, index, panel)
            products = zip(columns, ready, scales, strict=True)
            sums.begin_panel([Product(a, x, some.start, scale) for some, a, scale in products])
            self.panels.copy_later(turn, index, panel)
            self.panels.release_before(panel)
            sums.begin_others()
            if not early:
                weight.load_later(registers, panel, here, coming)
            sums.end_panel()
        sums.end_round()
        return registers.flat()
