"""The end of a tile in persistent kernels: sums become numbers of y and leave, in one of two ways.

A thread's sums are of neighbouring tokens, and y has neighbouring rows of the weight side by side. `StagedStore` turns
them around in shared memory, some tokens at a time, and stores 16-byte pieces. Every warp has a part of it for itself;
no warp waits for another. `DirectStore` lets every lane store its own.
"""

from __future__ import annotations

import math
from typing import Protocol

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import spatial
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.epilogue import Epilogue
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import ROWS_OF_TILE, WARPS
from lowbit.passes.kernels.persistent.tile_order import Position


def epilogue_of(p: Program, plan: PersistentPlan) -> Epilogue:
    """Returns what makes numbers of y from the sums of a tile."""
    rows = plan.spec.n // plan.spec.experts
    return Epilogue(p, plan.spec, ragged=rows % (ROWS_OF_TILE * plan.schedule.cluster) != 0)


class Store(Protocol):
    """Stores sums."""

    def store(self, total: Tile, place: Position, token: Scalar) -> None:
        """Makes numbers of sums [rows, tokens] of a tile's rows, from a token on, and stores them."""


class StagedStore:
    """Stores y by way of shared memory."""

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        self.p, self.spec, self._epilogue = p, plan.spec, epilogue_of(p, plan)
        if plan.staging is None:
            raise ValueError(f"{plan.schedule} has no shared memory to turn y around in")
        self._staging = staging = plan.staging
        at_a_time, pitch = staging.tokens, staging.pitch
        shape = (WARPS, staging.rows, at_a_time)
        self._turned = p.alloc_shared(self.spec.out_dtype, shape, (at_a_time * pitch, 1, pitch))
        self._unit = plan.tiles.unit

    def store(self, total: Tile, place: Position, token: Scalar) -> None:
        p = self.p
        numbers = self._epilogue.numbers(total, place.row_tile * (ROWS * self._unit), token)
        for first, tokens in self._staging.pieces(total.shape[1]):
            part = p.slice(numbers, 1, first, tokens)
            p.store(p.reshape(part, (WARPS, self._staging.rows, tokens)), self._turned, (0, 0, 0))
            p.barrier("warps", 1)
            self._store_part(place, token + first, tokens)
            p.barrier("warps", 1)

    def _store_part(self, place: Position, token: Scalar, tokens: int) -> None:
        """Some tokens from shared memory to y, in pieces of neighbouring rows."""
        p, rows, piece = self.p, self._staging.rows, self._rows_of_piece(tokens)
        across = rows // piece  # pieces of a token's rows
        lanes = math.gcd(across, 32)
        layout = spatial(WARPS, 1, 1).local(1, across // lanes, 1).local(1, 1, tokens * lanes // 32)
        layout = layout.spatial(1, 1, 32 // lanes).spatial(1, lanes, 1).local(1, piece, 1)
        turned = p.load(self._turned, (0, 0, 0), layout)
        boundary = (self._epilogue.outside("skip"), "none", "skip")
        numbers, first = p.reshape(turned, (WARPS * rows // piece, piece, tokens)), self._unit * rows // piece
        p.store(numbers, self._y(piece, place.end), (place.y_tile * first, 0, token), boundary)

    def _rows_of_piece(self, tokens: int) -> int:
        """Returns how many neighbouring rows a lane stores at once: as many as divide every token's row of y, and leave
        all lanes of a warp as many pieces."""
        return math.gcd(self.spec.outputs, self.spec.y.per_vector, self._staging.rows * tokens // 32)

    def _y(self, piece: int, end: Scalar | None) -> Memory:
        """The result in pieces of rows: [pieces, rows of a piece, tokens]. end: the token before which it ends; None:
        m."""
        p, n = self.p, self.spec.outputs
        shape = (-(-n // piece), piece, -1)
        return p.global_view(p["y"], self.spec.out_dtype, shape, (piece, 1, n), sizes=[p["m"] if end is None else end])


class DirectStore:
    """Stores y from registers.

    The lanes that hold neighbouring rows of the weight, eight of them, write 16 bytes side by side. That is half of
    what a sector of the L2 cache takes, of a tile whose products take a hundred times as long.
    """

    def __init__(self, p: Program, plan: PersistentPlan) -> None:
        self.p, self._epilogue, self._rows = p, epilogue_of(p, plan), ROWS * plan.tiles.unit
        self._y = self._epilogue.view_like_y("y")

    def store(self, total: Tile, place: Position, token: Scalar) -> None:
        first, end = place.row_tile * self._rows, self._epilogue
        of_y = first if place.of_y is None else place.of_y * self._rows
        view = self._y if place.end is None else end.view_like_y("y", place.end)
        boundary = (end.outside("skip"), "skip")
        self.p.store(end.numbers(total, first, token), view, (end.row_of_y(of_y), token), boundary)
