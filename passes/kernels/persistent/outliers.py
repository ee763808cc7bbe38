"""Outliers in persistent kernels: added to the weights of a panel before these are multiplied, for all tokens at once;
or multiplied as a weight of their own where an order of sums is given (`OrderedOutliers`).

A warp walks the lines of its row block beside the panels. The outliers of a panel are written to shared memory, where
they stand in the order of fragments among zeros, and are read as if they were a weight: 16 bytes for eight of them. So
what they cost grows with the weights, hardly with the outliers, and not with the tokens of a tile. They are written
while the panel before is multiplied.
"""

from __future__ import annotations

from lowbit.dialect.formats.outliers import LINE
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.dialect.layouts.layout import spatial
from lowbit.passes.builder import Index, OutlierShare, Program, Scalar, Tile
from lowbit.passes.kernels.outlier_steps import OutlierSteps
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import WARPS


class Outliers:
    """Brings the outliers of panels to registers, in program `p`."""

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        self.p, self.act, self._unit = p, plan.spec.act, plan.tiles.unit
        blocks = plan.schedule.panel_k // BLOCK_K
        self._table = p.global_view(p["outliers"], "i32", (plan.spec.packing.row_blocks + 1,))
        self._buffer = p.alloc_shared(self.act, (WARPS, blocks, 32, 8))
        self._lanes = spatial(WARPS, 1, 1, 1).local(1, blocks, 1, 1).spatial(1, 1, 32, 1).local(1, 1, 1, 8)
        self._fragments = spatial(WARPS, 1).local(1, blocks) * MMA_M16N8K16_A

    def first(self, row_tile: Scalar) -> Tile:
        """Where the outliers of a tile begin."""
        return self.p.first_outliers(self._table, row_tile * self._unit, WARPS)

    def clear(self) -> None:
        """Fills the buffer with zeros, before the first panel."""
        self.p.store(self.p.constant(0.0, self.act, self._lanes), self._buffer, (0, 0, 0, 0))
        self.p.barrier("warps", 1)

    def write(self, column: Index, cursor: Tile) -> Tile:
        """Writes the outliers of the panel that begins at a column; returns the cursor behind them."""
        behind = self.p.scatter_outliers(self._table, self._buffer, column, cursor)
        self.p.barrier("warps", 1)
        return behind

    def fragments(self) -> Tile:
        """What is written, as fragments [rows, panel_k]."""
        loaded = self.p.load(self._buffer, (0, 0, 0, 0), self._lanes)
        return self.p.view(loaded, self.act, self._fragments)

    def erase(self, cursor: Tile) -> None:
        """Leaves zeros for the next panel, once this one's fragments have been made. cursor: behind this panel."""
        self.p.barrier("warps", 1)
        self.p.erase_outliers(self._buffer, cursor)
        self.p.barrier("warps", 1)


class OrderedOutliers:
    """The same where columns are visited chain by chain: an index of a row block's lines tells where those of any panel
    are. What a thread holds of them is the index, and its words of the panel's lines."""

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        self.p, self.act, self._unit, self._columns = p, plan.spec.act, plan.tiles.unit, plan.schedule.panel_k
        self._chains, blocks = plan.tiles.chains, self._columns // BLOCK_K
        steps = OutlierSteps(plan.spec, self._columns)
        self._table = p.global_view(p["outliers"], "i32", (plan.spec.packing.row_blocks + 1,))
        self._buffer = p.alloc_shared(self.act, (1, WARPS, blocks, 32, 8))
        warps = spatial(1, WARPS, 1, 1)
        self._index = warps.local(1, 1, steps.numbers, 1).spatial(1, 1, 1, LINE)
        self._lines = warps.local(1, 1, steps.lines, 1).spatial(1, 1, 1, LINE)
        self._lanes = spatial(1, WARPS, 1, 1, 1).local(1, 1, blocks, 1, 1).spatial(1, 1, 1, 32, 1).local(1, 1, 1, 1, 8)
        self._fragments = plan.tiles.rows.local(1, blocks) * MMA_M16N8K16_A

    def clear(self) -> None:
        """Fills the buffer with zeros, before the first panel."""
        self.p.store(self.p.constant(0.0, self.act, self._lanes), self._buffer, (0, 0, 0, 0, 0))
        self.p.barrier("warps", 1)

    def first(self, row_tile: Scalar) -> list[Tile]:
        """The index of a tile's lines, and the words of its first panel's."""
        index = self.p.index_outliers(OutlierShare(self._table, row_tile * self._unit, Scalar.of(0), 1), self._index)
        return [index, self.load(Scalar.of(0), index)]

    def load(self, panel: Index, index: Tile) -> Tile:
        """The words of a panel's lines; panels are counted as they are visited."""
        column = self._chains.of_panel(panel)
        return self.p.load_lines(self._table, index, self._lines, column, self._columns)

    def write(self, panel: Index, index: Tile, lines: Tile) -> None:
        """Writes the outliers of a panel, whose lines have been loaded, among zeros."""
        self.p.place_outliers(self._table, index, lines, self._buffer, self._chains.of_panel(panel))
        self.p.barrier("warps", 1)

    def erase(self, panel: Index, index: Tile, lines: Tile) -> None:
        """Leaves zeros in their places, once the panel's fragments have been made."""
        self.p.barrier("warps", 1)
        self.p.place_outliers(self._table, index, lines, self._buffer, self._chains.of_panel(panel), erase=True)
        self.p.barrier("warps", 1)

    def fragments(self) -> Tile:
        """What is written, as fragments [rows, panel_k]."""
        return self.p.view(self.p.load(self._buffer, (0, 0, 0, 0, 0), self._lanes), self.act, self._fragments)
