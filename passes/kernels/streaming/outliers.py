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
from lowbit.passes.builder import Memory, OutlierShare, Program, Scalar, Tile
from lowbit.passes.kernels.streaming.plan import KernelPlan


class Outliers:
    """What the kernel does for outliers, each method at its moment: nothing, for a weight without any.

    products  with x, in the layout of sums, which have not been added to the sums yet
    """

    products: Tile | None = None

    def alloc_beside(self, codes: Memory | None, buffers: list[Memory]) -> None:
        """Allocates what has its place beside the buffer of codes, if there is one. buffers: those that are freed after
        the loop."""

    def load(self) -> None:
        """Starts to load lines to registers, in front of the wait for the kernel before."""

    def begin(self, sums: Layout) -> list[Tile]:
        """Multiplies what comes before the first step, and returns the sums that the loop carries. sums: their layout
        [warps_k, rows, columns]."""
        return []

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

    def add_to(self, total: Tile, buffers: list[Memory]) -> Tile:
        """Returns the sums of a warp with those of its outliers. buffers: those to be freed after the loop; others may
        take their place."""
        return total


class _Lines(Outliers):
    """The base of the three ways: the lines of a block's rows."""

    def __init__(self, p: Program, plan: KernelPlan, first_block: Scalar) -> None:
        self.p, self.plan, self.spec, self.schedule = p, plan, plan.spec, plan.schedule
        self.first_block = first_block
        self.warps = spatial(self.schedule.warps_k, self.schedule.warps_n, 1, 1)

    def _share(self) -> OutlierShare:
        """Returns the lines of this block's rows, of which it has a part if k is split."""
        table = self.p.global_view(self.p["outliers"], "i32", (self.spec.packing.row_blocks + 1,))
        return OutlierShare(table, self.first_block, self.p.block_id(1), self.schedule.split_k)

    def _x(self) -> Memory:
        """Returns the activations in device memory."""
        return self.p.global_view(self.p["x"], self.spec.act, (-1, self.spec.k), sizes=[self.p["m"]])


class _AfterLoop(_Lines):
    """The first lines wait in shared memory until the loop has ended."""

    def __init__(self, p: Program, plan: KernelPlan, first_block: Scalar) -> None:
        super().__init__(p, plan, first_block)
        lanes = spatial(1, 1, 4, 8).local(1, 1, 1, 4)
        self.layout = self.warps.local(1, self.schedule.row_blocks, plan.staged_lines // 4, 1) * lanes
        self.share = self._share()
        self.lines = p.alloc_shared("i32", self.layout.shape)  # the first buffer: all others are freed before it

    def copy(self) -> None:
        self.p.copy_outliers(self.share, self.lines, self.layout)

    def add_to(self, total: Tile, buffers: list[Memory]) -> Tile:
        p = self.p
        p.barrier()
        p.free_shared(*buffers)
        scratch = p.alloc_shared(*self.plan.outlier_scratch)
        buffers[:] = [self.lines, scratch]
        return p.sparse_mma(self.share, self.lines, scratch, self._x(), total)


class _OneToken(_Lines):
    """The sums of lanes are spread over the eight columns of a product, of which one token needs one."""

    def alloc_beside(self, codes: Memory | None, buffers: list[Memory]) -> None:
        self.share = self._share()
        self.layout = self.warps.local(1, self.schedule.row_blocks, self.plan.loaded_lines, 1).spatial(1, 1, 1, LINE)
        if codes and self.plan.sums_in_stage:
            self.scratch = codes
        else:
            self.scratch = self.p.alloc_shared(*self.plan.outlier_scratch)
            buffers.append(self.scratch)

    def load(self) -> None:
        self.words = self.p.load_outliers(self.share, self.layout)

    def begin(self, sums: Layout) -> list[Tile]:
        zero = self.p.constant(0.0, "f32", sums)
        self.products = self.p.sparse_vector(self.share, self.words, self.scratch, self._x(), zero)
        return []

    def add_to(self, total: Tile, buffers: list[Memory]) -> Tile:
        return total if self.products is None else self.p.add(total, self.p.reduce(self.products, 2))


class _ByStep(_Lines):
    """The lines of a step are copied with it, and are found by the first columns of all lines.

    turned  x of a step with tokens side by side, in front of columns of zeros
    """

    def __init__(self, p: Program, plan: KernelPlan, first_block: Scalar, buffers: list[Memory]) -> None:
        super().__init__(p, plan, first_block)
        s, blocks = plan.schedule, plan.schedule.tokens // 8
        self.share = self._share()
        self.lines = p.alloc_shared("i32", (s.warps_k, plan.row_blocks, plan.step_lines, LINE))
        self.turned = p.alloc_shared(plan.spec.act, (s.warps_k, blocks, s.step_k + SPARE, 8))
        buffers += [self.lines, self.turned]
        zeros = spatial(s.warps_k, 1, 1, 1).replicated(s.warps_n).local(1, blocks, 1, 1).spatial(1, 1, SPARE, 4)
        p.store(p.constant(0.0, plan.spec.act, zeros.local(1, 1, 1, 2)), self.turned, (0, 0, s.step_k, 0))

    def begin(self, sums: Layout) -> list[Tile]:
        numbers = INDEX_ENDS + self.plan.indexed_lines
        layout = self.warps.local(1, self.schedule.row_blocks, numbers, 1).spatial(1, 1, 1, LINE)
        self.index = self.p.index_outliers(self.share, layout)
        return [self.p.constant(0.0, "f32", sums)]

    def copy_step(self, step: Scalar) -> None:
        width = self.schedule.step_k
        self.p.copy_lines(self.share.table, self.index, self.lines, step * width, width)

    def begin_step(self, step: Scalar, x: Memory) -> None:
        self.column = step * self.schedule.step_k
        self.p.transpose(x, self.turned, self.p["m"])

    def end_step(self, carried: list[Tile]) -> list[Tile]:
        (total,) = carried
        self.p.barrier("warps", self.schedule.warps_n)
        return [self.p.sparse_step(self.share.table, self.index, self.lines, self.turned, self.column, total)]

    def end(self, carried: list[Tile]) -> None:
        (self.products,) = carried

    def add_to(self, total: Tile, buffers: list[Memory]) -> Tile:
        return total if self.products is None else self.p.add(total, self.products)


def outliers_of(p: Program, plan: KernelPlan, first_block: Scalar, buffers: list[Memory]) -> Outliers:
    """Returns how the outliers of a block are multiplied, whose rows begin at row block `first_block`. buffers: those
    that are freed after the loop."""
    if not plan.spec.outliers:
        return Outliers()
    if plan.schedule.outliers_by_step:
        return _ByStep(p, plan, first_block, buffers)
    return _OneToken(p, plan, first_block) if plan.spreads_outliers else _AfterLoop(p, plan, first_block)
