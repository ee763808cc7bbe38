"""The matmul kernel for one token in integers: `passes.kernels.streaming.kernel` with another compute side
(the family `decode_integer`).

The idea. With narrow codes and one token, decoding to f16 and a tensor core with seven of its eight columns idle are
the bound, not memory. As bytes, codes cost half as much; x takes four of the columns, a limb each
(`dialect.formats.integer_limbs`).

    for round:                         copies as in `streaming.kernel`
        split x of the step into limbs, in shared memory, every warp for itself
        for group in step:
            p   = codes * limbs       exact sums in integers, f32 once per piece of 128 columns, from zero
            acc = acc + scale * p      two columns: what the lower and the upper limbs bring
    acc[0] + 2^16 acc[1], then sums over warps and splits

Signed codes are multiplied as they lie in memory, in offset binary: too large by a number that is taken for a zero
point.

Shared memory: beside the stages of `passes.kernels.streaming.kernel` one buffer of limbs [warps_k, pieces, 4 limbs, 4
lanes, 8 halves] in 32-bit words.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.integer_limbs import HALVES, LIMBS, PIECE, ROW
from lowbit.dialect.layouts.fragments import MMA_M16N8_PAIRS
from lowbit.dialect.layouts.layout import spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.types import row_major
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.decode.schedule import IntegerSchedule
from lowbit.passes.kernels.streaming.kernel import Kernel
from lowbit.passes.kernels.streaming.operands import Operands
from lowbit.passes.kernels.streaming.plan import KernelPlan


class _IntegerKernel(Kernel):
    """Builds the program."""

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        warps = spatial(plan.schedule.warps_k, 1, 1)
        self.d_layout = warps.local(1, plan.schedule.row_blocks, 1) * MMA_M16N8_PAIRS.unsqueeze(0)
        self.sum_layout = self.d_layout.reduce((1,))

    def _operands(self) -> Operands:
        operands = super()._operands()
        shape = (self.schedule.warps_k, self.schedule.step_k // PIECE, LIMBS, 4, HALVES)
        *strides, _ = row_major((*shape[:-1], ROW))
        self.limbs = self.p.alloc_shared("i32", shape, (*strides, 1))
        operands.buffers.append(self.limbs)
        return operands

    def _step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        p, s, format_ = self.p, self.schedule, self.spec.dtype
        unit = p.split_limbs(self.operands.x_buffer, self.limbs, format_)
        p.barrier("warps", 1)
        codes = p.view(words(), format_, self.a_layout)

        def product(start: int, width: int) -> Tile:
            return p.limb_mma(codes, self.limbs, unit, start, width, self.d_layout)

        def sums(start: int, width: int) -> Tile:
            return p.limb_sums(self.limbs, unit, format_, start, width, self.sum_layout)

        if not self.plan.groups:
            total, *rest = carried
            return [p.add(total, product(0, s.step_k)), *(p.add(c, sums(0, s.step_k)) for c in rest)]
        (total,) = carried
        width = s.step_k // self.plan.groups
        for group in range(self.plan.groups):
            start = group * width
            sums_of_x = sums(start, width) if self.plan.zeros_in_sums else None
            total = self.factors.add_scaled(total, product(start, width), group, sums_of_x)
        return [total]

    def _whole(self, total: Tile) -> Tile:
        return self.p.join_limbs(total)


def decode_matmul_integer(spec: MatmulSpec, schedule: IntegerSchedule) -> ir.Module:
    """The tile program of a matmul with one token, in a module of its own."""
    return _IntegerKernel(KernelPlan(spec, schedule)).build()
