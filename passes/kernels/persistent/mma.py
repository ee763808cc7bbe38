"""Numbers of x's type, multiplied by mma.sync: `MmaMultiplier`.

x is read by ldmatrix, once per warp. So that shared memory keeps up with the tensor core, a warp may have 32 rows, for
which one fragment of x serves twice, and half of the tokens of the tile; two warps then decode the same weights. Sums
are ordinary registers, carried by loops. Two warps share a quarter of a multiprocessor and hide each other's decoding
and waiting.
"""

from __future__ import annotations

from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout, replicated, spatial
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.persistent.group_columns import groups_of_panel
from lowbit.passes.kernels.persistent.panels import Panels
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import WARPS, PrefillSchedule
from lowbit.passes.kernels.persistent.tile_order import Order, Turn
from lowbit.passes.kernels.persistent.weight import Weight
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters


class MmaLayouts:
    """How sums, and fragments of x, of some columns of eight tokens lie over warps.

    fragment  operand B of the instruction
    width     columns of k that it multiplies
    """

    def __init__(self, schedule: PrefillSchedule, columns: int, fragment: Layout, width: int) -> None:
        along_rows, along_tokens = schedule.warps
        self.sums = spatial(along_rows, along_tokens).local(WARPS // along_rows, columns) * MMA_M16N8_D
        warps = replicated(along_rows, 2).spatial(along_tokens, 1)
        self._x = warps.local(columns, schedule.panel_k // width) * fragment

    def load_x(self, p: Program, stage: Memory, tokens: int) -> Tile:
        """Returns a panel of x as it is multiplied: [tokens, panel_k]."""
        return p.reshape(p.load_matrix(stage, tokens, self._x.unsqueeze(0)), self._x.shape)


class MmaMultiplier:
    """Multiplies tiles in program `p`."""

    def __init__(self, p: Program, plan: PersistentPlan, panels: Panels, weight: Weight) -> None:
        self.p, self.plan, self.panels, self.weight = p, plan, panels, weight
        s, columns = plan.schedule, plan.schedule.warp_tokens // MMA_M16N8_D.shape[1]
        self._layouts = MmaLayouts(s, columns, MMA_M16N8K16_B_NK, BLOCK_K)

    def await_first(self) -> None:
        """Does nothing: scales are waited for with the first panel of x."""

    def tile(self, turn: Turn, order: Order, carried: list[Tile]) -> tuple[list[Tile], list[Tile]]:
        p = self.p
        with p.loop(0, self.plan.tiles.rounds, [*carried, p.constant(0.0, "f32", self._layouts.sums)]) as loop:
            loop.results = self._round(turn, loop.index, loop.carried)
        *carried, total = loop.carried
        registers = self.weight.registers.like(carried)
        self.weight.find_outliers(registers, turn.next.row_tile)
        return registers.flat(), [total]

    def leave(self) -> None:
        """Waits for copies of panels that nobody reads."""
        self.p.wait()

    def _round(self, turn: Turn, index: Scalar, carried: list[Tile]) -> list[Tile]:
        """Multiplies the columns of a round. What the registers held is replaced by what the next round needs."""
        p, weight, s = self.p, self.weight, self.plan.schedule
        *held, total = carried
        registers, coming = weight.registers.like(held), turn.coming(index)
        number = turn.rounds_before + index
        weight.scales.use(number % 2)
        for panel in range(self.plan.round.panels):
            stage = p.stage(self.panels.wait(turn, index, panel), 0)
            outliers = self._outliers_of_panel(index, panel, registers)
            x = self._layouts.load_x(p, stage, s.tokens)
            for columns in groups_of_panel(self.plan, panel):
                a = weight.fragments(columns, panel, registers, outliers)
                total = p.mma(a, p.slice(x, 1, columns.start, columns.width), total)
            self.panels.copy_later(turn, index, panel)
            weight.load_next_round(registers, panel, *coming)
            if panel == 0:  # all warps are done with the round before
                weight.scales.copy(*coming, (number + 1) % 2)
        return [*registers.flat(), total]

    def _outliers_of_panel(self, index: Scalar, panel: int, registers: WeightRegisters) -> Tile | None:
        """The outliers of a panel as fragments, where a weight has some; their place is for the next panel's again."""
        outliers = self.weight.outliers
        if not outliers:
            return None
        self.weight.write_outliers(index * self.plan.round.panels + panel, registers)
        fragments = outliers.fragments()
        outliers.erase(*registers.outliers)
        return fragments
