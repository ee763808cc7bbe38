"""Scales, zeros and offsets of groups on their way to shared memory, and the second level of those that are codes."""

from __future__ import annotations

import math

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.builder import Scalar, Tile
from lowbit.passes.kernels.copy_layout import copy_layout
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.kernels.streaming.block import Block


class StagedScales:
    """The tensors of a block that have a number for every group or block of groups, by name.

    of_groups  scales, zeros and offsets [row blocks, groups, 16]
    of_blocks  their second level [row blocks, blocks of groups x lanes]
    """

    def __init__(self, block: Block) -> None:
        self.of_groups: dict[str, StagedTensor] = {}
        self.of_blocks: dict[str, StagedTensor] = {}
        for slot in block.spec.tensors if block.plan.steps.groups else ():
            if slot.index == "group":
                self.of_groups[slot.name] = _of_groups(block, slot)
            elif slot.index == "block":
                self.of_blocks[slot.name] = _of_blocks(block, slot)

    def copy(self, step: Scalar) -> None:
        """Starts to copy all numbers of a step."""
        for tensor in (*self.of_groups.values(), *self.of_blocks.values()):
            tensor.copy(step)


class StagedTensor:
    """One tensor, by step: [steps, row blocks, ...]."""

    def __init__(
        self,
        block: Block,
        slot: TensorSlot,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        steps: int,
        cut: tuple[int, ...],
    ) -> None:
        """shape, strides: of the numbers of a row block in a step, the strides with those of steps and row blocks in
        front; steps: how many share them; cut: where a step may end behind the last of them."""
        self.block, self.slot, self.cut = block, slot, cut
        p, plan, ones = block.p, block.plan, (1,) * len(shape)
        element = ScaleConversion.element(slot.storage)
        sizes = (plan.steps.count, block.spec.packing.row_blocks, *shape)
        self.view = p.global_view(p[slot.name], element, sizes, strides, (steps, 1, *ones))
        self.shape = (block.schedule.warps_k, plan.steps.row_blocks, *shape)
        self.buffers = block.alloc_stage(element, self.shape)

    def copy(self, step: Scalar) -> None:
        """Starts to copy the numbers of a step."""
        block, (warps_k, *shape) = self.block, self.shape
        vector = math.gcd(shape[-1], ELEMENTS[self.slot.storage].per_vector)
        ones = (1,) * len(shape)
        layout = spatial(warps_k, *ones) * copy_layout((1, *shape), 32 * block.schedule.warps_n, vector)
        boundary = (block.step_boundary, block.work.row_boundary, *("none" for _ in ones[1:]))
        first = (step, block.work.first_block, *(0 for _ in ones[1:]))
        block.p.copy_async(self.view, self.buffers[block.slot], first, layout, boundary, self.cut)

    def load(self, first: tuple[int, ...], layout: Layout) -> Tile:
        """Loads numbers of the stage, from a place on."""
        return self.block.p.load(self.buffers[self.block.slot], first, layout)


def _of_groups(block: Block, slot: TensorSlot) -> StagedTensor:
    packing, groups = block.spec.packing, block.plan.steps.groups
    span, total = groups * ROWS, packing.groups * ROWS
    shared_by = max(1, (packing.padded_group or 0) // block.schedule.step_k)
    cut = (span, 0, ROWS, 1, total) if groups > 1 and total % span else ()
    return StagedTensor(block, slot, (groups, ROWS), (span, total, ROWS, 1), shared_by, cut)


def _of_blocks(block: Block, slot: TensorSlot) -> StagedTensor:
    _, blocks, lanes = slot.shape
    width, total = block.plan.steps.blocks * lanes, blocks * lanes
    cut = (width, 0, 1, total) if block.plan.steps.blocks > 1 and total % width else ()
    return StagedTensor(block, slot, (width,), (width, total, 1), block.plan.steps.per_block, cut)
