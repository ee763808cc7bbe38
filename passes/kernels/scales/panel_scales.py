"""What the weights of a panel are multiplied by, and what is added to them, where scales are codes: computed once by a
warp, in shared memory.

In the layout of fragments four lanes have the same rows, and each would compute the same numbers. Here the lanes of a
warp share the work, while the panel before is multiplied, and each reads what it needs: a number of four groups at a
time.
"""

from __future__ import annotations

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import spatial
from lowbit.passes.builder import Program, Tile
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.scaling import GROUPS_AT_ONCE
from lowbit.passes.kernels.persistent.schedule import WARPS
from lowbit.passes.kernels.scales.round_scales import RoundScales


class PanelScales:
    """The numbers of one panel [warps, groups / 4, 16, names, 4], in x's type: `Scaling.panel_numbers`."""

    def __init__(self, p: Program, plan: PersistentPlan, scales: RoundScales) -> None:
        self.p, self.spec, self.scaling, self.scales = p, plan.spec, plan.scaling, scales
        names, accesses = len(plan.scaling.panel_numbers), plan.scaling.panel_groups // GROUPS_AT_ONCE
        self._layout = spatial(WARPS, 1, 1).local(1, accesses, 2).spatial(1, GROUPS_AT_ONCE, ROWS // 2)
        self._stored = self._layout.reshape((WARPS, accesses, GROUPS_AT_ONCE, ROWS)).permute((0, 1, 3, 2))
        by_access = scales.row_layout.reshape((WARPS, 1, ROWS, 1, 1))
        self._of_row = by_access.local(1, 1, 1, names, GROUPS_AT_ONCE)
        self._buffer = p.alloc_shared(plan.spec.act, (WARPS, accesses, ROWS, names, GROUPS_AT_ONCE))
        self._read: dict[int, Tile] = {}

    def fill(self, panel: int) -> None:
        """Computes the numbers of a panel of the round that `scales` are at, when lanes have read the last one's."""
        p, (*outer, inner) = self.p, self._stored.shape
        p.barrier("warps", 1)
        for i, tile in enumerate(self._numbers(panel * self.scaling.panel_groups)):
            stored = p.view(tile, self.spec.act, self._stored)
            p.store(p.reshape(stored, (*outer, 1, inner)), self._buffer, (0, 0, 0, i, 0))
        p.barrier("warps", 1)
        self._read.clear()

    def _numbers(self, first: int) -> list[Tile]:
        """Scales as sums of two numbers of x's type, and what is added, of the groups of a round from `first` on."""
        p, spec, scales = self.p, self.spec, self.scales
        scale = scales.of_groups("scales", first, self._layout)
        numbers = list(scales.in_two(scale))
        if spec.zeros == "float":
            zero = scales.of_groups("zeros", first, self._layout)
            numbers.append(p.cast(p.mul(scale, scales.convert.minus_zero(zero)), spec.act))
        elif spec.zeros == "offset":
            numbers.append(p.cast(scales.of_groups("offsets", first, self._layout), spec.act))
        return numbers

    def number(self, name: str, group: int) -> Tile:
        """A number of every row [rows, 1], of a group of the panel."""
        p, access = self.p, group // GROUPS_AT_ONCE
        if access not in self._read:
            self._read[access] = p.load(self._buffer, (0, access, 0, 0, 0), self._of_row)
        of_name = p.slice(self._read[access], 3, self.scaling.panel_numbers.index(name), 1)
        return p.reshape(p.slice(of_name, 4, group % GROUPS_AT_ONCE, 1), self.scales.row_layout.shape)
