"""The engine for one token in integers (the family `decode_integer`).

The idea. With narrow codes and one token, decoding to f16 and a tensor core with seven of its eight columns idle are
the bound, not memory. As bytes, codes cost half as much; x takes four of the columns, a limb each
(`dialect.formats.integer_limbs`).

    split x of the step into limbs, in shared memory, every warp for itself
    for group in step:
        p   = codes * limbs       exact sums in integers, f32 once per piece of 128 columns, from zero
        acc = acc + scale * p      two columns: what the lower and the upper limbs bring
    after all steps: acc[0] + 2^16 acc[1]

Signed codes are multiplied as they lie in memory, in offset binary: too large by a number that is taken for a zero
point.

Shared memory: beside the stages of `passes.kernels.streaming.kernel` one buffer of limbs [warps_k, pieces, 4 limbs, 4
lanes, 8 halves] in 32-bit words.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.formats.integer_limbs import HALVES, LIMBS, PIECE, ROW
from lowbit.dialect.layouts.fragments import MMA_M16N8_PAIRS
from lowbit.dialect.layouts.layout import spatial
from lowbit.dialect.types import row_major
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.scales.sum_scaling import SumScaling
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.engine import Engine, zero_sums
from lowbit.passes.kernels.streaming.fragments import weight_fragments
from lowbit.passes.kernels.streaming.operands import Operands


class LimbMma(Engine):
    """Multiplies codes as bytes by limbs of x."""

    def __init__(self, block: Block, operands: Operands) -> None:
        self.block, self.p, self.plan, self.x, s = block, block.p, block.plan, operands.x, block.schedule
        self.codes = weight_fragments(s)
        self.sums = spatial(s.warps_k, 1, 1).local(1, s.row_blocks, 1) * MMA_M16N8_PAIRS.unsqueeze(0)
        self.row = self.sums.reduce((1,))
        shape = (s.warps_k, s.step_k // PIECE, LIMBS, 4, HALVES)
        *strides, _ = row_major((*shape[:-1], ROW))
        self.limbs = block.alloc("i32", shape, (*strides, 1))
        self.scales = Scales(block, operands.scales, self.sums)
        self.scaling = SumScaling(self.scales)

    def begin(self) -> list[Tile]:
        return zero_sums(self.block, self.sums)

    def step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        p, format_, groups, width = self.p, self.block.spec.dtype, self.plan.steps.groups, self.block.schedule.step_k
        unit = p.split_limbs(self.x.buffer, self.limbs, format_)
        p.barrier("warps", 1)
        codes = p.view(words(), format_, self.codes)

        def product(start: int, columns: int) -> Tile:
            return p.limb_mma(codes, self.limbs, unit, start, columns, self.sums)

        def sums(start: int, columns: int) -> Tile:
            return p.limb_sums(self.limbs, unit, format_, start, columns, self.row)

        if not groups:
            total, *rest = carried
            return [p.add(total, product(0, width)), *(p.add(c, sums(0, width)) for c in rest)]
        (total,) = carried
        columns = width // groups
        for group in range(groups):
            start = group * columns
            sums_of_x = sums(start, columns) if self.plan.arithmetic.zeros_in_sums else None
            total = self.scaling.add_scaled(total, product(start, columns), group, sums_of_x)
        return [total]

    def end(self, carried: list[Tile]) -> list[Tile]:
        return [self.p.join_limbs(self.scaling.whole(*carried))]
