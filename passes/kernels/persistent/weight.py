"""The weight side of a persistent kernel that multiplies in x's type: codes, scales and zeros go from device memory to
registers a round ahead, and become fragments panel by panel.

An engine asks for `fragments`, and says when a panel is over; a `Weight` then loads what takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lowbit.passes.builder import Index, Program, Scalar, Tile
from lowbit.passes.kernels.persistent.fragments import Fragments
from lowbit.passes.kernels.persistent.group_columns import GroupColumns
from lowbit.passes.kernels.persistent.outliers import Outliers
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.weight_codes import PackedCodes
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.kernels.scales.panel_scales import PanelScales
from lowbit.passes.kernels.scales.round_scales import RoundScales

Finish = Callable[[Tile, Scalar], Tile]
"""Makes h of sums over all of k [rows, tokens], from a token on, as far as scales go."""


class WeightSide(Protocol):
    """What the skeleton needs of a weight. registers: what a thread holds when the first round begins."""

    registers: WeightRegisters

    def begin(self, row_tile: Scalar, index: Index) -> None:
        """Starts to load the first round of the first tile, round `index`, and fills tables."""

    def finish_of(self, row_tile: Scalar) -> Finish:
        """Returns what gives the sums of a tile of rows the scales that weights have not got."""
        ...


class Weight:
    """Loads and decodes the weight in program `p`.

    scales    scales, zeros and offsets of rounds
    of_panel  the numbers that a warp computes for a panel, where it does
    outliers  those of the panel that comes next, in shared memory
    """

    registers: WeightRegisters

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        self.p, self.plan = p, plan
        self.scales = RoundScales(p, plan)
        self.of_panel = PanelScales(p, plan, self.scales) if plan.scaling.panel_numbers else None
        self._fragments = Fragments(p, plan, self.scales, self.of_panel)
        self.codes = PackedCodes(p, plan)
        self.outliers: Outliers | None = None

    def begin(self, row_tile: Scalar, index: Index) -> None:
        codes = [self.codes.at(row_tile, index, piece).load() for piece in range(self.plan.round.pieces)]
        loaded = {
            name: [self.scales.at(name, row_tile, index, i).load() for i in range(tensor.count)]
            for name, tensor in self.scales.loaded.items()
        }
        self.registers = WeightRegisters(codes, loaded)
        self.scales.copy(row_tile, index, 0)
        self.scales.fill_table()
        self._fragments.fill_table()
        if self.plan.spec.outliers:
            self.outliers = Outliers(self.p, self.plan)
            self.outliers.clear()
            self.find_outliers(self.registers, row_tile)

    def load_next_round(self, registers: WeightRegisters, panel: int, row_tile: Scalar, following: Scalar) -> None:
        """Starts to load what the next round has in place of what this panel was the last to need."""
        round_, width = self.plan.round, self.plan.schedule.panel_k
        piece, rest = divmod((panel + 1) * width, round_.piece)
        if not rest:
            registers.codes[piece - 1] = self.codes.at(row_tile, following, piece - 1).load()
        for name, tensor in self.scales.loaded.items():
            if tensor.count > 1:
                for i in tensor.ended(width, panel):
                    registers.scales[name][i] = self.scales.at(name, row_tile, following, i).load()
            elif panel == 0:
                registers.coming[name] = self.scales.at(name, row_tile, following, 0).load()
            elif panel == round_.panels - 1:
                registers.scales[name] = [registers.coming[name]]

    def fragments(
        self, columns: GroupColumns, panel: int, registers: WeightRegisters, outliers: Tile | None = None
    ) -> Tile:
        """Returns the weights of some columns of a panel as they are multiplied; outliers: those of the panel."""
        codes = registers.codes[panel * self.plan.schedule.panel_k // self.plan.round.piece]
        return self._fragments.of(codes, columns, panel, registers, outliers)

    def find_outliers(self, registers: WeightRegisters, row_tile: Scalar) -> None:
        """Starts to look where the outliers of a tile of rows are, if a weight has some."""
        if self.outliers:
            registers.outliers = [self.outliers.first(row_tile)]

    def write_outliers(self, panel: Index, registers: WeightRegisters) -> None:
        """Writes the outliers of a panel, counted in the tile, to where its fragments are read."""
        if self.outliers:
            column = panel * self.plan.schedule.panel_k
            registers.outliers = [self.outliers.write(column, *registers.outliers)]

    def finish_of(self, row_tile: Scalar) -> Finish:
        scale = self.scales.row_scale(row_tile)
        return lambda total, token: total if scale is None else self.p.mul(total, scale)
