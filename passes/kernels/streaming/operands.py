"""The copy side of the matmul kernel: views of the operands by step, the buffers they are copied to, and the copies."""

from __future__ import annotations

import math

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.layouts.layout import spatial
from lowbit.dialect.types import UNIT
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.scales_zeros import ScalesZeros
from lowbit.passes.kernels.streaming.outliers import outliers_of
from lowbit.passes.kernels.streaming.plan import KernelPlan


class Operands:
    """The operands of a block, for the rows from row block `first_block` on.

    buffers       all in shared memory, to be freed after the loop
    slot          of the buffers for x, scales and zeros: kernels with preloaded weights have one for every round
    scales_zeros  by the name of the tensor: scales, zeros and offsets [row blocks, groups, 16], their buffers and slots
    second_level  the same for scales, zeros and offsets that are codes: [row blocks, blocks of groups x lanes]
    table         of a format that has one
    outliers      how those of this block are multiplied
    """

    def __init__(self, p: Program, plan: KernelPlan, first_block: Scalar) -> None:
        self.p, self.plan, self.first_block = p, plan, first_block
        self.spec, self.schedule, self.packing = spec, s, packing = plan.spec, plan.schedule, plan.spec.packing
        self.slot = 0
        self.units = s.step_k // packing.chunk * packing.units * 32
        warps = spatial(s.warps_k, s.warps_n, 1)
        self.unit_layout = warps.local(1, s.row_blocks, self.units // 32).spatial(1, 1, 32)
        steps, units = self.plan.steps, packing.chunks * packing.units * 32
        self.codes = p.global_view(p["codes"], UNIT, (steps, packing.row_blocks, self.units), (self.units, units, 1))
        self.buffers: list[Memory] = []
        self.outliers = outliers_of(p, plan, first_block, self.buffers)
        self.outliers.alloc_beside(None if s.preload_weights else self._alloc_codes(), self.buffers)
        self.row_boundary = "clamp" if packing.row_blocks % self.plan.row_blocks else "none"
        self.step_boundary = "none" if self.plan.covers_exactly else "zero"
        self._view_x()
        self.scales_zeros: dict[str, tuple[Memory, list[Memory], TensorSlot]] = {}
        self.second_level: dict[str, tuple[Memory, list[Memory], TensorSlot]] = {}
        if self.plan.groups:
            for slot in spec.tensors:
                if slot.index == "group":
                    self._view_factor(slot)
                elif slot.index == "block":
                    self._view_second_level(slot)
        self.table: Memory | None = None
        self._compute = compute_element(spec.dtype, spec.act)
        if spec.dtype.kind == "table":
            self.table = p.alloc_shared("i32", DecodeTable(spec.dtype, self._compute).shape)
            self.buffers.append(self.table)

    def _alloc_codes(self) -> Memory:
        """Allocates and returns the buffer of codes, which preloaded weights do without."""
        s = self.schedule
        self.codes_buffer = self.p.alloc_shared(UNIT, (s.warps_k, self.plan.row_blocks, self.units))
        self.buffers.append(self.codes_buffer)
        return self.codes_buffer

    def _view_x(self) -> None:
        p, s, act, k, panel = self.p, self.schedule, self.spec.x.operand, self.spec.k, self.spec.x.per_panel
        row = s.step_k + self.spec.x.per_vector
        if s.wgmma:
            x_steps, panels = -(-k // s.step_k), s.step_k // panel
            self.x_buffers = self._slots(act, (s.warps_k, panels, s.tokens, panel), swizzle=128)
            self.x = p.global_view(p["x"], act, (x_steps, panels, -1, panel), (s.step_k, panel, k, 1), sizes=[p["m"]])
        elif self.plan.async_x:
            self.x_buffers = self._slots(act, (s.warps_k, s.tokens, s.step_k), (s.tokens * row, row, 1))
            x_steps = -(-k // s.step_k)
            self.x = p.global_view(p["x"], act, (x_steps, -1, s.step_k), (s.step_k, k, 1), sizes=[p["m"]])
        else:
            self.x_buffers = self._slots(act, (s.warps_k, s.tokens, s.step_k), (s.tokens * row, row, 1))
            self.x = p.global_view(p["x"], act, (-1, k), sizes=[p["m"]])

    def _view_factor(self, slot: TensorSlot) -> None:
        """Scales, zeros or offsets [row blocks, groups, 16], by step."""
        p, s, packing = self.p, self.schedule, self.packing
        group, groups = packing.padded_group or 0, self.plan.groups
        element = ScalesZeros.element(slot.storage)
        steps_per_group = max(1, group // s.step_k)
        view = p.global_view(
            p[slot.name],
            element,
            (self.plan.steps, packing.row_blocks, groups, ROWS),
            (groups * ROWS, packing.groups * ROWS, ROWS, 1),
            (steps_per_group, 1, 1, 1),
        )
        buffers = self._slots(element, (s.warps_k, self.plan.row_blocks, groups, ROWS))
        self.scales_zeros[slot.name] = view, buffers, slot

    def _view_second_level(self, slot: TensorSlot) -> None:
        """Numbers of blocks of groups [row blocks, blocks x lanes], by step."""
        p, s, packing = self.p, self.schedule, self.packing
        _, blocks, lanes = slot.shape
        width = self.plan.blocks * lanes
        element = ScalesZeros.element(slot.storage)
        view = p.global_view(
            p[slot.name],
            element,
            (self.plan.steps, packing.row_blocks, width),
            (width, blocks * lanes, 1),
            (self.plan.steps_per_block, 1, 1),
        )
        buffers = self._slots(element, (s.warps_k, self.plan.row_blocks, width))
        self.second_level[slot.name] = view, buffers, slot

    def _slots(
        self, element: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, swizzle: int = 0
    ) -> list[Memory]:
        """A buffer, of which `pipeline-copies` makes as many as there are stages; or one for every round."""
        count = self.plan.rounds if self.schedule.preload_weights else 1
        buffers = [self.p.alloc_shared(element, shape, strides, swizzle) for _ in range(count)]
        self.buffers += buffers
        return buffers

    @property
    def x_buffer(self) -> Memory:
        return self.x_buffers[self.slot]

    def copy_codes(self, step: Scalar) -> None:
        """Copy codes of a step to shared memory."""
        p, packing = self.p, self.packing
        units = packing.chunks * packing.units * 32
        limit = (self.units, 0, 1, units) if units % self.units else ()
        boundary = (self.step_boundary, self.row_boundary, "none")
        p.copy_async(self.codes, self.codes_buffer, (step, self.first_block, 0), self.unit_layout, boundary, limit)

    def copied_codes(self) -> Tile:
        """Returns the codes that `copy_codes` brought."""
        return self.p.load(self.codes_buffer, (0, 0, 0), self.unit_layout)

    def load_codes(self, step: Scalar) -> Tile:
        """Returns codes of a step, loaded from device memory to registers."""
        boundary = ("none", self.row_boundary, "none")
        return self.p.load(self.codes, (step, self.first_block, 0), self.unit_layout, boundary)

    def copy_scales_zeros(self, step: Scalar) -> None:
        """Scales, zeros and offsets of groups."""
        p, s, packing = self.p, self.schedule, self.packing
        for view, buffers, slot in self.scales_zeros.values():
            shape = (s.warps_k, self.plan.row_blocks, self.plan.groups, ROWS)
            vector = ELEMENTS[slot.storage].per_vector
            layout = spatial(s.warps_k, 1, 1, 1) * copy_layout((1, *shape[1:]), 32 * s.warps_n, vector)
            span = self.plan.groups * ROWS
            total = packing.groups * ROWS
            cut = (span, 0, ROWS, 1, total) if self.plan.groups > 1 and total % span else ()
            boundary = (self.step_boundary, self.row_boundary, "none", "none")
            p.copy_async(view, buffers[self.slot], (step, self.first_block, 0, 0), layout, boundary, cut)
        for view, buffers, slot in self.second_level.values():
            _, blocks, lanes = slot.shape
            width, total = self.plan.blocks * lanes, blocks * lanes
            vector = math.gcd(width, ELEMENTS[slot.storage].per_vector)
            layout = spatial(s.warps_k, 1, 1) * copy_layout((1, self.plan.row_blocks, width), 32 * s.warps_n, vector)
            cut = (width, 0, 1, total) if self.plan.blocks > 1 and total % width else ()
            boundary = (self.step_boundary, self.row_boundary, "none")
            p.copy_async(view, buffers[self.slot], (step, self.first_block, 0), layout, boundary, cut)

    def fill_table(self) -> None:
        if self.table:
            t = self.spec.dtype
            self.p.fill_table(self.table, t, self._compute, exponent(t, self._compute))

    def copy_x(self, step: Scalar) -> None:
        p, s, packing, buffer = self.p, self.schedule, self.packing, self.x_buffer
        warps, vector, panel = 32 * s.warps_n, self.spec.x.per_vector, self.spec.x.per_panel
        if s.wgmma:
            layout = spatial(s.warps_k, 1, 1, 1) * copy_layout((1, s.step_k // panel, s.tokens, panel), warps, vector)
            limit = (s.step_k, panel, 0, 1, self.spec.k) if self.spec.k % s.step_k else ()
            boundary = (self.step_boundary, "none", "skip", "none")
            p.copy_async(self.x, buffer, (step, 0, 0, 0), layout, boundary, limit)
        elif self.plan.async_x:
            layout = spatial(s.warps_k, 1, 1) * copy_layout((1, s.tokens, s.step_k), warps, vector)
            limit = (s.step_k, 0, 1, self.spec.k) if self.spec.k % s.step_k else ()
            p.copy_async(self.x, buffer, (step, 0, 0), layout, (self.step_boundary, "skip", "none"), limit)
        else:
            layout = spatial(s.warps_k, 1, 1) * copy_layout((1, s.tokens, s.step_k), warps, 1)
            group = packing.group or 1
            p.copy_padded(self.x, buffer, (0, step), layout, group, packing.padded_group or 1)
