"""The end of a tile in the prefill kernel: sums become numbers of y and leave in 16-byte pieces.

A thread's sums are of neighbouring tokens, and y has neighbouring rows of the weight side by side. So every warp turns
its part around in shared memory of its own, some tokens at a time; no warp waits for another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import spatial
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE, WARPS


class Epilogue(ABC):
    """Makes numbers of y from sums in program `p`; derived classes store them, each in its own way."""

    def __init__(self, p: Program, plan: PrefillPlan) -> None:
        self.p, self.plan, self.spec = p, plan, plan.spec

    @abstractmethod
    def store(self, total: Tile, row_tile: Scalar, token: Scalar) -> None:
        """Adds the bias to sums [rows, tokens], converts and stores them."""

    def numbers(self, total: Tile, row_tile: Scalar) -> Tile:
        """Adds the bias to sums [rows, tokens], and converts them to y's type."""
        p = self.p
        if self.spec.bias:
            total = p.add(total, p.cast(self.per_row("bias", self.spec.out_dtype, total, row_tile), "f32"))
        return p.cast(total, self.spec.out_dtype)

    def per_row(self, name: str, element: str, total: Tile, row_tile: Scalar) -> Tile:
        """Reads a number for every row of sums from the tensor of this name."""
        p = self.p
        view = p.global_view(p[name], element, (self.spec.n, 1))
        boundary = (self.outside("clamp"), "none")
        return p.load(view, (row_tile * ROWS_OF_TILE, 0), total.layout.reduce((1,)), boundary)

    def outside(self, word: str) -> str:
        """Returns the boundary of rows: `word` where some tile ends beyond the last row."""
        return word if self.spec.n % (ROWS_OF_TILE * self.plan.schedule.cluster) else "none"


class StagedEpilogue(Epilogue):
    """Stores y by way of shared memory."""

    def __init__(self, p: Program, plan: PrefillPlan) -> None:
        super().__init__(p, plan)
        at_a_time, pitch = plan.out_tokens, plan.out_pitch
        shape = (WARPS, ROWS, at_a_time)
        self._turned = p.alloc_shared(self.spec.out_dtype, shape, (at_a_time * pitch, 1, pitch))

    def store(self, total: Tile, row_tile: Scalar, token: Scalar) -> None:
        p, total = self.p, self.numbers(total, row_tile)
        for first, tokens in self.plan.out_pieces(total.shape[1]):
            part = p.slice(total, 1, first, tokens)
            p.store(p.reshape(part, (WARPS, ROWS, tokens)), self._turned, (0, 0, 0))
            p.barrier("warps", 1)
            self._store_part(row_tile, token + first, tokens)
            p.barrier("warps", 1)

    def _store_part(self, row_tile: Scalar, token: Scalar, tokens: int) -> None:
        """Some tokens from shared memory to y, in pieces of neighbouring rows."""
        p, piece = self.p, self._rows_of_piece(tokens)
        across = ROWS // piece  # pieces of a token's rows
        lanes = math.gcd(across, 32)
        layout = spatial(WARPS, 1, 1).local(1, across // lanes, 1).local(1, 1, tokens * lanes // 32)
        layout = layout.spatial(1, 1, 32 // lanes).spatial(1, lanes, 1).local(1, piece, 1)
        turned = p.load(self._turned, (0, 0, 0), layout)
        pieces = ROWS_OF_TILE // piece
        boundary = (self.outside("skip"), "none", "skip")
        p.store(p.reshape(turned, (pieces, piece, tokens)), self._y(piece), (row_tile * pieces, 0, token), boundary)

    def _rows_of_piece(self, tokens: int) -> int:
        """Returns how many neighbouring rows a lane stores at once: as many as divide every token's row of y, and leave
        all lanes of a warp as many pieces."""
        return math.gcd(self.spec.n, self.spec.y.per_vector, ROWS * tokens // 32)

    def _y(self, piece: int) -> Memory:
        """The result in pieces of rows: [pieces, rows of a piece, tokens]."""
        p, n = self.p, self.spec.n
        shape = (-(-n // piece), piece, -1)
        return p.global_view(p["y"], self.spec.out_dtype, shape, (piece, 1, n), sizes=[p["m"]])
