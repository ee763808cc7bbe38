"""The work of a block: which rows of the weight it has, which part of k, which tokens of x, and where it stores.

The parts of a kernel ask their `Work`, and never the grid. `Work` is the plain one: block (i, j) of the grid has tile i
of rows and part j of k, and the tokens of the launch in order. `ExpertWork` is that of weights of several experts,
whose slots come sorted, and `TopKWork` that of the same weights for few tokens, whose experts' ids it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.top_k import IDS, TopK
from lowbit.passes.builder import Index, Memory, Program, Scalar, Tile, as_i32
from lowbit.passes.kernels.epilogue import Epilogue
from lowbit.passes.kernels.expert_tiles import ExpertTiles
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

    @staticmethod
    def grid(plan: KernelPlan) -> tuple[int | str, int, int | str]:
        """Returns the blocks that are launched."""
        return plan.steps.launched_tiles, plan.schedule.split_k, 1

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
        return "clamp" if self.plan.steps.is_ragged else "none"

    def split(self) -> Scalar:
        """Returns which part of k the block has."""
        return self.p.block_id(1)

    def rows_before(self, expert: Scalar) -> Scalar:
        """Returns the number of rows of the weight that the experts before one have."""
        return expert * (self.plan.steps.row_blocks_of_expert * ROWS)

    # -- of x and y

    @property
    def first_row_of_x(self) -> Index:
        """The row of x that is the block's first."""
        return 0

    @property
    def tokens(self) -> Scalar:
        """The number of tokens."""
        return self.p["m"]

    def of_tokens(
        self, name: str, element: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> Memory:
        """Returns a view of the parameter of this name, which has something of each token. shape: -1 for tokens."""
        return self.p.global_view(self.p[name], element, shape, strides, sizes=[self.tokens])

    def copy_x(
        self,
        x: Memory,
        target: Memory,
        offsets: Sequence[Index],
        dim: int,
        layout: Layout,
        boundary: Sequence[str],
        limit: Sequence[int],
    ) -> None:
        """Starts to copy the block's tokens, which are along dim `dim` of a view of x or of its sums."""
        places = (*offsets[:dim], self.first_row_of_x, *offsets[dim + 1 :])
        self.p.copy_async(x, target, places, layout, boundary, limit)

    def scales_of_x(self, layout: Layout) -> Tile:
        """Returns the scales of the block's tokens [1, tokens], of x in 8 bits."""
        x_scales = self.of_tokens("x_scales", "f32", (1, -1), (0, 1))
        return self.p.load(x_scales, (0, 0), layout, ("none", "clamp"))

    def first_row(self) -> Scalar:
        """Returns the first row of the block's sums."""
        return self.tile * self.plan.schedule.rows

    def store(self, numbers: Tile, end: Epilogue, first_row: Scalar) -> None:
        """Stores numbers [rows of y, tokens] that were made of sums from a row on."""
        self.p.store(numbers, end.view_like_y("y"), (end.row_of_y(first_row), 0), (end.outside("skip"), "skip"))


class ExpertWork(Work):
    """Tiles of rows of experts, for the slots of a token tile each (`ExpertTiles`). Blocks take turns at them, however
    many there are, and clusters of blocks that have a part of k each.

    first_slot  the first slot of the token tile; known inside `run`, as is what is beside it
    end         the slot before which it ends
    """

    first_slot: Scalar
    end: Scalar

    @staticmethod
    def grid(plan: KernelPlan) -> tuple[int | str, int, int | str]:
        cluster, blocks = plan.schedule.cluster, plan.schedule.max_blocks_per_sm
        times = f"* {blocks // cluster}" if blocks >= cluster else f"/ {cluster // blocks}"
        return f"sm_count {times}", cluster, 1

    def run(self, block: Callable[[], None]) -> None:
        p, steps = self.p, self.plan.steps
        p.grid_wait()  # until the table is there
        table, first, blocks = ExpertTiles(p), p.block_id(0), p.block_count(0)
        count = table.count * steps.tiles
        with p.loop(0, (count + blocks - 1 - first) // blocks) as loop:
            number = first + loop.index * blocks
            self.tile = number % steps.tiles
            self._expert, self.first_slot, self.end = table.tile(number // steps.tiles)
            self.first_block = self._expert * steps.row_blocks_of_expert + self.tile * steps.row_blocks
            self._slots = p.global_view(p["rows"], "i32", (-1,), sizes=[self.end])
            block()
            p.barrier()  # the next tile's stages take the place of sums

    def split(self) -> Scalar:
        return super().split() if self.plan.schedule.cluster > 1 else Scalar.of(0)

    @property
    def tokens(self) -> Scalar:
        return self.end - self.first_slot

    def copy_x(
        self,
        x: Memory,
        target: Memory,
        offsets: Sequence[Index],
        dim: int,
        layout: Layout,
        boundary: Sequence[str],
        limit: Sequence[int],
    ) -> None:
        """Starts to copy the rows of x that the parameter "rows" names for the slots of the token tile; zeros, if
        something has to be there, for slots beyond them, which nobody stores."""
        places = (*offsets[:dim], self.first_slot, *offsets[dim + 1 :])
        of_rows = [*boundary]
        of_rows[dim] = "zero" if boundary[dim] == "clamp" else boundary[dim]
        self.p.copy_rows(x, self._slots, target, places, dim, layout, of_rows, limit)

    def scales_of_x(self, layout: Layout) -> Tile:
        """Returns the scales of the rows of x that the parameter "rows" names for the slots of the token tile."""
        p = self.p
        rows = p.global_view(p["rows"], "i32", (1, -1), (0, 1), sizes=[self.end])
        scales = p.global_view(p["x_scales"], "f32", (1, -1), (0, 1), sizes=[p["m"]])
        return p.gather(scales, (0,), p.load(rows, (0, self.first_slot), layout, ("none", "clamp")))

    def first_row(self) -> Scalar:
        return self.first_block * ROWS

    def store(self, numbers: Tile, end: Epilogue, first_row: Scalar) -> None:
        """Stores numbers of slots to their rows of y, which have columns for one expert."""
        row = end.row_of_y(first_row - self.rows_before(self._expert))
        outside = end.outside("skip"), "skip"
        self.p.store(numbers, end.view_like_y("y", self.end), (row, self.first_slot), outside)


class TopKWork(Work):
    """Tiles of rows of the experts whose ids are given (`TopK`): block (i, j, t) has tile i of rows and one token.

    Without weights of the experts, t is a place, one of the experts of a token, and j a part of k. With them, t is a
    token and j one of its experts, and the blocks of all are a cluster. These read ids before the kernel in front has
    ended: it is the matmul by the same ids, whose blocks had them before any let this kernel start.

    place  the block's place among those of all tokens
    """

    place: Scalar

    def __init__(self, p: Program, plan: KernelPlan) -> None:
        super().__init__(p, plan)
        self._top_k = top_k_of(plan)
        self.adds_up = plan.ending.adds_experts
        self.y_row = p.block_id(2)
        self.rank = p.block_id(1)
        self.place = self.y_row * self._top_k.count + self.rank if self.adds_up else self.y_row

    @staticmethod
    def grid(plan: KernelPlan) -> tuple[int | str, int, int | str]:
        return plan.steps.tiles, plan.ending.cluster, "ceil(m / 1)"

    def run(self, block: Callable[[], None]) -> None:
        p, steps = self.p, self.plan.steps
        if not self.adds_up:
            p.grid_wait()  # until the ids are there
        expert = self.expert_at(self.place)
        here = expert < self.plan.spec.experts
        self._expert = here.select(expert, 0)
        self.first_block = self._expert * steps.row_blocks_of_expert + self.tile * steps.row_blocks
        if self.adds_up:
            block()
            return
        with p.when(here):
            block()

    def expert_at(self, place: Scalar) -> Scalar:
        """Returns the expert of a place; the number of experts for one elsewhere."""
        p, experts, words = self.p, self.plan.spec.experts, 2 if self._top_k.ids == "i64" else 1
        view = p.global_view(p[IDS], "i32", (-1, words), sizes=[place + 1])
        low, *high = (p.read_index(view, (place, word)) for word in range(words))
        expert = (low < 0).select(experts, low.min(experts))
        return (high[0] == 0).select(expert, experts) if high else expert

    def split(self) -> Scalar:
        return Scalar.of(0) if self.adds_up else self.rank

    @property
    def tokens(self) -> Scalar:
        return Scalar.of(1)

    def of_tokens(
        self, name: str, element: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> Memory:
        """Returns a view that ends behind the block's row of x."""
        return self.p.global_view(self.p[name], element, shape, strides, sizes=[self.first_row_of_x + 1])

    @property
    def first_row_of_x(self) -> Scalar:
        return self.place if self.adds_up else self.place // self._top_k.count

    def first_row(self) -> Scalar:
        return self.first_block * ROWS

    def store(self, numbers: Tile, end: Epilogue, first_row: Scalar) -> None:
        """Stores numbers of one row of y, from a row of the block's expert on."""
        row = end.row_of_y(first_row - self.rows_before(self._expert))
        self.p.store(numbers, end.view_like_y("y", self.y_row + 1), (row, self.y_row), (end.outside("skip"), "skip"))


def top_k_of(plan: KernelPlan) -> TopK:
    """Returns how ids are given. Raises SpecError for a spec without them."""
    if plan.spec.top_k is None:
        raise SpecError(f"({plan.spec}) has no top_k, which says how ids are given")
    return plan.spec.top_k
