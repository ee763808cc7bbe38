"""What sums or weights of groups are multiplied by, computed once per step: numbers of a warp in shared memory.

In the layout of an mma's sums, a lane wants the scales of two rows, and so do three others: where scales are codes, all
four would compute the same numbers. Here the lanes of a warp share the work: each computes those of a few groups and
rows of its own. Then a lane reads, at once, what it needs of a few groups: 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout, replicated, spatial
from lowbit.passes.builder import Memory, Program, Tile
from lowbit.passes.kernels.decode.plan import KernelPlan

_AT_ONCE = 16  # bytes of an access


class StepFactors:
    """The numbers of one step [warps_k, row blocks, groups / inner, 16, inner], by name, where an access has those of
    `inner` groups of a row."""

    def __init__(self, p: Program, plan: KernelPlan, row_layout: Layout, element: str) -> None:
        """element: of the numbers. In f32 they are for sums, else for weights."""
        s, self.p, self._element = plan.schedule, p, element
        self._inner = math.gcd(_AT_ONCE // ELEMENTS[element].bytes, plan.groups)
        self._shape = (s.warps_k, plan.row_blocks, plan.groups // self._inner, ROWS, self._inner)
        warps = spatial(s.warps_k, s.warps_n, 1, 1).local(1, s.row_blocks, 1, 1)
        self.layout = warps * _shares(plan, self._inner)
        by_access = self.layout.reshape((*self._shape[:3], self._inner, ROWS))
        self._stored = by_access.permute((0, 1, 2, 4, 3))
        self._of_row = row_layout.reshape((*self._shape[:2], 1, ROWS, 1)).local(1, 1, 1, 1, self._inner)
        self._row_shape = row_layout.shape
        self.buffers: dict[str, Memory] = {}
        self._read: dict[tuple[str, int], Tile] = {}

    def allocate(self, names: Sequence[str]) -> list[Memory]:
        self.buffers = {name: self.p.alloc_shared(self._element, self._shape) for name in names}
        return list(self.buffers.values())

    def rows_first(self, numbers: Tile) -> Tile:
        """Numbers in `layout` as they are stored, with rows in the last dim but one."""
        return self.p.view(numbers, "f32", self._stored)

    def fill(self, numbers: Callable[[], dict[str, Tile]]) -> None:
        """Stores the numbers of a step, when all lanes have read those of the last."""
        p = self.p
        p.barrier("warps", 1)
        for name, tile in numbers().items():
            p.store(p.cast(tile, self._element), self.buffers[name], (0,) * 5)
        p.barrier("warps", 1)
        self._read.clear()

    def load(self, name: str, group: int) -> Tile:
        """The number of every row of the tile for one group: [warps_k, rows, 1]."""
        p, first = self.p, group // self._inner
        if (name, first) not in self._read:
            self._read[name, first] = p.load(self.buffers[name], (0, 0, first, 0, 0), self._of_row)
        one = p.slice(self._read[name, first], 4, group % self._inner, 1)
        return p.reshape(one, self._row_shape)


def _shares(plan: KernelPlan, inner: int) -> Layout:
    """Returns which groups and rows a lane computes: such that it needs few numbers of a second level, those of one row
    or, where all 16 rows share them, those of few groups. Raw codes have another power of two eight rows below.

    inner: groups of an access, which lanes share out or have several of
    """
    bilevel, groups = plan.spec.bilevel, plan.groups
    parts = groups if groups & (groups - 1) == 0 else groups // inner
    if plan.raw_codes or (bilevel and bilevel.rows == ROWS):
        lanes = math.gcd(4, parts)
        rows = replicated(4 // lanes, 4).spatial(1, 1, lanes, 1).local(1, 1, 1, 2).spatial(1, 1, 1, 8)
    else:
        lanes = math.gcd(2, parts)
        rows = replicated(2 // lanes, 4).spatial(1, 1, lanes, ROWS)
    return rows.local(1, 1, groups // lanes, 1)
