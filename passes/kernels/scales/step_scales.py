"""Scales of all groups of a step, and the offsets that go with them, which a warp computes once in shared memory.

In the layout of an mma's sums, a lane wants the scales of two rows, and so do three others: where scales are codes, all
four would compute the same numbers. Here the lanes of a warp share the work: each computes those of a few groups and
rows of its own. Then a lane reads, at once, what it needs of up to four groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout, replicated, spatial
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.plan import KernelPlan

_AT_ONCE = 4  # groups: of more, weights take registers that more warps could have


class StepScales:
    """The scales, and offsets, of one step [warps_k, row blocks, groups / inner, 16, kinds, inner], where an access has
    those of `inner` groups of a row, of either kind."""

    def __init__(self, block: Block, row_layout: Layout, element: str) -> None:
        """element: of the numbers. In f32 they are for sums, else for weights."""
        plan, s, self.p, self._element = block.plan, block.schedule, block.p, element
        self._kinds, groups = plan.arithmetic.step_scales, plan.steps.groups
        self._inner = math.gcd(_AT_ONCE, groups)
        blocks = s.warps_k, plan.steps.row_blocks
        warps = spatial(s.warps_k, s.warps_n, 1, 1).local(1, s.row_blocks, 1, 1)
        self.layout = warps * _shares(plan, self._inner)
        by_access = self.layout.reshape((*blocks, groups // self._inner, self._inner, ROWS))
        self._stored = by_access.permute((0, 1, 2, 4, 3))
        self._row_shape = row_layout.shape
        self._of_row = row_layout.reshape((*blocks, 1, ROWS, 1, 1)).local(1, 1, 1, 1, len(self._kinds), self._inner)
        *outer, inner = self._stored.shape
        self.buffer = block.alloc(element, (*outer, len(self._kinds), inner))
        self._read: dict[int, Tile] = {}

    def rows_first(self, numbers: Tile) -> Tile:
        """Numbers in `layout` as they are stored, with rows in the last dim but one."""
        return self.p.view(numbers, "f32", self._stored)

    def fill(self, numbers: Callable[[], dict[str, Tile]]) -> None:
        """Stores the numbers of a step, when all lanes have read those of the last."""
        p, (*outer, inner) = self.p, self._stored.shape
        p.barrier("warps", 1)
        for kind, tile in numbers().items():
            of_kind = p.reshape(p.cast(tile, self._element), (*outer, 1, inner))
            p.store(of_kind, self.buffer, (0, 0, 0, 0, self._kinds.index(kind), 0))
        p.barrier("warps", 1)
        self._read.clear()

    def load(self, kind: str, group: int) -> Tile:
        """The scale or offset of every row of the tile for one group: [warps_k, rows, 1]."""
        p, first = self.p, group // self._inner
        if first not in self._read:
            self._read[first] = p.load(self.buffer, (0, 0, first, 0, 0, 0), self._of_row)
        of_kind = p.slice(self._read[first], 4, self._kinds.index(kind), 1)
        return p.reshape(p.slice(of_kind, 5, group % self._inner, 1), self._row_shape)


def _shares(plan: KernelPlan, inner: int) -> Layout:
    """Returns which groups and rows a lane computes: such that it needs few numbers of a second level, those of one row
    or, where all 16 rows share them, those of few groups. Raw codes have another power of two eight rows below.

    inner: groups of an access, which lanes share out or have several of
    """
    bilevel, groups = plan.spec.bilevel, plan.steps.groups
    parts = groups if groups & (groups - 1) == 0 else groups // inner
    if plan.arithmetic.raw_codes or (bilevel and bilevel.rows == ROWS):
        lanes = math.gcd(4, parts)
        rows = replicated(4 // lanes, 4).spatial(1, 1, lanes, 1).local(1, 1, 1, 2).spatial(1, 1, 1, 8)
    else:
        lanes = math.gcd(2, parts)
        rows = replicated(2 // lanes, 4).spatial(1, 1, lanes, ROWS)
    return rows.local(1, 1, groups // lanes, 1)
