"""Numbers of x's type, multiplied by wgmma chain by chain: `ChainMultiplier`.

    for chain, round of the chain:                  (`chain_by_chain`)
        for panel, product of the panel:
            p = weights x^T                         from zero, in registers of its own
            sums = sums + scale * p                 and + offset * (sums of x), which make up for zeros and offsets

Where weights or rows are scaled, products are added to sums directly (`KeptSums`).
Products are begun and not waited for; while one is under way, that before it is scaled and added (`PromotedSums`).
"""

from __future__ import annotations

from collections.abc import Iterator

from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Index, Memory, Program, Scalar, Tile
from lowbit.passes.kernels.eight_bit_prefill.product_sums import KeptSums, Product, PromotedSums, Sums, Zeros
from lowbit.passes.kernels.persistent.chain_by_chain import Total, chain_by_chain, rounds_of_chain
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE
from lowbit.passes.kernels.persistent.tile_order import Order, Turn
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.kernels.prefill_in_order.ordered_weight import OrderedWeight
from lowbit.passes.kernels.prefill_in_order.plan import InOrderPlan
from lowbit.passes.kernels.prefill_in_order.sums_of_x import SumsOfX


class ChainMultiplier:
    """Multiplies tiles in program `p`. Registers for the sums of tiles and slices are kept by their tokens."""

    def __init__(self, p: Program, plan: InOrderPlan, panels: Panels, weight: OrderedWeight) -> None:
        self.p, self.plan, self.products, self.panels, self.weight = p, plan, plan.products, panels, weight
        self._sums = {tokens: self._sums_of(tokens) for tokens in plan.tiles.tokens}
        self._of_x = SumsOfX(p, plan, plan.products) if plan.scaling.sums_x else None
        shape = ROWS_OF_TILE, plan.shared_tokens
        self._totals = p.alloc_shared("f32", shape, (plan.pitch, 1)) if plan.shared_tokens else None

    def _sums_of(self, tokens: int) -> Sums:
        """The sums of a chain of a tile or slice of so many tokens."""
        if not self.products.columns:
            return KeptSums(self.p, self._layout(tokens), "f32", at_once=True)
        parts = self.products.parts_of(tokens)
        return PromotedSums(self.p, self._layout(tokens // parts), parts, "f32", self.plan.schedule.banks)

    def _layout(self, tokens: int) -> Layout:
        return self.plan.tiles.rows.local(1, tokens // MMA_M16N8_D.shape[1]) * MMA_M16N8_D

    def await_first(self) -> None:
        self.weight.scales.await_copies()

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
        tokens, held = turn.shape.tokens, len(carried)
        sums, totals, chains = self._sums[tokens], self._totals_of(tokens), self.plan.tiles.chains
        of_rows = self._of_x if not self.products.columns else None  # else products have zeros

        def round_(index: Scalar, carried: list[Tile]) -> list[Tile]:
            return self._round(turn, sums, index, self.weight.registers.like(carried[:held]), carried[held:])

        def chain(number: Scalar, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
            sums.begin_tile()
            first = [of_rows.zero(tokens)] if of_rows else []
            found = rounds_of_chain(self.p, chains, number, [*carried, *first], round_)
            of_chain, of_x = list(sums.end_tile()), None
            if of_rows:
                of_x = self.p.load(of_rows.of_chain(found[held]), (0, 0), self._layout(tokens).reduce((0,)))
            scaled = [self.weight.scaled(each, turn.here.row_tile, of_x) for each in of_chain]
            return found[:held], self._cut(*scaled) if len(totals) > len(scaled) else scaled

        found = chain_by_chain(self.p, chains, totals, carried, chain)
        self.panels.copy_first_of_slice(turn, order)
        return found

    def _totals_of(self, tokens: int) -> list[Total]:
        """The totals of a tile or slice: those of parts beside products, else by where they are."""
        if self.products.columns:
            parts = self.products.parts_of(tokens)
            return [Total(self._layout(tokens // parts))] * parts
        places = zip(self._shares(tokens), (None, self._totals), strict=True)
        return [Total(self._layout(share), shared) for share, shared in places if share]

    def _cut(self, sums: Tile) -> list[Tile]:
        """The sums of those tokens whose totals registers hold, and of the others."""
        first, others = self._shares(sums.shape[1])
        return [self.p.slice(sums, 1, 0, first), self.p.slice(sums, 1, first, others)]

    def _shares(self, tokens: int) -> tuple[int, int]:
        """How many tokens' totals are in registers, and in shared memory."""
        first = self.plan.register_tokens(tokens)
        return first, tokens - first

    def leave(self) -> None:
        """Does nothing: products end before sums are read."""

    def _round(
        self, turn: Turn, sums: Sums, index: Scalar, registers: WeightRegisters, of_rows: list[Tile]
    ) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs. of_rows:
        the sums of x of the chain so far, where rows have one scale and x is added up."""
        weight, scales = self.weight, self.weight.scales
        row_tile, following = turn.coming(index)
        coming, number = (row_tile, self.plan.tiles.chains.start(following)), turn.rounds_before + index
        scales.copy(*coming, (number + 1) % 2)
        scales.use(number % 2)
        for panel in range(self.plan.round.panels):
            columns = list(self.products.of_panel(panel))
            ready = [weight.fragments(some, panel, registers) for some in columns]
            of_products = [weight.scale_of(some, panel, registers) for some in columns]
            for a in ready:
                self.p.materialize(a)
            x, stage = self.panels.wait(turn, index, panel), self.panels.stage_of(turn, index, panel)
            sums.begin_panel(list(self._products(x, stage, columns, ready, of_products)))
            if self._of_x and self.products.columns:
                self._of_x.fill(x, stage, turn.shape.tokens)
            elif self._of_x:
                of_rows = [self._of_x.add(total, x, turn.shape.tokens) for total in of_rows]
            self.panels.copy_later(turn, index, panel)
            self.panels.release_before(turn, index, panel)
            sums.begin_others()
            weight.load_next_round(registers, panel, *coming)
            sums.end_panel()
        sums.end_round()
        scales.await_copies()
        return [*registers.flat(), *of_rows]

    def _products(
        self,
        x: Memory,
        stage: Index,
        columns: list[GroupColumns],
        ready: list[Tile],
        of_products: list[tuple[Tile | None, Tile | None]],
    ) -> Iterator[Product]:
        """Yields the products of a panel, whose stage is `x`. of_products: scales, and what sums of x are multiplied
        by."""
        for i, (some, a, (scale, offset)) in enumerate(zip(columns, ready, of_products, strict=True)):
            zeros = Zeros(offset, self._of_x.of(stage, i), beside=True) if self._of_x and offset is not None else None
            yield Product(a, x, some.start, scale, zeros)
