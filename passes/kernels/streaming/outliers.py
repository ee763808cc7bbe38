"""Outliers in the decode kernel: a warp multiplies its share of them with x, and adds the products to its sums.

Outliers stand in lines, which belong to row blocks (`dialect.formats.outliers`); warps and splits that share rows share
their lines out. There are three ways, which differ in when lines are multiplied and where x comes from then:

- `_AfterLoop`: after the loop over k, with x from device memory. The first lines of each row block are copied beside
  the weight.
- `_OneToken`: before the loop, with x from device memory. The waits for the table of lines, for lines and for x take
  long, and meanwhile the first weights come. The table and the lines are asked for behind the copies of weights, in
  front of the wait for the kernel before.
- `_ByStep` (`Schedule.outliers_by_step`): behind the products of each step, with the x that the step has in shared
  memory, turned so that a column's tokens stand side by side.
"""

from __future__ import annotations

from lowbit.dialect.formats.outliers import INDEX_ENDS, LINE, SPARE
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.passes.builder import Memory, OutlierShare, Scalar, Tile
from lowbit.passes.kernels.streaming.block import Block


class Outliers:
    """What the kernel does for outliers, each method at its moment: nothing, for a weight without any.

    products  with x, in the layout of sums, which have not been added to the sums yet
    """

    products: Tile | None = None

    def alloc_beside(self, codes: Memory | None) -> None:
        """Allocates what has its place beside the buffer of codes, if there is one."""

    def prepare(self) -> None:
        """Makes ready what every step reads, before the first copy."""

    def load(self) -> None:
        """Starts to load lines to registers, in front of the wait for the kernel before."""

    def begin(self, carried: list[Tile], sums: Layout) -> list[Tile]:
        """Multiplies what comes before the first step. Returns the sums that the loop begins with, last those of the
        outliers that it will add up. sums: their layout [warps_k, rows, columns]."""
        return carried

    def copy(self) -> None:
        """Starts to copy the first lines of a block, in front of the wait for the kernel before."""

    def copy_step(self, step: Scalar) -> None:
        """Starts to copy the lines of a step."""

    def begin_step(self, step: Scalar, x: Memory) -> None:
        """Prepares for the outliers of a step, whose activations have come."""

    def end_step(self, carried: list[Tile]) -> list[Tile]:
        """Returns what the loop carries, with the products of this step's outliers."""
        return carried

    def end(self, carried: list[Tile]) -> None:
        """Takes over what the loop has carried."""

    def add_to(self, total: Tile) -> Tile:
        """Returns the sums of a warp with those of its outliers. Other buffers may take the place of the block's."""
        return total


class _Lines(Outliers):
    """The base of the three ways: the lines of a block's rows."""

    def __init__(self, block: Block) -> None:
        self.block, self.p, self.work = block, block.p, block.work
        self.plan, self.spec, self.schedule = block.plan.outliers, block.spec, block.schedule
        self.warps = spatial(self.schedule.warps_k, self.schedule.warps_n, 1, 1)

    def prepare(self) -> None:
        """Finds the lines of this block's rows, of which it has a part if k is split."""
        table = self.p.global_view(self.p["outliers"], "i32", (self.spec.packing.row_blocks + 1,))
        self.share = OutlierShare(table, self.work.first_block, self.work.split(), self.schedule.split_k)

    def _x(self) -> Memory:
        """Returns the activations in device memory."""
        return self.work.of_tokens("x", self.spec.act, (-1, self.spec.k))


class _AfterLoop(_Lines):
    """The first lines wait in shared memory until the loop has ended."""

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        lanes = spatial(1, 1, 4, 8).local(1, 1, 1, 4)
        self.layout = self.warps.local(1, self.schedule.row_blocks, self.plan.staged_lines // 4, 1) * lanes
        self.lines = self.p.alloc_shared("i32", self.layout.shape)  # the first buffer: all others are freed before it

    def copy(self) -> None:
        self.p.copy_outliers(self.share, self.lines, self.layout)

    def add_to(self, total: Tile) -> Tile:
        p = self.p
        p.barrier()
        p.free_shared(*self.block.buffers)
        scratch = p.alloc_shared(*self.plan.scratch)
        self.block.buffers[:] = [self.lines, scratch]
        return p.sparse_mma(self.share, self.lines, scratch, self._x(), total)


class _OneToken(_Lines):
    """The sums of lanes are spread over the eight columns of a product, of which one token needs one."""

    def alloc_beside(self, codes: Memory | None) -> None:
        self.layout = self.warps.local(1, self.schedule.row_blocks, self.plan.loaded_lines, 1).spatial(1, 1, 1, LINE)
        in_stage = codes if self.plan.sums_in_stage else None
        self.scratch = in_stage or self.block.alloc(*self.plan.scratch)

    def load(self) -> None:
        self.words = self.p.load_outliers(self.share, self.layout)

    def begin(self, carried: list[Tile], sums: Layout) -> list[Tile]:
        zero = self.p.constant(0.0, "f32", sums)
        products = self.p.sparse_vector(self.share, self.words, self.scratch, self._x(), zero)
        if self.plan.begin_sums:
            return [self.block.convert.with_exponent(products, -1), *carried[1:]]
        self.products = products
        return carried

    def add_to(self, total: Tile) -> Tile:
        return total if self.products is None else self.p.add(total, self.p.reduce(self.products, 2))


class _ByStep(_Lines):
    """The lines of a step are copied with it, and are found by the first columns of all lines.

    turned  x of a step with tokens side by side, in front of columns of zeros
    """

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        s, act, blocks = self.schedule, self.spec.act, self.schedule.tokens // 8
        self.lines = block.alloc("i32", (s.warps_k, block.plan.steps.row_blocks, self.plan.step_lines, LINE))
        self.turned = block.alloc(act, (s.warps_k, blocks, s.step_k + SPARE, 8))

    def prepare(self) -> None:
        super().prepare()
        p, s, blocks = self.p, self.schedule, self.schedule.tokens // 8
        zeros = spatial(s.warps_k, 1, 1, 1).replicated(s.warps_n).local(1, blocks, 1, 1).spatial(1, 1, SPARE, 4)
        p.store(p.constant(0.0, self.spec.act, zeros.local(1, 1, 1, 2)), self.turned, (0, 0, s.step_k, 0))

    def begin(self, carried: list[Tile], sums: Layout) -> list[Tile]:
        numbers = INDEX_ENDS + self.plan.indexed_lines
        layout = self.warps.local(1, self.schedule.row_blocks, numbers, 1).spatial(1, 1, 1, LINE)
        self.index = self.p.index_outliers(self.share, layout)
        return [*carried, self.p.constant(0.0, "f32", sums)]

    def copy_step(self, step: Scalar) -> None:
        width = self.schedule.step_k
        self.p.copy_lines(self.share.table, self.index, self.lines, step * width, width)

    def begin_step(self, step: Scalar, x: Memory) -> None:
        self.column = step * self.schedule.step_k
        self.p.transpose(x, self.turned, self.work.tokens)

    def end_step(self, carried: list[Tile]) -> list[Tile]:
        (total,) = carried
        self.p.barrier("warps", self.schedule.warps_n)
        return [self.p.sparse_step(self.share.table, self.index, self.lines, self.turned, self.column, total)]

    def end(self, carried: list[Tile]) -> None:
        (self.products,) = carried

    def add_to(self, total: Tile) -> Tile:
        return total if self.products is None else self.p.add(total, self.products)


def outliers_of(block: Block) -> Outliers:
    """Returns how the outliers of a block are multiplied."""
    if not block.spec.outliers:
        return Outliers()
    if block.schedule.outliers_by_step:
        return _ByStep(block)
    return _OneToken(block) if block.plan.outliers.are_spread else _AfterLoop(block)
