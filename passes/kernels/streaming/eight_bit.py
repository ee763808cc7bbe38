"""The matmul kernel for activations of 8 bits: `passes.kernels.streaming.kernel` with another compute side.

The idea. The packed weight stays as it is, and a register of an 8-bit fragment takes its four codes from two registers
of a 16-bit one: for four bits, one mask. The activation has been written in the column order that this gives
(`dialect.formats.byte_codes`), so it is copied and read as it lies in memory.

    for round:                         copies as in the decode kernel, and sums of x beside x
        a = bytes of the step's codes
        for group in step:
            p   = a x^T                at most 128 columns from zero: f8e4m3 in f32, i8 in i32
            acc = acc + scale * p      in f32; + scale * (- zero) * (sums of x), where codes have an offset or a zero
    reduce over warps and splits, times the scale of the token, add the bias, convert, store

Tensor cores keep 13 to 14 bits of a sum of f8e4m3 products, so these are added to acc in f32 after 128 columns, whether
or not a group ends there. Sums of integers are exact, and with one scale per row they stay integers to the end.

Shared memory: beside the stages of the decode kernel, the sums of x [warps_k, step_k / 32, tokens] in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowbit.dialect.bindings import ir
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.byte_codes import PROMOTED, SUM_COLUMNS, byte_exponent
from lowbit.dialect.formats.raw_codes import zero_code
from lowbit.dialect.layouts.fragments import MMA_M16N8K32_A, MMA_M16N8K32_B_NK
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Memory, Scalar, Tile
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.scales_zeros import ScalesZeros
from lowbit.passes.kernels.streaming.kernel import Kernel
from lowbit.passes.kernels.streaming.operands import Operands
from lowbit.passes.kernels.streaming.plan import KernelPlan


class _Operands(Operands):
    """The operands of a block, with the sums of x."""

    def _view_x(self) -> None:
        super()._view_x()
        if self.plan.reads_sums:
            self._view_sums()

    def _view_sums(self) -> None:
        """Sums of 32 columns of x [m, k / 32], by step: [steps, k / 32 of a step, m]."""
        p, s = self.p, self.schedule
        width, count = s.step_k // SUM_COLUMNS, self.spec.k // SUM_COLUMNS
        steps = -(-self.spec.k // s.step_k)
        self.sums = p.global_view(p["x_sums"], "f32", (steps, width, -1), (width, 1, count), sizes=[p["m"]])
        self.sums_buffers = self._slots("f32", (s.warps_k, width, s.columns), (width * s.columns, 1, width))

    @property
    def sums_buffer(self) -> Memory:
        return self.sums_buffers[self.slot]

    def copy_x(self, step: Scalar) -> None:
        super().copy_x(step)
        if not self.plan.reads_sums:
            return
        p, s = self.p, self.schedule
        width, count = s.step_k // SUM_COLUMNS, self.spec.k // SUM_COLUMNS
        vector = min(width, ELEMENTS["f32"].per_vector)
        rows = copy_layout((1, s.columns, width), 32 * s.warps_n, vector).permute((0, 2, 1))
        limit = (width, 1, 0, count) if self.spec.k % s.step_k else ()
        boundary = (self.step_boundary, "none", "clamp")
        p.copy_async(self.sums, self.sums_buffer, (step, 0, 0), spatial(s.warps_k, 1, 1) * rows, boundary, limit)


class _EightBitKernel(Kernel):
    """Builds the program."""

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        spec, s, compute = plan.spec, plan.schedule, plan.spec.byte_type
        self.integers = compute == "i8"
        power = byte_exponent(spec.dtype, compute)
        self.convert = ScalesZeros(self.p, spec, zero_code(spec.dtype), power=power)
        if self.integers and not plan.groups:
            self.sum_element = "i32"
        warps, fragments = spatial(s.warps_k, s.warps_n, 1), s.step_k // SUM_COLUMNS
        self.bytes_layout = warps.local(1, s.row_blocks, fragments) * MMA_M16N8K32_A.unsqueeze(0)
        replicas = spatial(s.warps_k, 1, 1).replicated(s.warps_n)
        self.b_layout = replicas.local(1, s.mma_columns // 8, fragments) * MMA_M16N8K32_B_NK.unsqueeze(0)

    def _operands(self) -> Operands:
        self.x = _Operands(self.p, self.plan, self.first_block)
        return self.x

    def _step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        p, s = self.p, self.schedule
        codes = p.view(words(), self.spec.dtype, self.a_layout)
        self.a = p.decode_bytes(codes, "ui8" if self.integers else self.spec.x.operand, self.bytes_layout)
        if not s.wgmma:
            self.b = p.load_matrix(self.operands.x_buffer, p["m"], self.b_layout)
        if not self.plan.groups:
            return self._row_step(*carried)
        (total,) = carried
        width = s.step_k // self.plan.groups
        for group in range(self.plan.groups):
            for start, columns in self._parts(group * width, width):
                product = self._as_f32(self._product(start, columns))
                sums = self._sums_of_x(start, columns) if self.plan.zeros_in_sums else None
                total = self.factors.add_scaled(total, product, group, sums)
        return [total]

    def _row_step(self, total: Tile, *sums: Tile) -> list[Tile]:
        """One step where rows have one scale: sums of x are carried beside the products."""
        p, step = self.p, self.schedule.step_k
        if self.integers:
            total = self._product(0, step, total)
        else:
            for start, columns in self._parts(0, step):
                total = p.add(total, self._product(start, columns))
        return [total, *(p.add(known, self._sums_of_x(0, step)) for known in sums)]

    def _parts(self, start: int, columns: int) -> Iterator[tuple[int, int]]:
        """Yields the columns of each product from zero: where they begin, and how many they are."""
        width = columns if self.integers else min(columns, PROMOTED)
        for part in range(start, start + columns, width):
            yield part, width

    def _product(self, start: int, columns: int, total: Tile | None = None) -> Tile:
        """Some columns of the step times x, added to a total or to zero."""
        p, s = self.p, self.schedule
        begin = p.constant(0.0, "i32" if self.integers else "f32", self.d_layout) if total is None else total
        a = p.slice(self.a, 2, start, columns)
        if s.wgmma:
            overlap = s.overlap_groups and total is None
            return p.warpgroup_mma(a, self.operands.x_buffer, start, begin, overlap)
        return p.mma(a, p.slice(self.b, 2, start, columns), begin)

    def _as_f32(self, product: Tile) -> Tile:
        return self.p.cast(product, "f32", "signed") if self.integers else product

    def _sums_of_x(self, start: int, columns: int) -> Tile:
        """Sums of some columns of the step, in the layout of a row of accumulators: [warps_k, 1, columns]."""
        layout = self.sum_layout * local(1, columns // SUM_COLUMNS, 1)
        loaded = self.p.load(self.x.sums_buffer, (0, start // SUM_COLUMNS, 0), layout)
        return self.p.reduce(loaded, 1)

    def _scale_rows(self, total: Tile, *sums_of_x: Tile) -> Tile:
        return super()._scale_rows(self._as_f32(total), *sums_of_x)


def eight_bit_matmul(spec: MatmulSpec, schedule: EightBitSchedule) -> ir.Module:
    """The tile program of a matmul of activations of 8 bits, in a module of its own."""
    return _EightBitKernel(KernelPlan(spec, schedule)).build()
