"""The end of a tile in the prefill kernel with mma.sync: sums become numbers of y, which every lane stores for itself.

The lanes that hold neighbouring rows of the weight, eight of them, write 16 bytes side by side. That is half of what a
sector of the L2 cache takes, of a tile whose products take a hundred times as long.
"""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE


class Epilogue:
    """Stores tiles of y in program `p`."""

    def __init__(self, p: Program, spec: MatmulSpec) -> None:
        self.p, self.spec = p, spec
        self._y = p.global_view(p["y"], spec.out_dtype, (spec.n, -1), (1, spec.n), sizes=[p["m"]])

    def store(self, total: Tile, row_tile: Scalar, token: Scalar) -> None:
        """Adds the bias to sums [rows, tokens], converts and stores them."""
        p = self.p
        if self.spec.bias:
            total = p.add(total, p.cast(self.per_row("bias", self.spec.out_dtype, total, row_tile), "f32"))
        y = p.cast(total, self.spec.out_dtype)
        p.store(y, self._y, (row_tile * ROWS_OF_TILE, token), (self._outside("skip"), "skip"))

    def per_row(self, name: str, element: str, total: Tile, row_tile: Scalar) -> Tile:
        """A number for every row of sums, from the tensor of this name."""
        p = self.p
        view = p.global_view(p[name], element, (self.spec.n, 1))
        boundary = (self._outside("clamp"), "none")
        return p.load(view, (row_tile * ROWS_OF_TILE, 0), total.layout.reduce((1,)), boundary)

    def _outside(self, word: str) -> str:
        """The boundary of rows: where the last tile ends beyond the last row, this one."""
        return word if self.spec.n % ROWS_OF_TILE else "none"
