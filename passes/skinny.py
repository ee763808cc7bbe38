"""The matmul kernel for few tokens (1 to 64): weights stream through shared memory into mma fragments.

The idea. Y' = W X': the weight is operand A (16 rows of an mma), tokens are its 8 columns. A decode step reads every
byte of the weight once and little else, so the kernel is a copy pipeline with a tensor core at its end. The weight
is packed in fragment order: a lane copies 16-byte units and later reads back the very units it copied, without
conflicts and without ldmatrix.

Loop nest. A block owns `rows` = 16 * row_blocks * warps_n rows and, of several splits, one part of k. In a round it
takes warps_k steps of step_k columns, one per warp (or per warps_n warps, which share the activations):

    for round:                         copies run `stages` rounds ahead (pipeline-copies); see `_turn` for the first
        copy weight units, then activations, scales, zeros of (warp, step)
        for group in step:             a step has several groups, or a group several steps
            p   = decode(codes) x^T    f32, from zero
            acc = acc + scale * p      scale late: once per group and accumulator, not per weight
    reduce acc over the warps_k warps through shared memory; over splits through that of a cluster's blocks, each of
        which adds up its part of the rows, or through device memory, where the last to arrive does
    add the bias, convert, store y[t, n]

With wgmma (`Schedule.wgmma`) four warps side by side bring their fragments of the weight as ever, and the instruction
reads the activations from shared memory by itself.

Integer zero points are subtracted as integers are decoded, which takes a subtraction anyway: q - z is exact in f16 and
bf16. Others touch no weight: s * (q - z) x = s * q x - s * z * sum(x), with sum(x) from one mma with ones. But with
wgmma, where that mma would cost as much as 64 rows, q - z is rounded to the type of x.

Shared memory, per stage: weight units [warps_k, row blocks, units x lanes] of 16 bytes; activations [warps_k, tokens,
step_k + 8] (the 8 spread ldmatrix over all banks), or swizzled [warps_k, step_k / 64, tokens, 64] for wgmma; scales and
zeros [warps_k, row blocks, groups, 16]. Beside the
stages is the table of a format that has one (`dialect.decode_table`). After the loop all their place is taken by
partial sums [warps_k, tokens, rows + 4] in f32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from dialect.bindings import ir
from dialect.decode_table import DecodeTable
from dialect.layout import (
    MMA_M16N8_D,
    MMA_M16N8K16_A,
    MMA_M16N8K16_B_NK,
    Layout,
    local,
    replicated,
    spatial,
)
from dialect.packing import BLOCK_K, ROWS
from dialect.spec import BYTES, MatmulSpec
from dialect.types import UNIT
from passes.builder import Memory, Program, Scalar, Tile, as_i32
from passes.epilogue import Epilogue
from passes.plan import Plan
from passes.recipes import compute_element, exponent
from passes.schedule import Schedule

LANE_BYTES = 16
PANEL = 64  # columns of x that wgmma finds side by side
TURNED = (8, 16)  # tokens: with fewer, x is little; with more, it gained nothing on an H200


def spread(shape: tuple[int, ...], threads: int, vector: int = 1) -> Layout:
    """A tile over `threads` threads: neighbours along the last dim, `vector` elements of it each; copies if small."""
    rank = len(shape)

    def along(dim: int, size: int) -> tuple[int, ...]:
        return tuple(size if d == dim else 1 for d in range(rank))

    layout = local(*along(rank - 1, vector))
    for dim in reversed(range(rank)):
        size = shape[dim] // (vector if dim == rank - 1 else 1)
        taken = math.gcd(size, threads)
        layout = local(*along(dim, size // taken)) * (spatial(*along(dim, taken)) * layout)
        threads //= taken
    return replicated(threads, rank) * layout


class Factors:
    """Scales and zeros as f32 tiles."""

    def __init__(self, p: Program, spec: MatmulSpec, excess: float = 0.0) -> None:
        """excess: by how much the codes are too large that are multiplied."""
        self.p, self.spec, self.excess = p, spec, excess
        self.exponent = exponent(spec.dtype, compute_element(spec.dtype, spec.act))

    @staticmethod
    def element(kind: str) -> str:
        """The element type in memory of scales or zeros of a kind."""
        return "i8" if kind in ("e4m3", "e8m0", "u8") else kind

    def as_f32(self, tile: Tile, kind: str) -> Tile:
        return self.p.cast(tile, "f32", {"e4m3": "e4m3", "e8m0": "e8m0", "u8": "unsigned"}.get(kind, "float"))

    def unfold(self, scale: Tile) -> Tile:
        """The scale times the power of two that decoding left out."""
        if self.exponent == 0:
            return scale
        return self.p.mul(scale, self.p.constant(2.0**self.exponent, "f32", scale.layout))

    def minus_zero(self, stored: Tile) -> Tile:
        """-z, and minus the excess; integer zeros are stored from the format's least value up."""
        p, layout = self.p, stored.layout
        minus = p.mul(stored, p.constant(-1.0, "f32", layout))
        least = float(self.spec.dtype.values().min()) if self.spec.zeros == "int" else 0.0
        more = -least - self.excess
        return p.add(minus, p.constant(more, "f32", layout)) if more else minus


class Kernel:
    """Builds the program."""

    def __init__(self, spec: MatmulSpec, schedule: Schedule) -> None:
        self.spec, self.schedule = spec, schedule
        self.plan = Plan(spec, schedule)
        self.packing = spec.packing
        self.slot = 0  # of the buffers for x and factors; resident kernels have one for every round
        self.compute = compute_element(spec.dtype, spec.act)
        names = ["x", "codes", "scales"]
        names += ["zeros"] if spec.zeros != "none" else []
        names += ["bias"] if spec.bias else []
        names += ["y"] + (["workspace"] if self.plan.workspace_bytes else [])
        s = schedule
        self.p = Program(
            "matmul",
            s.threads,
            (self.plan.launched_tiles, s.splits, 1),
            dict.fromkeys(names, "pointer") | {"m": "i32"},
            self.plan.workspace_bytes,
            s.max_blocks,
            (1, s.cluster, 1),
        )
        self.convert = Factors(self.p, spec)
        # Zeros are subtracted in decoding, right after it, or from products, by way of sums of x.
        self.folded = spec.zeros == "int" and not self.plan.biased
        self.early = self.plan.rounds_zeros
        self.shifted = spec.zeros != "none" and not self.folded and not self.early
        warps = spatial(s.warps_k, s.warps_n, 1)
        step_blocks, columns = s.step_k // BLOCK_K, s.mma_columns // 8
        self.units = s.step_k // self.packing.chunk * self.packing.units * 32

        def batched(fragment: Layout) -> Layout:
            return fragment.unsqueeze(0)

        self.unit_layout = warps.local(1, s.row_blocks, self.units // 32).spatial(1, 1, 32)
        self.a_layout = warps.local(1, s.row_blocks, step_blocks) * batched(MMA_M16N8K16_A)
        replicas = spatial(s.warps_k, 1, 1).replicated(s.warps_n)
        self.b_layout = replicas.local(1, columns, step_blocks) * batched(MMA_M16N8K16_B_NK)
        self.d_layout = warps.local(1, s.row_blocks, columns) * batched(MMA_M16N8_D)
        self.row_layout = self.d_layout.reduce((2,))
        self.sum_layout = self.d_layout.reduce((1,))

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
        """What a block does."""
        p, s, spec = self.p, self.schedule, self.spec
        self.first_block = self.tile * self.plan.row_blocks
        carried = [p.constant(0.0, "f32", self.d_layout)]
        if self.shifted and not self.plan.groups:
            carried.append(p.constant(0.0, "f32", self.sum_layout))
        self._make_views()
        if self.folded and not self.plan.groups:
            self.row_zeros = self._row_factor("zeros", spec.zero_kind or "")
        self.first, self.turn = p.block_id(1) * self.plan.rounds, self._turn()
        p.grid_launch_dependents()  # the next kernel's blocks fetch their weights as soon as they find room
        carried = self._resident(carried) if s.resident else self._stream(carried)
        total = self._whole(carried[0] if self.plan.groups else self._scale_rows(*carried))
        p.barrier()
        p.free_shared(*self.buffers)
        Epilogue(p, spec, s, self.tile).finish(total)

    def _stream(self, carried: list[Tile]) -> list[Tile]:
        """All rounds, of which a few are in flight at a time."""
        p, s = self.p, self.schedule
        with p.loop(0, self.plan.rounds, carried, stages=s.stages) as loop:
            step = self._first_step(loop.index)
            self._fetch_codes(step)
            self._copy_rest(step)
            p.commit()
            p.wait()
            p.barrier("warps", s.warps_n, async_proxy=bool(s.wgmma))
            words = partial(p.load, self.codes_buffer, (0, 0, 0), self.unit_layout)
            loop.results = self._step(loop.carried, words)
            p.barrier("warps", s.warps_n)
        return loop.carried

    def _resident(self, carried: list[Tile]) -> list[Tile]:
        """All rounds, with everything on its way at once: the codes to registers, so that blocks of two kernels have
        room side by side, and those of the next have theirs by the time x is there."""
        p, s, rounds = self.p, self.schedule, range(self.plan.rounds)
        steps = [self._first_step(i) for i in rounds]
        boundary = ("none", self.row_boundary, "none")
        words = [p.load(self.codes, (step, self.first_block, 0), self.unit_layout, boundary) for step in steps]
        for self.slot, step in enumerate(steps):
            self._copy_factors(step)
        self._fill_table()
        p.grid_wait()
        for self.slot, step in enumerate(steps):
            self._copy_x(step)
            p.commit()
        for self.slot in rounds:
            p.wait(len(rounds) - 1 - self.slot)
            p.barrier("warps", s.warps_n, async_proxy=bool(s.wgmma))
            carried = self._step(carried, lambda: words[self.slot])
        return carried

    def _first_step(self, index: Scalar | int) -> Scalar:
        """Of a round's warps."""
        index = (self.turn + index) % self.plan.rounds if self.turn else index
        return (self.first + index) * self.schedule.warps_k

    def _turn(self) -> Scalar | None:
        """By how many rounds a block starts later than the first, coming to those before at its end: all blocks read
        all of x, and if they began at the same columns, a few slices of the L2 would have all to do."""
        if self.schedule.tokens not in TURNED or self.plan.rounds == 1:
            return None
        return self.tile % self.plan.rounds

    # -- the copy side

    def _make_views(self) -> None:
        """Views of the operands by step, and the buffers they are copied to."""
        p, s, packing = self.p, self.schedule, self.packing
        steps, units = self.plan.steps, packing.chunks * packing.units * 32
        self.codes = p.global_view(p["codes"], UNIT, (steps, packing.row_blocks, self.units), (self.units, units, 1))
        self.buffers: list[Memory] = []
        if not s.resident:
            self.codes_buffer = p.alloc_shared(UNIT, (s.warps_k, self.plan.row_blocks, self.units))
            self.buffers.append(self.codes_buffer)
        self.row_boundary = "clamp" if packing.row_blocks % self.plan.row_blocks else "none"
        self.step_boundary = "none" if self.plan.covers_exactly else "zero"
        act, k, row = self.spec.act, self.spec.k, s.step_k + 8
        if s.wgmma:
            x_steps, panels = -(-k // s.step_k), s.step_k // PANEL
            self.x_buffers = self._slots(act, (s.warps_k, panels, s.tokens, PANEL), swizzle=128)
            self.x = p.global_view(p["x"], act, (x_steps, panels, -1, PANEL), (s.step_k, PANEL, k, 1), sizes=[p["m"]])
        elif self.plan.async_x:
            self.x_buffers = self._slots(act, (s.warps_k, s.tokens, s.step_k), (s.tokens * row, row, 1))
            x_steps = -(-k // s.step_k)
            self.x = p.global_view(p["x"], act, (x_steps, -1, s.step_k), (s.step_k, k, 1), sizes=[p["m"]])
        else:
            self.x_buffers = self._slots(act, (s.warps_k, s.tokens, s.step_k), (s.tokens * row, row, 1))
            self.x = p.global_view(p["x"], act, (-1, k), sizes=[p["m"]])
        self.factors: dict[str, tuple[Memory, list[Memory], str]] = {}
        if self.plan.groups:
            self._factor("scales", self.spec.scale)
            if self.spec.zero_kind:
                self._factor("zeros", self.spec.zero_kind)
        self.table: Memory | None = None
        if self.spec.dtype.kind == "table":
            self.table = p.alloc_shared("i32", DecodeTable(self.spec.dtype, self.compute).shape)
            self.buffers.append(self.table)

    def _factor(self, name: str, kind: str) -> None:
        """Scales or zeros [row blocks, groups, 16], by step."""
        p, s, packing = self.p, self.schedule, self.packing
        group, groups = packing.padded_group or 0, self.plan.groups
        element = Factors.element(kind)
        steps_per_group = max(1, group // s.step_k)
        view = p.global_view(
            p[name],
            element,
            (self.plan.steps, packing.row_blocks, groups, ROWS),
            (groups * ROWS, packing.groups * ROWS, ROWS, 1),
            (steps_per_group, 1, 1, 1),
        )
        self.factors[name] = view, self._slots(element, (s.warps_k, self.plan.row_blocks, groups, ROWS)), kind

    def _slots(
        self, element: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, swizzle: int = 0
    ) -> list[Memory]:
        """A buffer, of which `pipeline-copies` makes as many as there are stages; or one for every round."""
        count = self.plan.rounds if self.schedule.resident else 1
        buffers = [self.p.alloc_shared(element, shape, strides, swizzle) for _ in range(count)]
        self.buffers += buffers
        return buffers

    def _fetch_codes(self, step: Scalar) -> None:
        p, packing = self.p, self.packing
        units = packing.chunks * packing.units * 32
        limit = (self.units, 0, 1, units) if units % self.units else ()
        boundary = (self.step_boundary, self.row_boundary, "none")
        p.copy_async(self.codes, self.codes_buffer, (step, self.first_block, 0), self.unit_layout, boundary, limit)

    def _copy_rest(self, step: Scalar) -> None:
        """Start the other copies of a round. The weight does not depend on the kernel before, all else comes after."""
        self._copy_factors(step)
        self._fill_table()
        self.p.grid_wait()
        self._copy_x(step)

    def _copy_factors(self, step: Scalar) -> None:
        p, s, packing = self.p, self.schedule, self.packing
        for view, buffers, kind in self.factors.values():
            shape = (s.warps_k, self.plan.row_blocks, self.plan.groups, ROWS)
            vector = LANE_BYTES // BYTES[kind]
            layout = spatial(s.warps_k, 1, 1, 1) * spread((1, *shape[1:]), 32 * s.warps_n, vector)
            span = self.plan.groups * ROWS
            total = packing.groups * ROWS
            cut = (span, 0, ROWS, 1, total) if self.plan.groups > 1 and total % span else ()
            boundary = (self.step_boundary, self.row_boundary, "none", "none")
            p.copy_async(view, buffers[self.slot], (step, self.first_block, 0, 0), layout, boundary, cut)

    def _fill_table(self) -> None:
        if self.table:
            self.p.fill_table(self.table, self.spec.dtype, self.compute, self.convert.exponent)

    def _copy_x(self, step: Scalar) -> None:
        p, s, packing, buffer = self.p, self.schedule, self.packing, self.x_buffer
        warps = 32 * s.warps_n
        if s.wgmma:
            layout = spatial(s.warps_k, 1, 1, 1) * spread((1, s.step_k // PANEL, s.tokens, PANEL), warps, 8)
            limit = (s.step_k, PANEL, 0, 1, self.spec.k) if self.spec.k % s.step_k else ()
            boundary = (self.step_boundary, "none", "skip", "none")
            p.copy_async(self.x, buffer, (step, 0, 0, 0), layout, boundary, limit)
        elif self.plan.async_x:
            layout = spatial(s.warps_k, 1, 1) * spread((1, s.tokens, s.step_k), warps, 8)
            limit = (s.step_k, 0, 1, self.spec.k) if self.spec.k % s.step_k else ()
            p.copy_async(self.x, buffer, (step, 0, 0), layout, (self.step_boundary, "skip", "none"), limit)
        else:
            layout = spatial(s.warps_k, 1, 1) * spread((1, s.tokens, s.step_k), warps, 1)
            group = packing.group or 1
            p.copy_padded(self.x, buffer, (0, step), layout, group, packing.padded_group or 1)

    @property
    def x_buffer(self) -> Memory:
        return self.x_buffers[self.slot]

    # -- the compute side

    def _step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        """One step of every warp, whose codes are in `words`."""
        p, s = self.p, self.schedule
        codes = p.view(words(), self.spec.dtype, self.a_layout)
        if self.table:
            a = p.lookup(codes, self.table, self.compute)
        else:
            a = p.decode(codes, self.compute, self.convert.exponent, self.plan.biased, self._shifts())
        if s.wgmma:
            return self._warpgroup_step(carried, a)
        b = p.load_matrix(self.x_buffer, p["m"], self.b_layout)
        if not self.plan.groups:
            sums = [p.add(c, p.row_sums(b, self.sum_layout)) for c in carried[1:]]
            return [p.mma(a, b, self._unbiased(carried[0], b)), *sums]
        (total,) = carried
        width = s.step_k // self.plan.groups
        for group in range(self.plan.groups):
            a_group, b_group = (p.slice(t, 2, group * width, width) for t in (a, b))
            zero = p.constant(0.0, "f32", self.d_layout)
            if self.plan.biased:
                zero = p.bias_sums(b_group, self.spec.dtype, group * width % self.packing.chunk, self.d_layout)
            product = p.mma(a_group, b_group, zero)
            sums = partial(p.row_sums, b_group, self.sum_layout) if self.shifted else None
            total = self._add_scaled(total, product, group, sums)
        return [total]

    def _whole(self, total: Tile) -> Tile:
        """[warps_k, rows, columns] of what a warp ends with."""
        return total

    def _shifts(self) -> list[Tile]:
        """Minus integer zeros, which decoding subtracts for nothing: q - z is exact."""
        if not self.folded:
            return []
        stored = [self._group_factor("zeros", group) for group in range(self.plan.groups)] or [self.row_zeros]
        return [self.p.cast(self.convert.minus_zero(zero), self.compute) for zero in stored]

    def _warpgroup_step(self, carried: list[Tile], a: Tile) -> list[Tile]:
        """The same with x in shared memory."""
        p, s = self.p, self.schedule
        if not self.plan.groups:
            sums = [p.add(c, self._sums_of_x(0, s.step_k)) for c in carried[1:]]
            return [p.warpgroup_mma(a, self.x_buffer, 0, carried[0]), *sums]
        (total,) = carried
        width = s.step_k // self.plan.groups
        for group in range(self.plan.groups):
            start = group * width
            zero = p.constant(0.0, "f32", self.d_layout)
            weights = p.slice(a, 2, start, width)
            if self.early:
                minus = self.convert.minus_zero(self._group_factor("zeros", group))
                weights = p.add(weights, p.cast(minus, self.compute))
            if self.plan.rounds_scales:
                weights = p.mul(weights, p.cast(self._group_factor("scales", group), self.compute))
                total = p.warpgroup_mma(weights, self.x_buffer, start, total)
                continue
            product = p.warpgroup_mma(weights, self.x_buffer, start, zero)
            sums = partial(self._sums_of_x, start, width) if self.shifted else None
            total = self._add_scaled(total, product, group, sums)
        return [total]

    def _add_scaled(self, total: Tile, product: Tile, group: int, sums_of_x: Callable[[], Tile] | None) -> Tile:
        """total + s * product, and - s * z * (sums of x) where there are zeros still to be had."""
        p = self.p
        scale = self._group_factor("scales", group)
        total = p.fma(product, self.convert.unfold(scale), total)
        if sums_of_x is None:
            return total
        shift = p.mul(scale, self._minus_zero(partial(self._group_factor, "zeros", group)))
        return p.fma(shift, sums_of_x(), total)

    def _minus_zero(self, stored: Callable[[], Tile]) -> Tile:
        """What is added to codes before they are scaled."""
        if self.spec.zeros == "none":
            return self.p.constant(-self.convert.excess, "f32", self.row_layout)
        return self.convert.minus_zero(stored())

    def _sums_of_x(self, start: int, columns: int) -> Tile:
        return self.p.warpgroup_row_sums(self.x_buffer, start, columns, self.sum_layout)

    def _unbiased(self, total: Tile, b: Tile) -> Tile:
        """An accumulator for a product with b."""
        if not self.plan.biased:
            return total
        return self.p.add(total, self.p.bias_sums(b, self.spec.dtype, 0, self.d_layout))

    def _group_factor(self, name: str, group: int) -> Tile:
        """Scale or zero of every row of the tile in one group, from shared memory: [warps_k, rows, 1] in f32."""
        p, s = self.p, self.schedule
        _, buffers, kind = self.factors[name]
        shape = (s.warps_k, self.plan.row_blocks, 1, ROWS)
        loaded = p.load(buffers[self.slot], (0, 0, group, 0), self.row_layout.reshape(shape))
        return p.reshape(self.convert.as_f32(loaded, kind), self.row_layout.shape)

    def _row_factor(self, name: str, kind: str) -> Tile:
        """Scale or zero of every row of the tile, from device memory."""
        p, s, packing = self.p, self.schedule, self.packing
        element = Factors.element(kind)
        view = p.global_view(p[name], element, (s.warps_k, packing.row_blocks, ROWS), (0, ROWS, 1))
        layout = self.row_layout.reshape((s.warps_k, self.plan.row_blocks, ROWS))
        loaded = p.load(view, (0, self.first_block, 0), layout, ("none", self.row_boundary, "none"))
        return p.reshape(self.convert.as_f32(loaded, kind), self.row_layout.shape)

    def _scale_rows(self, total: Tile, *sums: Tile) -> Tile:
        """One scale per row: applied to a warp's sum, at the end."""
        p = self.p
        scale = self._row_factor("scales", self.spec.scale)
        result = p.mul(total, self.convert.unfold(scale))
        if sums:
            zero = partial(self._row_factor, "zeros", self.spec.zero_kind or "")
            shift = p.mul(scale, self._minus_zero(zero))
            result = p.fma(shift, sums[0], result)
        return result


def skinny(spec: MatmulSpec, schedule: Schedule) -> Any:
    """The tile program of a matmul, in a module of its own."""
    return Kernel(spec, schedule).build()
