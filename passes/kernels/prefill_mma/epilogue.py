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
        p, n, row = self.p, self.spec.n, row_tile * ROWS_OF_TILE
        whole = n % ROWS_OF_TILE == 0
        if self.spec.bias:
            view = p.global_view(p["bias"], self.spec.out_dtype, (n, 1))
            bias = p.load(view, (row, 0), total.layout.reduce((1,)), ("none" if whole else "clamp", "none"))
            total = p.add(total, p.cast(bias, "f32"))
        y = p.cast(total, self.spec.out_dtype)
        p.store(y, self._y, (row, token), ("none" if whole else "skip", "skip"))
