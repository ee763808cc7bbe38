"""The end of a tile in the prefill kernel with mma.sync: sums become numbers of y, which every lane stores for itself.

The lanes that hold neighbouring rows of the weight, eight of them, write 16 bytes side by side. That is half of what a
sector of the L2 cache takes, of a tile whose products take a hundred times as long.
"""

from __future__ import annotations

from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.prefill.epilogue import Epilogue
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE


class DirectEpilogue(Epilogue):
    """Stores y from registers."""

    def __init__(self, p: Program, plan: PrefillPlan) -> None:
        super().__init__(p, plan)
        self._y = p.global_view(p["y"], self.spec.out_dtype, (self.spec.n, -1), (1, self.spec.n), sizes=[p["m"]])

    def store(self, total: Tile, row_tile: Scalar, token: Scalar) -> None:
        boundary = (self.outside("skip"), "skip")
        self.p.store(self.numbers(total, row_tile), self._y, (row_tile * ROWS_OF_TILE, token), boundary)
