"""What sums of groups are multiplied by, computed once per step: f32 numbers of a warp in shared memory.

In the layout of an mma's sums, a lane wants the scales of two rows, and so do three others: where scales are codes, all
four would compute the same numbers. Here the lanes of a warp share the work: each computes those of a few groups and
rows of its own. Then a lane reads, at once, what it needs of up to four groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout, replicated, spatial
from lowbit.passes.builder import Memory, Program, Tile
from lowbit.passes.kernels.decode.plan import KernelPlan

_AT_ONCE = 4  # groups: numbers of a 16-byte access


class StepFactors:
    """The numbers of one step [warps_k, row blocks, groups / 4, 16, 4, copies], by name."""

    def __init__(self, p: Program, plan: KernelPlan, row_layout: Layout, element: str) -> None:
        """element: of the numbers. In f32 they are for sums; else for weights, and stand there twice, as weights are
        scaled two at a time."""
        s, self.p, self._element = plan.schedule, p, element
        self._copies = 1 if element == "f32" else 2
        self._inner = min(_AT_ONCE, plan.groups)
        outer = plan.groups // self._inner
        self._shape = (s.warps_k, plan.row_blocks, outer, ROWS, self._inner)
        lanes = min(4, outer)  # beside those of eight rows
        warps = spatial(s.warps_k, s.warps_n, 1, 1).local(1, s.row_blocks, outer // lanes, 1)
        shares = replicated(4 // lanes, 4).spatial(1, 1, lanes, 1).local(1, 1, 1, 2).spatial(1, 1, 1, 8)
        self.layout = (warps * shares).local(1, 1, self._inner, 1)
        by_four = self.layout.reshape((*self._shape[:3], self._inner, ROWS))
        self._stored = by_four.permute((0, 1, 2, 4, 3))
        read = row_layout.reshape((*self._shape[:2], 1, ROWS, 1)).local(1, 1, 1, 1, self._inner)
        self._of_row = read.reshape((*read.shape, 1)).local(1, 1, 1, 1, 1, self._copies)
        self._rows = row_layout.shape[:2]
        self.buffers: dict[str, Memory] = {}
        self._read: dict[tuple[str, int], Tile] = {}

    def allocate(self, names: Sequence[str]) -> list[Memory]:
        shape = (*self._shape, self._copies)
        self.buffers = {name: self.p.alloc_shared(self._element, shape) for name in names}
        return list(self.buffers.values())

    def rows_first(self, numbers: Tile) -> Tile:
        """Numbers in `layout` as they are stored, with rows in the last dim but one."""
        return self.p.view(numbers, "f32", self._stored)

    def fill(self, numbers: Callable[[], dict[str, Tile]]) -> None:
        """Stores the numbers of a step, when all lanes have read those of the last."""
        p = self.p
        p.barrier("warps", 1)
        for name, tile in numbers().items():
            one = p.reshape(tile, (*self._shape, 1))
            ones = p.constant(1.0, "f32", one.layout.local(1, 1, 1, 1, 1, self._copies))
            p.store(p.cast(p.mul(one, ones), self._element), self.buffers[name], (0,) * 6)
        p.barrier("warps", 1)
        self._read.clear()

    def load(self, name: str, group: int) -> Tile:
        """The number of every row of the tile for one group: [warps_k, rows, 1, copies]."""
        p, first = self.p, group // self._inner
        if (name, first) not in self._read:
            self._read[name, first] = p.load(self.buffers[name], (0, 0, first, 0, 0, 0), self._of_row)
        one = p.slice(self._read[name, first], 4, group % self._inner, 1)
        return p.reshape(one, (*self._rows, 1, self._copies))
