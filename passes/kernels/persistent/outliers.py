"""Outliers in persistent kernels: added to the weights of a panel before these are multiplied, for all tokens at once.

A warp walks the lines of its row block beside the panels. The outliers of a panel are written to shared memory, where
they stand in the order of fragments among zeros, and are read as if they were a weight: 16 bytes for eight of them. So
what they cost grows with the weights, hardly with the outliers, and not with the tokens of a tile. They are written
while the panel before is multiplied.
"""

from __future__ import annotations

from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.dialect.layouts.layout import spatial
from lowbit.passes.builder import Index, Program, Scalar, Tile
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
