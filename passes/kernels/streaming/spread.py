"""The matmul kernel for one token with small groups: `passes.kernels.streaming.kernel` with another compute side
(`Schedule.spread_k`).

The idea. The product of an mma has eight columns, of which one token leaves seven idle, while small groups want many
sums: with groups of 16 columns every mma ends one, and all four lanes of a row read, convert and apply its scale. Here
column i of a product is block i of 16 columns of k: x stands in row i of operand B at block i, and there is 0 elsewhere
(`diagonal`). Eight mma add into one accumulator, and eight sums stand side by side:

    for round:                         copies as in `streaming.kernel`
        for 128 columns in step:
            p   = decode(codes) diagonal(x)^T   [rows, 8], eight mma
            acc = acc + scale * p               [rows, 8], a scale for every block
    sum of acc over its columns, then over warps and splits

A lane then has two of eight blocks and a scale of its own for each, an eighth of the work for sums and a quarter of
that for scales.

Sums of x need no diagonal: row i of operand B has block i of x, and one mma with ones, for all rows, adds up eight
blocks. So codes are multiplied as they are stored (f16), or with what decoding adds to them (bf16), and nothing is
subtracted from weights: p begins with the sums of x times minus the offset of codes, or zeros and offsets of groups
include it.
"""

from __future__ import annotations

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.packing import BLOCK_K, ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program, Tile
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.scales_zeros import ScalesZeros
from lowbit.passes.kernels.streaming.factors import Factors
from lowbit.passes.kernels.streaming.kernel import Kernel
from lowbit.passes.kernels.streaming.operands import Operands
from lowbit.passes.kernels.streaming.plan import COLUMNS, SPREAD, KernelPlan

_BLOCKS = spatial(1, 1, 8).local(1, 1, 2).spatial(1, 1, 4).local(1, 1, 2)
"""128 columns, of which a lane has what it has of a fragment of operand B with a row for each 16."""


class _SpreadFactors(Factors):
    """The factors of products with a scale for every group of 128 columns of k.

    groups    how many groups 128 columns have
    by_group  sums as [warps_k, groups, rows, 8 / groups]: these columns have a scale in common
    """

    def __init__(self, p: Program, plan: KernelPlan, operands: Operands, convert: ScalesZeros, sums: Layout) -> None:
        super().__init__(p, plan, operands, convert, sums)
        self.sums, self.groups = sums, SPREAD // (plan.spec.packing.padded_group or SPREAD)
        warps, rows, _ = sums.shape
        self.by_group = sums.reshape((warps, rows, self.groups, COLUMNS // self.groups)).permute((0, 2, 1, 3))

    def add_scaled(self, total: Tile, product: Tile, group: int, sums_of_x: Tile | None) -> Tile:
        """The same by groups, without the power of two that decoding left out, by which the total is multiplied.
        group: counted in parts of 128 columns."""
        p = self.p
        total, product = (p.view(t, "f32", self.by_group) for t in (total, product))
        scale = self.of_part("scales", group)
        if sums_of_x is not None:
            sums = p.view(sums_of_x, "f32", self.by_group)
            if self.spec.zeros == "offset":
                offset = self.convert.with_code_offset(self.of_part("offsets", group), scale)
                total = p.fma(offset, sums, total)
            else:
                product = p.fma(self.convert.minus_zero(self.of_part("zeros", group)), sums, product)
        return p.view(p.fma(scale, product, total), "f32", self.sums)

    def of_part(self, name: str, part: int) -> Tile:
        """Loads scales, zeros or offsets of every row and group of a part: [warps_k, groups, rows, 1] f32."""
        layout = self.by_group.reduce((3,))
        shape = (self.plan.schedule.warps_k, self.groups, self.plan.row_blocks, ROWS)
        by_rows = layout.reshape(shape).permute((0, 2, 1, 3))
        return self.p.view(self.numbers.load(name, part * self.groups, by_rows), "f32", layout)


class _SpreadKernel(Kernel):
    """Builds the program."""

    factors_type = _SpreadFactors

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        s = plan.schedule
        self.parts = s.step_k // SPREAD
        warps = spatial(s.warps_k, s.warps_n, 1)
        self.ones_layout = warps.local(1, s.row_blocks, 1) * MMA_M16N8K16_A.unsqueeze(0)

    def _fragments_of_x(self) -> Tile:
        """Loads blocks of 16 columns below one another, a lane those of its row of operand B."""
        p, warps = self.p, spatial(self.schedule.warps_k, 1, 1).replicated(self.schedule.warps_n)
        parts = warps.local(1, 1, self.parts)
        loaded = p.load(self.operands.x_buffer, (0, 0, 0), parts * _BLOCKS)
        self.blocks = p.view(loaded, self.spec.act, parts * MMA_M16N8K16_B_NK.unsqueeze(0))
        return p.diagonal(self.blocks, self.b_layout)

    def _product_and_sums(self, a: Tile, b: Tile, start: int) -> tuple[Tile, Tile | None]:
        """The same, where one product adds up x of all blocks."""
        x = self.p.slice(self.blocks, 2, start // COLUMNS, BLOCK_K)
        sums = self._sums(x, 1.0) if self.spec.zeros != "none" and self.plan.zeros_in_sums else None
        return self.p.mma(a, b, self._begun(x, start)), sums

    def _begun(self, x: Tile, start: int) -> Tile:
        """Returns an accumulator that makes up for what codes alone are too large by."""
        p, plan = self.p, self.plan
        if plan.defers_offset:
            return p.offset_sums(x, self.spec.dtype, start % self.packing.chunk, self.d_layout, by_block=True)
        offset = self.convert.offset if self.spec.zeros == "none" else 0.0  # zeros include it
        return self._sums(x, -offset) if offset else p.constant(0.0, "f32", self.d_layout)

    def _sums(self, x: Tile, factor: float) -> Tile:
        """Returns the sums of x, times a factor, for all rows, which are divided by the power of two that decoding left
        out, as products are. Of the equal products of several row blocks LLVM keeps one."""
        p, raw = self.p, self.convert.raw
        upper, lower = self.convert.exponents if raw else (0, 0)
        ones = p.constant(factor * 2.0**-upper, self.spec.act, self.ones_layout, factor * 2.0**-lower)
        sums = p.mma(ones, x, p.constant(0.0, "f32", self.d_layout))
        return sums if raw else self.convert.with_exponent(sums, -1)

    def _begin_outliers(self, carried: list[Tile]) -> list[Tile]:
        """The same, where products with outliers, which are spread alike, are what sums begin with, unless these are
        scaled at the end."""
        carried, outliers = super()._begin_outliers(carried), self.operands.outliers
        if outliers.products is None or self.spec.row_scales:
            return carried
        first, outliers.products = self.convert.with_exponent(outliers.products, -1), None
        return [first, *carried[1:]]

    def _whole(self, total: Tile) -> Tile:
        return self.convert.with_exponent(self.p.reduce(total, 2))


def decode_matmul_spread(spec: MatmulSpec, schedule: Schedule) -> ir.Module:
    """The tile program of a matmul with one token, in a module of its own."""
    return _SpreadKernel(KernelPlan(spec, schedule)).build()
