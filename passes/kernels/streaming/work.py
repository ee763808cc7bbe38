"""The work of a block: which rows of the weight it has, which part of k, which tokens of x, and where it stores.

The parts of a kernel ask their `Work`, and never the grid. This is the plain one: block (i, j) of the grid has tile i
of rows and part j of k, and the tokens of the launch in order. A kernel whose blocks look up what they have, or gather
tokens, gives another with these methods to `streaming_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.passes.builder import Memory, Program, Scalar, Tile, as_i32
from lowbit.passes.kernels.streaming.plan import KernelPlan


class Work:
    """The work of a block of program `p`.

    tile         number of the tile of rows; splits of k that share it add up their sums
    first_block  the first row block of the weight; known inside `run`
    """

    first_block: Scalar

    def __init__(self, p: Program, plan: KernelPlan) -> None:
        self.p, self.plan = p, plan
        self.tile = p.block_id(0)

    def run(self, block: Callable[[], None]) -> None:
        """Writes the program of a block by `block`. Blocks without work fill up the grid: they keep a place until the
        kernel before has ended, and the next one from starting."""
        p, tiles = self.p, self.plan.steps.tiles
        if self.plan.steps.launched_tiles == tiles:
            self._begin(block)
            return
        with p.when(self.tile < tiles):
            self._begin(block)
        with p.when(Scalar(as_i32(tiles - 1)) < self.tile):
            p.grid_wait()

    def _begin(self, block: Callable[[], None]) -> None:
        self.first_block = self.tile * self.plan.steps.row_blocks
        block()

    # -- of the weight

    @property
    def row_boundary(self) -> str:
        """What is read in place of row blocks beyond the last."""
        return "clamp" if self.plan.spec.packing.row_blocks % self.plan.steps.row_blocks else "none"

    def split(self) -> Scalar:
        """Returns which part of k the block has."""
        return self.p.block_id(1)

    # -- of x and y

    @property
    def tokens(self) -> Scalar:
        """The number of tokens."""
        return self.p["m"]

    def of_tokens(
        self, name: str, element: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> Memory:
        """Returns a view of the parameter of this name, which has something of each token. shape: -1 for tokens."""
        return self.p.global_view(self.p[name], element, shape, strides, sizes=[self.tokens])

    def first_row(self) -> Scalar:
        """Returns the first row of the block's sums."""
        return self.tile * self.plan.schedule.rows

    def store(self, numbers: Tile, y: Memory, row: Scalar, outside: str) -> None:
        """Stores numbers [rows of y, tokens] from a row of y on. outside: what happens to rows beyond the last."""
        self.p.store(numbers, y, (row, 0), (outside, "skip"))
