"""The matmul kernel for few tokens (1 to 256): weights stream through shared memory into mma fragments.

The idea. Y' = W X': the weight is operand A (16 rows of an mma), tokens are its 8 columns. A decode step reads every
byte of the weight once and little else, so the kernel is a copy pipeline with a tensor core at its end. The weight
is packed in fragment order: a lane copies 16-byte units and later reads back the very units it copied, without
conflicts and without ldmatrix.

Loop nest. A block owns `rows` = 16 * row_blocks * warps_n rows and, of several splits, one part of k. In a round it
takes warps_k steps of step_k columns, one per warp (or per warps_n warps, which share the activations):

    for round:                         copies run `stages` rounds ahead (pipeline-copies); see `_rotation` for the first
        copy weight units, then activations, scales, zeros of (warp, step)
        for group in step:             a step has several groups, or a group several steps
            p   = decode(codes) x^T    f32, from zero
            acc = acc + scale * p      scale late: once per group and accumulator, not per weight
    reduce acc over the warps_k warps through shared memory; over splits through that of a cluster's blocks, each of
        which adds up its part of the rows, or through device memory, where the last to arrive does
    add the bias, convert, store y[t, n]

With wgmma (`Schedule.wgmma`) four warps side by side load and decode their fragments of the weight in the same way,
and the instruction reads the activations from shared memory by itself. Where a group has no more columns than there
are tokens, there are more sums to scale than weights. Then weights are scaled, and acc takes the products of all
groups of a step in one chain, with several row blocks or factors of a step in registers that no step moves
(`KernelPlan.sums_in_place`). Else a group's product may begin before the last one's has ended
(`Schedule.overlap_groups`).

A small matmul (`Schedule.preload_weights`) has no loop: all units are on their way to registers, and all activations to
shared memory, before the first is waited for. Blocks of two kernels share a multiprocessor; empty blocks fill up the
grid (`Schedule.min_blocks`), so that no multiprocessor gets two blocks of one kernel.

Zeros and offsets:

- Integer zeros are subtracted as codes are decoded, which takes a subtraction anyway; q - z is exact in f16 and bf16.
- Float zeros touch no weight: s * (q - z) x = s * q x - s * z * sum(x), with sum(x) from one mma with ones. With wgmma
  that mma would cost as much as 64 rows. So weights are scaled there, s * q + (- s * z), both rounded to the type of x.
- An offset o goes the same ways: o * sum(x), or s * q + o.
- Unsigned integers without zeros are multiplied as they are stored, in f16, with no subtraction, and so are formats
  that have sums of x anyway (`KernelPlan.raw_codes`). With `Schedule.raw_codes` all others are as well; sums of x then
  correct zero points and the offset of signed codes.

Outliers, numbers in f16 that are added to single weights, are few. Each warp multiplies its share of them with x and
adds the products to its sums, before, in or after the loop (`passes.kernels.streaming.outliers`).

Where scales are codes, or e4m3, a warp computes the factors of sums or weights at the head of a step, once for all its
lanes (`passes.kernels.streaming.step_factors`).

Shared memory, per stage: weight units [warps_k, row blocks, units x lanes] of 16 bytes; activations [warps_k, tokens,
step_k + 8] (the 8 spread ldmatrix over all banks), or swizzled [warps_k, step_k / 64, tokens, 64] for wgmma; scales and
zeros [warps_k, row blocks, groups, 16]. Beside the stages is the table of a format that has one
(`dialect.formats.decode_table`), or, with outliers by step, x of the step [warps_k, tokens / 8, step_k + 8, 8] with
tokens side by side and 8 columns of zeros. After the loop, partial sums [warps_k, tokens, rows + 4] in f32 take the
place of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import ClassVar

from lowbit.dialect.bindings import ir
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program, Scalar, Tile, as_i32
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.scales_zeros import ScalesZeros
from lowbit.passes.kernels.streaming.epilogue import Ending
from lowbit.passes.kernels.streaming.factors import Factors
from lowbit.passes.kernels.streaming.operands import Operands
from lowbit.passes.kernels.streaming.plan import KernelPlan

BATCH = 64  # columns of weights that are multiplied together, of those whose sums stay in place
ROTATED = (8, 16)  # tokens: with fewer, x is little; with more, it gained nothing on an H200


class Kernel:
    """Builds the program."""

    factors_type: ClassVar[type[Factors]] = Factors

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan
        self.spec, self.schedule = spec, schedule = plan.spec, plan.schedule
        self.packing = spec.packing
        self.compute = compute_element(spec.dtype, spec.act)
        names = [*plan.inputs, *(slot.name for slot in spec.tensors), "y"]
        names += spec.call_inputs
        names += ["workspace"] if self.plan.workspace_bytes else []
        s = schedule
        self.p = Program(
            "matmul",
            s.threads,
            (self.plan.launched_tiles, s.split_k, 1),
            dict.fromkeys(names, "pointer") | {"m": "i32"},
            self.plan.workspace_bytes,
            s.max_blocks_per_sm,
            (1, s.cluster, 1),
            fits_blocks=s.spread_k or s.outliers_by_step,
        )
        self.convert = ScalesZeros(self.p, spec, plan.stored_offset, plan.raw_codes, plan.scale_power)
        self.sum_element = "f32"
        warps = spatial(s.warps_k, s.warps_n, 1)
        step_blocks, columns = s.step_k // BLOCK_K, s.mma_columns // 8

        def batched(fragment: Layout) -> Layout:
            return fragment.unsqueeze(0)

        self.a_layout = warps.local(1, s.row_blocks, step_blocks) * batched(MMA_M16N8K16_A)
        replicas = spatial(s.warps_k, 1, 1).replicated(s.warps_n)
        self.b_layout = replicas.local(1, columns, step_blocks) * batched(MMA_M16N8K16_B_NK)
        self.d_layout = warps.local(1, s.row_blocks, columns) * batched(MMA_M16N8_D)
        self.sum_layout = self.d_layout.reduce((1,))
        self.parts = self.plan.groups  # of a step, whose sums are scaled apart

    def build(self) -> ir.Module:
        p, tiles = self.p, self.plan.tiles
        with p:
            self.tile = p.block_id(0)
            if self.plan.launched_tiles == tiles:
                self._block()
            else:
                with p.when(self.tile < tiles):
                    self._block()
                with p.when(Scalar(as_i32(tiles - 1)) < self.tile):
                    p.grid_wait()  # keeps a place until the kernel before has ended, and the next from starting
        return p.module

    def _block(self) -> None:
        """Builds the program of a block."""
        p, s = self.p, self.schedule
        self.first_block = self.tile * self.plan.row_blocks
        self.sums = self._sums_in_place()
        carried = [] if self.sums is not None else [p.constant(0.0, self.sum_element, self.d_layout)]
        if self.plan.zeros_in_sums and not self.plan.groups:
            carried.append(p.constant(0.0, "f32", self.sum_layout))
        self.operands = self._operands()
        self.operands.buffers += self.convert.alloc_table()
        self.factors = self.factors_type(p, self.plan, self.operands, self.convert, self.d_layout)
        self.first, self.rotation = p.block_id(1) * self.plan.rounds, self._rotation()
        p.grid_launch_dependents()  # the next kernel's blocks fetch their weights as soon as they find room
        carried = self._preloaded(carried) if s.preload_weights else self._stream(carried)
        if self.sums is not None:
            carried = [p.read(self.sums)]
        if power := self.plan.sum_power:
            carried = [p.mul(carried[0], p.constant(2.0**power, "f32", self.d_layout))]
        total = self._whole(carried[0] if self.plan.groups else self._scale_rows(*carried))
        if self.spec.outliers and self.spec.row_scales:  # these do not scale outliers; else the epilogue applies them
            total = p.mul(total, self.factors.of_rows("row_scales"))
        total = self.operands.outliers.add_to(total, self.operands.buffers)
        p.barrier()  # all of the block have read their stages, whose place is taken now
        p.free_shared(*self.operands.buffers)
        Ending(p, self.plan, self.tile).finish(total)

    def _sums_in_place(self) -> Tile | None:
        """Registers for the sums of weights that have been scaled, which stay where they are until the end."""
        if not self.plan.sums_in_place:
            return None
        sums = self.p.accumulator(self.d_layout)
        self.p.clear(sums)
        return sums

    def _operands(self) -> Operands:
        return Operands(self.p, self.plan, self.first_block)

    def _stream(self, carried: list[Tile]) -> list[Tile]:
        """All rounds, of which a few are in flight at a time. The weight does not depend on the kernel before."""
        p, s, operands, outliers, count = self.p, self.schedule, self.operands, self.operands.outliers, len(carried)
        outliers.load()
        carried = self._begin_outliers(carried)
        with p.loop(0, self.plan.rounds, carried) as loop:
            with p.pipeline(s.num_stages, s.prefetch_limit, s.refill, "warps", s.warps_n, async_proxy=s.wgmma):
                step = self._first_step(loop.index)
                operands.copy_codes(step)
                operands.copy_scales_zeros(step)
                operands.fill_table()
                self.convert.fill_table()
                outliers.copy()
                p.grid_wait()
                operands.copy_x(step)
                outliers.copy_step(step)
            outliers.begin_step(self._first_step(loop.index), operands.x_buffer)
            results = self._step(loop.carried[:count], operands.copied_codes)
            loop.results = [*results, *outliers.end_step(loop.carried[count:])]
        outliers.end(loop.carried[count:])
        return loop.carried[:count]

    def _begin_outliers(self, carried: list[Tile]) -> list[Tile]:
        """Multiplies the outliers that come before the first step. Returns the sums to begin with, last those of the
        outliers that the loop will add up."""
        return [*carried, *self.operands.outliers.begin(self.d_layout)]

    def _preloaded(self, carried: list[Tile]) -> list[Tile]:
        """All rounds, with everything on its way at once: the codes to registers, so that blocks of two kernels have
        room side by side, and those of the next have theirs by the time x is there."""
        p, s, operands = self.p, self.schedule, self.operands
        steps = [self._first_step(i) for i in range(self.plan.rounds)]
        words = [operands.load_codes(step) for step in steps]
        for operands.slot, step in enumerate(steps):
            operands.copy_scales_zeros(step)
        operands.fill_table()
        self.convert.fill_table()
        operands.outliers.copy()
        operands.outliers.load()
        p.grid_wait()
        for operands.slot, step in enumerate(steps):
            operands.copy_x(step)
            p.commit()
        carried = self._begin_outliers(carried)
        for operands.slot, codes in enumerate(words):
            if operands.slot == 0 or not s.overlap_groups:  # between barriers alone, products may overlap
                p.wait(0 if s.overlap_groups else len(steps) - 1 - operands.slot)
                p.barrier("warps", s.warps_n, async_proxy=s.wgmma)
            carried = self._step(carried, lambda codes=codes: codes)
        return carried

    def _first_step(self, index: Scalar | int) -> Scalar:
        """Returns the first step of a round's warps."""
        index = (self.rotation + index) % self.plan.rounds if self.rotation is not None else index
        return (self.first + index) * self.schedule.warps_k

    def _rotation(self) -> Scalar | None:
        """Returns by how many rounds a block starts later than the first; it comes to the rounds before at its end.

        All blocks read all of x: if they began at the same columns, a few slices of the L2 would have all to do.
        """
        if self.schedule.tokens not in ROTATED or self.plan.rounds == 1:
            return None
        return self.tile % self.plan.rounds

    def _step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        """One step of every warp, whose codes are in `words`."""
        p, s = self.p, self.schedule
        self.factors.begin_step()
        codes = p.view(words(), self.spec.dtype, self.a_layout)
        if self.operands.table:
            a = p.lookup(codes, self.operands.table, self.compute)
        else:
            offset = "raw" if self.plan.raw_codes else "deferred" if self.plan.defers_offset else "subtracted"
            a = p.decode(codes, self.compute, self.plan.exponent, offset, self.factors.minus_zeros())
        if s.wgmma:
            return self._warpgroup_step(carried, a)
        b = self._fragments_of_x()
        if not self.plan.groups:
            sums = [p.add(c, p.row_sums(b, self.sum_layout)) for c in carried[1:]]
            return [p.mma(a, b, self._with_offset_sums(carried[0], b)), *sums]
        (total,) = carried
        width = s.step_k // self.parts
        for group in range(self.parts):
            a_group, b_group = (p.slice(t, 2, group * width, width) for t in (a, b))
            product, sums = self._product_and_sums(a_group, b_group, group * width)
            total = self.factors.add_scaled(total, product, group, sums)
        return [total]

    def _product_and_sums(self, a: Tile, b: Tile, start: int) -> tuple[Tile, Tile | None]:
        """Returns the product of weights and x, columns `start` .. of a step, and the sums of x if they are needed."""
        p = self.p
        first = p.constant(0.0, "f32", self.d_layout)
        if self.plan.defers_offset:
            first = p.offset_sums(b, self.spec.dtype, start % self.packing.chunk, self.d_layout)
        return p.mma(a, b, first), p.row_sums(b, self.sum_layout) if self.plan.zeros_in_sums else None

    def _fragments_of_x(self) -> Tile:
        """Returns the step's activations as the operand that codes are multiplied by."""
        return self.p.load_matrix(self.operands.x_buffer, self.p["m"], self.b_layout)

    def _whole(self, total: Tile) -> Tile:
        """[warps_k, rows, columns] of what a warp ends with."""
        return total

    def _warpgroup_step(self, carried: list[Tile], a: Tile) -> list[Tile]:
        """The same with x in shared memory."""
        p, s = self.p, self.schedule
        if self.sums is not None:
            return self._accumulate(a, self.sums)
        if not self.plan.groups:
            sums = [p.add(c, self._sums_of_x(0, s.step_k)) for c in carried[1:]]
            return [p.warpgroup_mma(a, self.operands.x_buffer, 0, carried[0]), *sums]
        (total,) = carried
        width = s.step_k // self.plan.groups
        for group in range(self.plan.groups):
            start = group * width
            zero = p.constant(0.0, "f32", self.d_layout)
            weights = self.factors.of_weights(p.slice(a, 2, start, width), group)
            if self.plan.rounds_scales:
                total = p.warpgroup_mma(weights, self.operands.x_buffer, start, total)
                continue
            sums = self._sums_of_x(start, width) if self.plan.zeros_in_sums else None
            product = p.warpgroup_mma(weights, self.operands.x_buffer, start, zero, s.overlap_groups)
            total = self.factors.add_scaled(total, product, group, sums)
        return [total]

    def _accumulate(self, a: Tile, sums: Tile) -> list[Tile]:
        """Begins products of 64 columns with scaled weights, and waits for those before: their registers are needed."""
        p, groups, width = self.p, range(self.plan.groups), self.schedule.step_k // self.plan.groups
        weights = [self.factors.of_weights(p.slice(a, 2, group * width, width), group) for group in groups]
        for block, group in itertools.product(range(self.schedule.row_blocks), groups):
            start, held = group * width, (group + 1) * width % BATCH != 0
            pending = None if held else 1
            p.accumulate(weights[group], self.operands.x_buffer, start, sums, held=held, block=block, pending=pending)
        p.await_products(0)
        return []

    def _sums_of_x(self, start: int, columns: int) -> Tile:
        return self.p.warpgroup_row_sums(self.operands.x_buffer, start, columns, self.sum_layout)

    def _with_offset_sums(self, total: Tile, b: Tile) -> Tile:
        """An accumulator for a product with b."""
        if not self.plan.defers_offset:
            return total
        return self.p.add(total, self.p.offset_sums(b, self.spec.dtype, 0, self.d_layout))

    def _scale_rows(self, total: Tile, *sums_of_x: Tile) -> Tile:
        """Applies one scale per row to a warp's sum, at the end."""
        return self.factors.scale_rows(total, *sums_of_x)


def decode_matmul(spec: MatmulSpec, schedule: Schedule) -> ir.Module:
    """The tile program of a matmul, in a module of its own."""
    return Kernel(KernelPlan(spec, schedule)).build()
