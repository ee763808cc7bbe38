"""The activations of a step: how they come to shared memory, and in what order they stand there.

mma.sync reads them by ldmatrix from padded rows, wgmma by itself from swizzled ones. Rows that 16-byte copies do not
fit, or whose groups are padded, are copied element by element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.passes.builder import Memory, Scalar, Tile
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.streaming.block import Block


class Activations(ABC):
    """The activations of a block. Its warps along n share those of a step."""

    view: Memory
    buffers: list[Memory]

    def __init__(self, block: Block) -> None:
        self.block, self.p, self.plan = block, block.p, block.plan
        self.spec, self.schedule = block.spec, block.schedule

    @property
    def buffer(self) -> Memory:
        """The buffer of the stage that is computed with."""
        return self.buffers[self.block.slot]

    @abstractmethod
    def copy(self, step: Scalar) -> None:
        """Starts to copy a step."""

    @property
    def steps(self) -> int:
        """Steps that x has columns of."""
        return -(-self.spec.k // self.schedule.step_k)

    def limit(self, *columns: int) -> tuple[int, ...]:
        """Returns how columns of a copy are counted, so that it ends where x does, in the middle of a step."""
        return (*columns, self.spec.k) if self.spec.k % self.schedule.step_k else ()

    def layout(self, *shape: int, vector: int) -> Layout:
        """Returns how the threads of a warp's row copy a step of this shape."""
        s = self.schedule
        outer = spatial(s.warps_k, *(1 for _ in shape))
        return outer * copy_layout((1, *shape), 32 * s.warps_n, vector)


class SwizzledX(Activations):
    """Panels of 128 bytes of a row [warps_k, panels, tokens, columns], as wgmma reads them."""

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        s, x, k = self.schedule, self.spec.x, self.spec.k
        self.panel, self.panels = x.per_panel, s.step_k // x.per_panel
        self.buffers = block.alloc_stage(x.operand, (s.warps_k, self.panels, s.tokens, self.panel), swizzle=128)
        shape = (self.steps, self.panels, -1, self.panel)
        self.view = block.work.of_tokens("x", x.operand, shape, (s.step_k, self.panel, k, 1))

    def copy(self, step: Scalar) -> None:
        layout = self.layout(self.panels, self.schedule.tokens, self.panel, vector=self.spec.x.per_vector)
        boundary = (self.block.step_boundary, "none", "skip", "none")
        limit = self.limit(self.schedule.step_k, self.panel, 0, 1)
        self.block.work.copy_x(self.view, self.buffer, (step, 0, 0, 0), 2, layout, boundary, limit)


class _Rows(Activations):
    """Rows [warps_k, tokens, columns], as ldmatrix reads them."""

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        s, row = self.schedule, self.plan.x.row
        shape, strides = (s.warps_k, s.tokens, s.step_k), (s.tokens * row, row, 1)
        self.buffers = block.alloc_stage(self.spec.x.operand, shape, strides)


class RowsOfX(_Rows):
    """Rows that are copied 16 bytes at a time."""

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        s = self.schedule
        strides = (s.step_k, self.spec.k, 1)
        self.view = block.work.of_tokens("x", self.spec.x.operand, (self.steps, -1, s.step_k), strides)

    def copy(self, step: Scalar) -> None:
        s = self.schedule
        layout = self.layout(s.tokens, s.step_k, vector=self.spec.x.per_vector)
        boundary, limit = (self.block.step_boundary, "skip", "none"), self.limit(s.step_k, 0, 1)
        self.block.work.copy_x(self.view, self.buffer, (step, 0, 0), 1, layout, boundary, limit)


class ElementsOfX(_Rows):
    """Rows that are copied element by element, to columns that leave room for the padding of groups."""

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.view = block.work.of_tokens("x", self.spec.x.operand, (-1, self.spec.k))

    def copy(self, step: Scalar) -> None:
        packing = self.spec.packing
        layout = self.layout(self.schedule.tokens, self.schedule.step_k, vector=1)
        group, padded = packing.group or 1, packing.padded_group or 1
        self.p.copy_padded(self.view, self.buffer, (0, step), layout, group, padded)


def activations_of(block: Block) -> Activations:
    """Returns the activations as the engine of the block's plan reads them."""
    if block.schedule.wgmma:
        return SwizzledX(block)
    return RowsOfX(block) if block.plan.x.in_pieces else ElementsOfX(block)


class SumsOfX:
    """Sums of 32 columns of x [m, k / 32], by step: [steps, k / 32 of a step, m]."""

    def __init__(self, block: Block) -> None:
        self.block, self.p, s = block, block.p, block.schedule
        self.width, self.count = s.step_k // SUM_COLUMNS, block.spec.k // SUM_COLUMNS
        steps = -(-block.spec.k // s.step_k)
        strides = (self.width, 1, self.count)
        self.view = block.work.of_tokens("x_sums", "f32", (steps, self.width, -1), strides)
        shape, strides = (s.warps_k, self.width, s.columns), (self.width * s.columns, 1, self.width)
        self.buffers = block.alloc_stage("f32", shape, strides)

    def copy(self, step: Scalar) -> None:
        """Starts to copy the sums of a step."""
        s, vector = self.block.schedule, min(self.width, ELEMENTS["f32"].per_vector)
        rows = copy_layout((1, s.columns, self.width), 32 * s.warps_n, vector).permute((0, 2, 1))
        limit = (self.width, 1, 0, self.count) if self.block.spec.k % s.step_k else ()
        boundary, buffer = (self.block.step_boundary, "none", "clamp"), self.buffers[self.block.slot]
        layout = spatial(s.warps_k, 1, 1) * rows
        self.block.work.copy_x(self.view, buffer, (step, 0, 0), 2, layout, boundary, limit)

    def load(self, start: int, columns: int, layout: Layout) -> Tile:
        """Returns the sums of some columns of the step: [warps_k, 1, tokens]. layout: of a row of accumulators."""
        widened = layout * local(1, columns // SUM_COLUMNS, 1)
        loaded = self.p.load(self.buffers[self.block.slot], (0, start // SUM_COLUMNS, 0), widened)
        return self.p.reduce(loaded, 1)
