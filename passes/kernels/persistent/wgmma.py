"""Numbers of x's type, multiplied by wgmma: `WgmmaMultiplier`.

Products are begun and not waited for (`lowbit.accumulate`): while one panel of columns is multiplied, the fragments of
the next are decoded. Sums stay in their registers for a whole tile.

What a warp does between the begin of a product and the wait for the one before is hidden behind that one. What it does
after the wait is hidden behind the product begun last and the other warpgroup's, and if it takes longer, these end
first. So only fragments are made there; outliers, and numbers that codes of scales stand for, are ready by then.

One product may be under way while the next one's fragments are decoded, and no more: of three sets of registers that
take turns, the assembler uses one too early, says so (C7513) and runs products one by one.
"""

from __future__ import annotations

from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.persistent.group_columns import GroupColumns, groups_of_panel
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.tile_order import Order, Turn
from lowbit.passes.kernels.persistent.weight import Weight
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.kernels.scales.panel_scales import PanelScales


class WgmmaMultiplier:
    """Multiplies tiles in program `p`. Registers for the sums of tiles and slices are kept by their tokens."""

    def __init__(self, p: Program, plan: PersistentPlan, panels: Panels, weight: Weight) -> None:
        self.p, self.plan, self.panels, self.weight = p, plan, panels, weight
        rows, every = plan.tiles.rows, plan.tiles.tokens
        self._sums = {tokens: p.accumulator(rows.local(1, tokens // 8) * MMA_M16N8_D) for tokens in every}

    def await_first(self) -> None:
        scales, of_panel = self.weight.scales, self.weight.of_panel
        scales.await_copies()
        if of_panel:
            scales.use(Scalar.of(0))
            of_panel.fill(0)

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
        p, weight, registers = self.p, self.weight, self.weight.registers.like(carried)
        sums = self._sums[turn.shape.tokens]
        p.clear(sums)
        weight.write_outliers(0, registers)
        with p.loop(turn.first_round, turn.rounds, registers.flat()) as loop:
            loop.results = self._round(turn, loop.index, loop.carried)
        self.panels.copy_first_of_slice(turn, order)
        registers, total = weight.registers.like(loop.carried), p.read(sums)
        weight.find_outliers(registers, turn.next.row_tile)
        return registers.flat(), [total]

    def leave(self) -> None:
        """Does nothing: products end before sums are read."""

    def _round(self, turn: Turn, index: Scalar, carried: list[Tile]) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        panels, weight, registers = self.plan.round.panels, self.weight, self.weight.registers.like(carried)
        coming, scales, number = turn.coming(index), weight.scales, turn.rounds_before + index
        scales.copy(*coming, (number + 1) % 2)
        scales.use(number % 2)
        sums = self._sums[turn.shape.tokens]
        for panel in range(panels):
            groups = list(groups_of_panel(self.plan, panel))
            ready = self._fragments(groups, panel, registers)
            x = self.panels.wait(turn, index, panel)
            for columns, a in zip(groups, ready):
                self.p.accumulate(a, x, columns.start, sums, row=0, held=columns is not groups[-1])
            self._go_on_to_outliers_of(index * panels + (panel + 1), registers)
            self.panels.copy_later(turn, index, panel)
            weight.load_next_round(registers, panel, *coming)
            if weight.of_panel:
                self._prepare_next_scales(weight.of_panel, panel, number)
            self.panels.release_before(turn, index, panel)
        if not weight.of_panel:
            scales.await_copies()
        return registers.flat()

    def _fragments(self, groups: list[GroupColumns], panel: int, registers: WeightRegisters) -> list[Tile]:
        """The weights of a panel as they are multiplied, decoded before the panel of x is waited for."""
        outliers = self.weight.outliers.fragments() if self.weight.outliers else None
        ready = [self.weight.fragments(columns, panel, registers, outliers) for columns in groups]
        for a in ready:
            self.p.materialize(a)
        return ready

    def _go_on_to_outliers_of(self, panel: Scalar, registers: WeightRegisters) -> None:
        """Writes the outliers of the next panel, counted in the tile, in place of this one's. Behind the last panel of
        a tile there are none."""
        if self.weight.outliers:
            self.weight.outliers.erase(*registers.outliers)
            self.weight.write_outliers(panel, registers)

    def _prepare_next_scales(self, of_panel: PanelScales, panel: int, number: Scalar) -> None:
        """Computes what the panel after this one is multiplied by, if a warp shares it. Behind the last panel of a
        round come the numbers of the next."""
        panels, scales = self.plan.round.panels, self.weight.scales
        if panel == panels - 1:
            scales.await_copies()
            scales.use((number + 1) % 2)
        of_panel.fill((panel + 1) % panels)
