"""Numbers of x's type, multiplied by mma.sync chain by chain: `MmaChainMultiplier`.

    for chain, round of the chain:                  (`chain_by_chain`)
        for panel:
            for part of the tile's tokens, product of the panel:
                p = weights x^T                     from zero; without groups from the sums
                sums = sums + scale * p             and + offset * (sums of x), which make up for zeros and offsets

Sums of x are products of ones, for all rows of a warp, as in kernels for few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_B_NK
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.persistent.chain_by_chain import Total, chain_by_chain, rounds_of_chain
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.mma import MmaLayouts
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.tile_order import Order, Turn
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.kernels.prefill_in_order.ordered_weight import OrderedWeight
from lowbit.passes.kernels.prefill_in_order.products import Products


@dataclass(frozen=True)
class _Weights:
    """The weights of a product: its columns, what they are multiplied as, the scale of every row and what sums of x are
    multiplied by; None where there is none."""

    columns: GroupColumns
    a: Tile
    scale: Tile | None
    offset: Tile | None


class MmaChainMultiplier:
    """Multiplies tiles in program `p`. columns: of eight tokens each, which a warp has of a part of the tile's."""

    def __init__(self, p: Program, plan: PersistentPlan, columns: int, panels: Panels, weight: OrderedWeight) -> None:
        self.p, self.plan, self.panels, self.weight = p, plan, panels, weight
        self._products, self._parts = Products(plan), plan.schedule.tokens // plan.schedule.part_tokens
        self._layouts = MmaLayouts(plan.schedule, columns, MMA_M16N8K16_B_NK, BLOCK_K)

    def await_first(self) -> None:
        """Does nothing: scales are waited for with the first panel of x."""

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
        p, chains, layouts, held = self.p, self.plan.tiles.chains, [self._layouts.sums] * self._parts, len(carried)
        of_rows = [layout.reduce((0,)) for layout in layouts] if self._adds_rows else []

        def chain(number: Scalar, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
            zeros = [p.constant(0.0, "f32", layout) for layout in (*layouts, *of_rows)]
            found = rounds_of_chain(
                p, chains, number, [*carried, *zeros], lambda index, carried: self._round(turn, index, carried, held)
            )
            sums, of_x = found[held : held + self._parts], found[held + self._parts :] or [None] * self._parts
            scaled = self.weight.scaled
            return found[:held], [scaled(*each) for each in zip(sums, [turn.here.row_tile] * self._parts, of_x)]

        return chain_by_chain(p, chains, [Total(layout) for layout in layouts], carried, chain)

    @property
    def _adds_rows(self) -> bool:
        """Whether x is added up over chains, as rows have one scale."""
        return self.plan.scaling.sums_x and not self._products.columns

    def leave(self) -> None:
        """Waits for copies of panels that nobody reads."""
        self.p.wait()

    def _round(self, turn: Turn, index: Scalar, carried: list[Tile], held: int) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs. carried:
        so many tiles that are held of the weight, the sums of parts, and sums of x, where they are over chains."""
        weight, chains, s = self.weight, self.plan.tiles.chains, self.plan.schedule
        registers, sums = weight.registers.like(carried[:held]), carried[held : held + self._parts]
        of_rows = carried[held + self._parts :]
        row_tile, following = turn.coming(index)
        coming, number = (row_tile, chains.start(following)), turn.rounds_before + index
        weight.scales.use(number % 2)
        for panel in range(self.plan.round.panels):
            stage, weights = self.panels.wait(turn, index, panel), self._weights(panel, registers)
            for part, total in enumerate(sums):
                x = self._layouts.load_x(self.p, self.p.stage(stage, part), s.tokens)
                sums[part] = self._add_products(total, weights, x)
                if of_rows:
                    of_rows[part] = self._add_steps(of_rows[part], x)
            self.panels.copy_later(turn, index, panel)
            weight.load_next_round(registers, panel, *coming)
            if panel == 0:  # all warps are done with the round before
                weight.scales.copy(*coming, (number + 1) % 2)
        return [*registers.flat(), *sums, *of_rows]

    def _weights(self, panel: int, registers: WeightRegisters) -> list[_Weights]:
        """The weights of a panel by product."""
        weight, columns = self.weight, self._products.of_panel(panel)
        weights = [
            _Weights(some, weight.fragments(some, panel, registers), *weight.scale_of(some, panel, registers))
            for some in columns
        ]
        for some in weights:
            self.p.materialize(some.a)
        return weights

    def _add_products(self, total: Tile, weights: list[_Weights], x: Tile) -> Tile:
        """The sums of a part, and the products of a panel."""
        for some in weights:
            total = self._added(total, some, self.p.slice(x, 1, some.columns.start, some.columns.width))
        self.p.materialize(total)  # before the next part: the registers of products are free again
        return total

    def _add_steps(self, total: Tile, x: Tile) -> Tile:
        """The sums of x of a part, and those of the steps of a panel, one by one."""
        p, step = self.p, self._products.sum_columns
        for first in range(0, self.plan.schedule.panel_k, step):
            total = p.add(total, p.row_sums(p.slice(x, 1, first, step), total.layout))
        return total

    def _added(self, total: Tile, some: _Weights, x: Tile) -> Tile:
        """total + scale * a x^T, and + offset * (sums of x)."""
        p, layout = self.p, self._layouts.sums
        if some.scale is None:
            return p.mma(some.a, x, total)
        total = p.fma(p.mma(some.a, x, p.constant(0.0, "f32", layout)), some.scale, total)
        return total if some.offset is None else p.fma(some.offset, p.row_sums(x, layout.reduce((0,))), total)
