"""Scales, zeros and offsets of groups as f32, from the buffers of a stage, with the second level of codes."""

from __future__ import annotations

import math
from collections.abc import Hashable

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout, local, replicated, spatial
from lowbit.passes.builder import Memory, Tile
from lowbit.passes.kernels.scales.staged_scales import StagedScales
from lowbit.passes.kernels.streaming.block import Block


class GroupScales:
    """Reads scales, zeros and offsets of the stage that a block is at."""

    def __init__(self, block: Block, staged: StagedScales) -> None:
        self.block, self.p, self.plan, self.staged, self.convert = block, block.p, block.plan, staged, block.convert
        self._blocks_read: dict[Hashable, Tile] = {}
        self._ready: dict[str, Memory] = {}
        if self.plan.scales.shares_second_level:
            shape = (block.schedule.warps_k, self.plan.steps.row_blocks, self.plan.steps.blocks)
            self._ready = {name: block.alloc("f32", shape) for name in staged.of_blocks}
            self.convert.multiplied = True

    def fill(self) -> None:
        """Computes what all rows of a block share, for this step: each lane a part of it."""
        p, convert = self.p, self.convert
        if not self._ready:
            return
        layout = self._by_lane()
        read = {name: self._as_f32(name, 0, layout) for name in self._ready}
        for tile in read.values():  # all on their way before the first is waited for
            p.materialize(tile)
        p.barrier("warps", 1)
        for role in ("scale", "zero"):
            scale, zero = (f"{role}_{number}" for number in ("scales", "zeros"))
            p.store(read[scale], self._ready[scale], (0, 0, 0))
            p.store(convert.minus_product(read[scale], read[zero]), self._ready[zero], (0, 0, 0))
        p.barrier("warps", 1)
        self._blocks_read.clear()

    def _by_lane(self) -> Layout:
        """Numbers of a step [warps_k, row blocks, blocks], as the lanes of a warp share them out."""
        s, blocks = self.plan.schedule, self.plan.steps.blocks
        across = min(blocks, 32)
        side = math.gcd(s.row_blocks, 32 // across)
        warps = spatial(s.warps_k, s.warps_n, 1).local(1, s.row_blocks // side, blocks // across)
        return warps * (replicated(32 // (across * side), 3) * spatial(1, side, across))

    def _as_f32(self, name: str, first: int, layout: Layout) -> Tile:
        tensor = self.staged.of_blocks[name]
        return self.convert.as_f32(tensor.load((0, 0, first), layout), tensor.slot.storage)

    def load(self, name: str, group: int, layout: Layout) -> Tile:
        """Numbers of the groups of a step from `group` on: [warps_k, row blocks, groups, 16] in a layout of this
        shape."""
        p, bilevel = self.p, self.plan.spec.bilevel
        slot = self.plan.spec.slot(name)
        tensor = self.staged.of_groups[slot.tensor]
        warps, row_blocks, groups, _ = layout.shape
        blocks = max(1, groups // bilevel.groups) if bilevel else 1
        by_block = (warps, row_blocks, blocks, groups // blocks, ROWS)
        loaded = p.reshape(tensor.load((0, 0, group, 0), layout), by_block)

        def of_blocks(name: str, bilevel: Bilevel) -> Tile:
            return self._of_blocks(name, group // bilevel.groups, loaded.layout, bilevel)

        return p.reshape(self.convert.two_level(slot, loaded, of_blocks), layout.shape)

    def _of_blocks(self, name: str, block: int, layout: Layout, bilevel: Bilevel) -> Tile:
        """Numbers of the second level from a block on, for codes [warps_k, row blocks, blocks, groups, 16]: the same
        shape with one group, and one row if all rows share a number. They are read once for all groups of a block."""
        p, of_rows = self.p, layout.reduce((3,) if bilevel.rows == 1 else (3, 4))
        key = self.block.slot, name, block, of_rows
        if key not in self._blocks_read:
            lanes = self.staged.of_blocks[name].slot.shape[2]
            copies = of_rows * local(1, 1, 1, 1, lanes // of_rows.shape[4])
            *outer, blocks, _, rows = copies.shape
            flat = copies.reshape((*outer, blocks * rows))
            if self._ready:
                loaded = p.load(self._ready[name], (0, 0, block * lanes), flat)
            else:
                loaded = self._as_f32(name, block * lanes, flat)
            numbers = p.reshape(loaded, copies.shape)
            if rows > of_rows.shape[4]:
                numbers = p.slice(numbers, 4, 0, 1)
            self._blocks_read[key] = numbers
        return self._blocks_read[key]
