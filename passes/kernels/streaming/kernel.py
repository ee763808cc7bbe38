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

How a step is multiplied and scaled is up to an engine, which its family chooses; all else is the same. Engines have
files of their own: `mma`, `wgmma`, `spread` and `limbs` for one token, `eight_bit` for x of 8 bits. With wgmma four
warps side by side load and decode their fragments of the weight in the same way, and the instruction reads the
activations from shared memory by itself. Where a group has no more columns than there are tokens, there are more sums
to scale than weights. Then weights are scaled, and acc takes the products of all groups of a step in one chain
(`Scaling.rounds_scales`).

A small matmul (`Schedule.preload_weights`) has no loop: all units are on their way to registers, and all activations to
shared memory, before the first is waited for. Blocks of two kernels share a multiprocessor; empty blocks fill up the
grid (`Schedule.min_blocks`), so that no multiprocessor gets two blocks of one kernel.

Zeros and offsets:

- Integer zeros are subtracted as codes are decoded, which takes a subtraction anyway; q - z is exact in f16 and bf16.
- Float zeros touch no weight: s * (q - z) x = s * q x - s * z * sum(x), with sum(x) from one mma with ones. With wgmma
  that mma would cost as much as 64 rows. So weights are scaled there, s * q + (- s * z), both rounded to the type of x.
- An offset o goes the same ways: o * sum(x), or s * q + o. Weights of an invariant matmul are scaled
  with mma.sync, too, and with integer zeros (`passes.kernels.scales.in_order`).
- Unsigned integers without zeros are multiplied as they are stored, in f16, with no subtraction, and so are formats
  that have sums of x anyway (`Arithmetic.raw_codes`). With `Schedule.raw_codes` all others are as well; sums of x then
  correct zero points and the offset of signed codes.

Outliers, numbers in f16 that are added to single weights, are few. Each warp multiplies its share of them with x and
adds the products to its sums, before, in or after the loop (`passes.kernels.streaming.outliers`).

Where scales are codes, or e4m3, a warp computes them at the head of a step, once for all its lanes
(`passes.kernels.scales.step_scales`).

Of an invariant matmul a warp may have several sums, its chains, each with its columns of every step, and blocks of a
cluster take turns at rounds (`Steps.take_turns`): so a chain of the order of sums (`SumOrder`) may be any warp's.

Shared memory, per stage: weight units [warps_k, row blocks, units x lanes] of 16 bytes; activations [warps_k, tokens,
step_k + 8] (the 8 spread ldmatrix over all banks), or swizzled [warps_k, step_k / 64, tokens, 64] for wgmma; scales and
zeros [warps_k, row blocks, groups, 16]. Beside the stages is the table of a format that has one
(`dialect.formats.decode_table`), or, with outliers by step, x of the step [warps_k, tokens / 8, step_k + 8, 8] with
tokens side by side and 8 columns of zeros. After the loop, partial sums [warps_k, tokens, rows + 4] in f32 take the
place of all.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.bindings import ir
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.decode.schedule import ROTATED
from lowbit.passes.kernels.streaming.activations import Activations
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.engine import Engine
from lowbit.passes.kernels.streaming.epilogue import Ending
from lowbit.passes.kernels.streaming.operands import Operands
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.kernels.streaming.work import Work


def streaming_kernel(
    plan: KernelPlan,
    *,
    work: type[Work],
    activations: Callable[[Block], Activations],
    engine: Callable[[Block, Operands], Engine],
    ending: Callable[[Block], Ending],
) -> ir.Module:
    """Returns the tile program of a matmul, in a module of its own. It is composed of parts, which are made for its
    block (`passes.kernels.streaming.parts`).

    work         which rows, part of k and tokens a block has
    activations  how x comes to shared memory
    engine       how a warp multiplies a step
    ending       how sums of warps and blocks become y
    """
    p = _program(plan, work)
    with p:
        share = work(p, plan)

        def body() -> None:
            block = Block(p, plan, share)
            operands = Operands(block, activations)
            sums = _Stream(block, operands, engine(block, operands)).sums()
            p.barrier()  # all of the block have read their stages, whose place is taken now
            p.free_shared(*block.buffers)
            ending(block).finish(sums)

        share.run(body)
    return p.module


def _program(plan: KernelPlan, work: type[Work]) -> Program:
    """Returns the empty program, with its parameters and its grid."""
    spec, s, workspace = plan.spec, plan.schedule, plan.ending.workspace_bytes
    names = [*plan.x.inputs, *(slot.name for slot in spec.tensors), "y", *spec.call_inputs]
    names += ["workspace"] if workspace else []
    return Program(
        "matmul",
        s.threads,
        work.grid(plan),
        dict.fromkeys(names, "pointer") | {"m": "i32"},
        workspace,
        s.max_blocks_per_sm,
        (1, plan.ending.cluster, 1),
        fits_blocks=plan.engine.takes_registers_left or s.outliers_by_step or spec.experts > 1,
    )


class _Stream:
    """The steps of a block, whatever its engine: in a loop with a copy pipeline, or all at once."""

    def __init__(self, block: Block, operands: Operands, engine: Engine) -> None:
        self.block, self.operands, self.engine = block, operands, engine
        self.p, self.plan, self.schedule = block.p, block.plan, block.schedule
        self.outliers, self.rounds = operands.outliers, block.plan.steps.rounds

    def sums(self) -> list[Tile]:
        """Returns a warp's sums over all columns of each of its chains: [warps_k, rows, tokens] f32."""
        p, spec, engine = self.p, self.block.spec, self.engine
        carried = engine.begin()
        self.outliers.prepare()
        split = self.block.work.split()
        self.first = split if self.plan.steps.take_turns else split * self.rounds
        self.rotation = self._rotation()
        p.grid_launch_dependents()  # the next kernel's blocks fetch their weights as soon as they find room
        carried = self._preloaded(carried) if self.schedule.preload_weights else self._rounds(carried)
        sums = engine.end(carried)
        if not spec.outliers:
            return sums
        (total,) = sums
        if spec.row_scales:  # these do not scale outliers; else the epilogue applies them
            total = p.mul(total, engine.scales.of_rows("row_scales"))
        return [self.outliers.add_to(total)]

    def _rounds(self, carried: list[Tile]) -> list[Tile]:
        """All rounds, of which a few are in flight at a time. The weight does not depend on the kernel before."""
        p, s, operands, outliers, count = self.p, self.schedule, self.operands, self.outliers, len(carried)
        outliers.load()
        carried = outliers.begin(carried, self.engine.sums)
        with p.loop(0, self.rounds, carried) as loop:
            with p.pipeline(s.num_stages, s.prefetch_limit, s.refill, "warps", s.warps_n, async_proxy=s.wgmma):
                step = self._first_step(loop.index)
                operands.codes.copy(step)
                operands.scales.copy(step)
                self._fill_tables()
                outliers.copy()
                p.grid_wait()
                operands.copy_x(step)
                outliers.copy_step(step)
            outliers.begin_step(self._first_step(loop.index), operands.x.buffer)
            results = self.engine.step(loop.carried[:count], operands.codes.copied)
            loop.results = [*results, *outliers.end_step(loop.carried[count:])]
        outliers.end(loop.carried[count:])
        return loop.carried[:count]

    def _preloaded(self, carried: list[Tile]) -> list[Tile]:
        """All rounds, with everything on its way at once: the codes to registers, so that blocks of two kernels have
        room side by side, and those of the next have theirs by the time x is there."""
        p, block, operands, outliers = self.p, self.block, self.operands, self.outliers
        steps = [self._first_step(i) for i in range(self.rounds)]
        words = [operands.codes.load(step) for step in steps]
        for block.slot, step in enumerate(steps):
            operands.scales.copy(step)
        self._fill_tables()
        outliers.copy()
        outliers.load()
        p.grid_wait()
        for block.slot, step in enumerate(steps):
            operands.copy_x(step)
            p.commit()
        carried = outliers.begin(carried, self.engine.sums)
        for block.slot, codes in enumerate(words):
            self._await_x(block.slot)
            carried = self.engine.step(carried, lambda codes=codes: codes)
        return carried

    def _await_x(self, round: int) -> None:
        """Waits for x of a preloaded round; between barriers alone, products may overlap."""
        p, s = self.p, self.schedule
        if round == 0 or not s.overlap_groups:
            p.wait(0 if s.overlap_groups else self.rounds - 1 - round)
            p.barrier("warps", s.warps_n, async_proxy=s.wgmma)

    def _fill_tables(self) -> None:
        if self.operands.table:
            self.operands.table.fill()
        self.block.convert.fill_table()

    def _first_step(self, index: Scalar | int) -> Scalar:
        """Returns the first step of a round's warps."""
        index = (self.rotation + index) % self.rounds if self.rotation is not None else index
        if self.plan.steps.take_turns:
            index = index * self.schedule.split_k
        return (self.first + index) * self.schedule.warps_k

    def _rotation(self) -> Scalar | None:
        """Returns by how many rounds a block starts later than the first; it comes to the rounds before at its end.

        All blocks read all of x: if they began at the same columns, a few slices of the L2 would have all to do. Where
        one result serves every number of tokens, sums begin at the first column in every kernel.
        """
        if self.schedule.tokens not in ROTATED or self.rounds == 1 or self.block.spec.invariant:
            return None
        return self.block.work.tile % self.rounds
