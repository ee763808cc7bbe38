"""The engine for one token with small groups: mma.sync with k spread over its columns (`Schedule.spread_k`).

The idea. The product of an mma has eight columns, of which one token leaves seven idle, while small groups want many
sums: with groups of 16 columns every mma ends one, and all four lanes of a row read, convert and apply its scale. Here
column i of a product is block i of 16 columns of k: x stands in row i of operand B at block i, and there is 0 elsewhere
(`diagonal`). Eight mma add into one accumulator, and eight sums stand side by side:

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

from collections.abc import Callable

from lowbit.dialect.formats.packing import BLOCK_K, ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.scales.weight_scaling import WeightScaling
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.engine import Engine, zero_sums
from lowbit.passes.kernels.streaming.engine_plans import COLUMNS, SPREAD
from lowbit.passes.kernels.streaming.fragments import sum_fragments, weight_fragments, x_fragments
from lowbit.passes.kernels.streaming.operands import Operands

_BLOCKS = spatial(1, 1, 8).local(1, 1, 2).spatial(1, 1, 4).local(1, 1, 2)
"""128 columns, of which a lane has what it has of a fragment of operand B with a row for each 16."""


class SpreadMma(Engine):
    """Multiplies by mma.sync, with eight blocks of k in its columns."""

    def __init__(self, block: Block, operands: Operands) -> None:
        s = block.schedule
        self.block, self.p, self.plan, self.convert, self.x = block, block.p, block.plan, block.convert, operands.x
        self.codes, self.fragments, self.sums = weight_fragments(s), x_fragments(s), sum_fragments(s)
        self.ones = spatial(s.warps_k, s.warps_n, 1).local(1, s.row_blocks, 1) * MMA_M16N8K16_A.unsqueeze(0)
        self.scales = Scales(block, operands.scales, self.sums)
        self.weights = WeightScaling(self.scales, operands.table)
        self.scaling = SpreadScaling(self.scales, self.sums)

    def begin(self) -> list[Tile]:
        return zero_sums(self.block, self.sums)

    def step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        p, (total,) = self.p, carried
        self.scales.begin_step()
        a, blocks = self.weights.decoded(words(), self.codes), self._blocks_of_x()
        b = p.diagonal(blocks, self.fragments)
        for part in range(self.block.schedule.step_k // SPREAD):
            a_part, b_part = (p.slice(t, 2, part * SPREAD, SPREAD) for t in (a, b))
            x = p.slice(blocks, 2, part * BLOCK_K, BLOCK_K)
            sums = self._sums_for_zeros(x)
            product = p.mma(a_part, b_part, self._begun(x, part * SPREAD))
            total = self.scaling.add_scaled(total, product, part, sums)
        return [total]

    def end(self, carried: list[Tile]) -> list[Tile]:
        return [self.convert.with_exponent(self.p.reduce(carried[0], 2))]

    def _blocks_of_x(self) -> Tile:
        """Loads blocks of 16 columns below one another, a lane those of its row of operand B."""
        p, s = self.p, self.block.schedule
        parts = spatial(s.warps_k, 1, 1).replicated(s.warps_n).local(1, 1, s.step_k // SPREAD)
        loaded = p.load(self.x.buffer, (0, 0, 0), parts * _BLOCKS)
        return p.view(loaded, self.block.spec.act, parts * MMA_M16N8K16_B_NK.unsqueeze(0))

    def _sums_for_zeros(self, x: Tile) -> Tile | None:
        """Returns the sums of x by which zeros and offsets of groups are multiplied, if there are any."""
        wanted = self.block.spec.zeros != "none" and self.plan.arithmetic.zeros_in_sums
        return self._sums_of_x(x, 1.0) if wanted else None

    def _begun(self, x: Tile, start: int) -> Tile:
        """Returns an accumulator that makes up for what codes alone are too large by."""
        p, spec = self.p, self.block.spec
        if self.plan.arithmetic.defers_offset:
            return p.offset_sums(x, spec.dtype, start % spec.packing.chunk, self.sums, by_block=True)
        offset = self.convert.offset if spec.zeros == "none" else 0.0  # zeros include it
        return self._sums_of_x(x, -offset) if offset else p.constant(0.0, "f32", self.sums)

    def _sums_of_x(self, x: Tile, factor: float) -> Tile:
        """Returns the sums of x of all eight blocks, times a factor, for all rows, which are divided by the power of
        two that decoding left out, as products are. Of the equal products of several row blocks LLVM keeps one."""
        p, raw = self.p, self.convert.raw
        upper, lower = self.convert.exponents if raw else (0, 0)
        ones = p.constant(factor * 2.0**-upper, self.block.spec.act, self.ones, factor * 2.0**-lower)
        sums = p.mma(ones, x, p.constant(0.0, "f32", self.sums))
        return sums if raw else self.convert.with_exponent(sums, -1)


class SpreadScaling:
    """Scales products with a scale for every group of 128 columns of k.

    groups    how many groups 128 columns have
    by_group  sums as [warps_k, groups, rows, 8 / groups]: these columns have a scale in common
    """

    def __init__(self, scales: Scales, sums: Layout) -> None:
        self.p, self.plan, self.spec = scales.p, scales.plan, scales.spec
        self.scales, self.convert = scales, scales.convert
        self.sums, self.groups = sums, SPREAD // (self.spec.packing.padded_group or SPREAD)
        warps, rows, _ = sums.shape
        self.by_group = sums.reshape((warps, rows, self.groups, COLUMNS // self.groups)).permute((0, 2, 1, 3))

    def add_scaled(self, total: Tile, product: Tile, part: int, sums_of_x: Tile | None) -> Tile:
        """Returns total + scale * product, and + offset * (sums of x) where zeros or offsets are still to add: in parts
        of 128 columns, and without the power of two that decoding left out, by which the total is multiplied."""
        p = self.p
        total, product = (p.view(t, "f32", self.by_group) for t in (total, product))
        scale = self.of_part("scales", part)
        if sums_of_x is not None:
            sums = p.view(sums_of_x, "f32", self.by_group)
            if self.spec.zeros == "offset":
                offset = self.convert.with_code_offset(self.of_part("offsets", part), scale)
                total = p.fma(offset, sums, total)
            else:
                product = p.fma(self.convert.minus_zero(self.of_part("zeros", part)), sums, product)
        return p.view(p.fma(scale, product, total), "f32", self.sums)

    def of_part(self, name: str, part: int) -> Tile:
        """Loads scales, zeros or offsets of every row and group of a part: [warps_k, groups, rows, 1] f32."""
        layout = self.by_group.reduce((3,))
        shape = (self.plan.schedule.warps_k, self.groups, self.plan.steps.row_blocks, ROWS)
        by_rows = layout.reshape(shape).permute((0, 2, 1, 3))
        return self.p.view(self.scales.groups.load(name, part * self.groups, by_rows), "f32", layout)
