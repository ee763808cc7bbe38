"""The matmul kernel for one token with small groups: `passes.kernels.decode.kernel` with another compute side
(`Schedule.spread_k`).

The idea. The product of an mma has eight columns, of which one token leaves seven idle, while small groups want many
sums: with groups of 16 columns every mma ends one, and all four lanes of a row read, convert and apply its scale. Here
column i of a product is block i of 16 columns of k: x stands in row i of operand B at block i, and there is 0 elsewhere
(`load_diagonal`). Eight mma add into one accumulator, and eight sums stand side by side:

    for round:                         copies as in `decode.kernel`
        for 128 columns in step:
            p   = decode(codes) diagonal(x)^T   [rows, 8], eight mma, from zero
            acc = acc + scale * p               [rows, 8], a scale for every block
    sum of acc over its columns, then over warps and splits

A lane then has two of eight blocks and a scale of its own for each, an eighth of the work for sums and a quarter of
that for scales. Sums of x come the same way, eight at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.decode.kernel import Kernel
from lowbit.passes.kernels.decode.plan import COLUMNS, SPREAD, KernelPlan
from lowbit.passes.kernels.decode.schedule import Schedule


class _SpreadKernel(Kernel):
    """Builds the program.

    groups  how many groups 128 columns have
    """

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        s = plan.schedule
        self.parts, self.groups = s.step_k // SPREAD, SPREAD // (plan.spec.packing.padded_group or SPREAD)
        self.by_group, self.sums_by_group = self._by_group(self.d_layout), self._by_group(self.sum_layout)
        self.factor_layout = self.by_group.reduce((3,))

    def _by_group(self, layout: Layout) -> Layout:
        """[warps_k, rows, 8] as [warps_k, groups, rows, 8 / groups]: these columns have a scale in common."""
        warps, rows, _ = layout.shape
        return layout.reshape((warps, rows, self.groups, COLUMNS // self.groups)).permute((0, 2, 1, 3))

    def _step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        self.numbers.fill()
        return super()._step(carried, words)

    def _fragments_of_x(self) -> Tile:
        return self.p.load_diagonal(self.operands.x_buffer, self.b_layout)

    def _first_sums(self, carried: list[Tile], words: Tile | None) -> list[Tile]:
        """Those of outliers are spread alike, and can be added to, unless sums are scaled at the end."""
        carried = super()._first_sums(carried, words)
        if self.sparse is None or self.spec.row_scales:
            return carried
        first, self.sparse = self.convert.with_exponent(self.sparse, -1), None
        return [first, *carried[1:]]

    def _add_scaled(self, total: Tile, product: Tile, group: int, sums_of_x: Tile | None) -> Tile:
        """The same by groups, but for the power of two that decoding left out: sums of x are divided by it, so that the
        total can be multiplied by it once."""
        p = self.p
        total, product = (p.view(t, "f32", self.by_group) for t in (total, product))
        scale = self._scale_or_zero("scales", group)
        if sums_of_x is not None:
            ones = p.constant(1.0, "f32", self.by_group)
            sums = p.mul(self.convert.with_exponent(ones, -1), p.view(sums_of_x, "f32", self.sums_by_group))
            if self.spec.zeros == "offset":
                offset = self.convert.with_code_offset(self._scale_or_zero("offsets", group), scale)
                total = p.fma(offset, sums, total)
            else:
                product = p.fma(self._minus_zero(group), sums, product)
        return p.view(p.fma(scale, product, total), "f32", self.d_layout)

    def _minus_zero(self, group: int) -> Tile:
        """Returns the factor of the sums of x, minus the zero, before they are scaled."""
        if self.spec.zeros == "none":
            return self.p.constant(-self.convert.offset, "f32", self.factor_layout)
        return self.convert.minus_zero(self._scale_or_zero("zeros", group))

    def _scale_or_zero(self, name: str, part: int) -> Tile:
        """Scales, zeros or offsets of every row and group: [warps_k, groups, rows, 1] f32."""
        shape = (self.schedule.warps_k, self.groups, self.plan.row_blocks, ROWS)
        by_rows = self.factor_layout.reshape(shape).permute((0, 2, 1, 3))
        return self.p.view(self.numbers.load(name, part * self.groups, by_rows), "f32", self.factor_layout)

    def _whole(self, total: Tile) -> Tile:
        return self.convert.with_exponent(self.p.reduce(total, 2))


def decode_matmul_spread(spec: MatmulSpec, schedule: Schedule) -> ir.Module:
    """The tile program of a matmul with one token, in a module of its own."""
    return _SpreadKernel(KernelPlan(spec, schedule)).build()
