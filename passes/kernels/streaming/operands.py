"""The operands of a block: codes, activations, scales and outliers. Each is an object that knows its view in device
memory, its buffers and its copies.

The order of allocation is that of shared memory: outliers and codes in front, x behind them, then scales and tables.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.layouts.layout import spatial
from lowbit.dialect.types import UNIT
from lowbit.passes.builder import Memory, Scalar, Tile
from lowbit.passes.kernels.scales.staged_scales import StagedScales
from lowbit.passes.kernels.streaming.activations import Activations, SumsOfX
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.outliers import outliers_of


class Operands:
    """The operands of a block, whose activations `activations` makes."""

    def __init__(self, block: Block, activations: Callable[[Block], Activations]) -> None:
        self.codes = Codes(block)
        self.outliers = outliers_of(block)
        self.outliers.alloc_beside(self.codes.alloc())
        self.x = activations(block)
        self.sums_of_x = SumsOfX(block) if block.plan.x.reads_sums else None
        self.scales = StagedScales(block)
        self.table = FormatTable(block) if block.spec.dtype.kind == "table" else None

    def copy_x(self, step: Scalar) -> None:
        """Starts to copy activations of a step, and the sums of them that the kernel reads."""
        self.x.copy(step)
        if self.sums_of_x:
            self.sums_of_x.copy(step)


class Codes:
    """The codes of a block's rows: units of 16 bytes [steps, row blocks, units of a step x lanes]."""

    def __init__(self, block: Block) -> None:
        self.block, self.p, s, packing = block, block.p, block.schedule, block.spec.packing
        units, steps = block.plan.steps.units, block.plan.steps.count
        self.layout = spatial(s.warps_k, s.warps_n, 1).local(1, s.row_blocks, units // 32).spatial(1, 1, 32)
        strides = (units, packing.chunks * packing.units * 32, 1)
        self.view = self.p.global_view(self.p["codes"], UNIT, (steps, packing.row_blocks, units), strides)

    def alloc(self) -> Memory | None:
        """Allocates and returns the buffer of a stage, which preloaded weights do without."""
        if self.block.schedule.preload_weights:
            return None
        self.buffer = self.block.alloc(UNIT, self.layout.shape)
        return self.buffer

    def copy(self, step: Scalar) -> None:
        """Starts to copy codes of a step to shared memory."""
        block, packing, width = self.block, self.block.spec.packing, self.layout.shape[2]
        units = packing.chunks * packing.units * 32
        limit = (width, 0, 1, units) if units % width else ()
        boundary = (block.step_boundary, block.work.row_boundary, "none")
        self.p.copy_async(self.view, self.buffer, (step, block.work.first_block, 0), self.layout, boundary, limit)

    def copied(self) -> Tile:
        """Returns the codes that `copy` brought."""
        return self.p.load(self.buffer, (0, 0, 0), self.layout)

    def load(self, step: Scalar) -> Tile:
        """Returns codes of a step, loaded from device memory to registers."""
        work = self.block.work
        return self.p.load(self.view, (step, work.first_block, 0), self.layout, ("none", work.row_boundary, "none"))


class FormatTable:
    """The table of a format that has one, in shared memory."""

    def __init__(self, block: Block) -> None:
        self.p, self.format = block.p, block.spec.dtype
        self.element = compute_element(self.format, block.spec.act)
        self.buffer = block.alloc("i32", DecodeTable(self.format, self.element).shape)

    def fill(self) -> None:
        """Fills the table, by all threads of the block."""
        self.p.fill_table(self.buffer, self.format, self.element, exponent(self.format, self.element))
