"""The packed codes of a weight, as a persistent block reads them: `PackedCodes`."""

from __future__ import annotations

from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Index, Program, Scalar
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.weight_read import WeightRead


class PackedCodes:
    """Codes in device memory, in program `p`. layout: how the units of a piece lie in the registers of a warp."""

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        packing, tiles = plan.spec.packing, plan.tiles
        self.p, self._piece, self._chunks = p, plan.round.piece, plan.round.piece // packing.chunk
        self._unit, self._chains, self._columns = tiles.unit, tiles.chains, packing.chunk
        size = packing.units * 32
        strides = (size, packing.chunks * size, 1)
        self._view = p.global_view(p["codes"], UNIT, (packing.chunks, packing.row_blocks, size), strides)
        rows = tiles.rows.unsqueeze(0)
        self.layout = rows.local(self._chunks, 1, 1).local(1, 1, packing.units).spatial(1, 1, 32)
        row_boundary = "none" if tiles.covers_rows else "clamp"
        self._boundary = ("none" if tiles.covers_columns else "clamp", row_boundary, "none")

    def at(self, row_tile: Scalar, index: Index, piece: int) -> WeightRead:
        """Returns the read of the codes of a piece of the round that begins at `index` (`Chains.start`)."""
        offset = self._chains.offset(piece * self._piece)
        chunk = index * (self._chains.unit // self._columns) + offset // self._columns
        return WeightRead(self.p, self._view, (chunk, row_tile * self._unit, 0), self.layout, self._boundary)
