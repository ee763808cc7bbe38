"""How a panel is cut where a group of the weight ends. No MLIR is needed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.passes.kernels.persistent.plan import PersistentPlan


@dataclass(frozen=True)
class GroupColumns:
    """Columns of a panel that have one scale, or are one product.

    start     first column in the panel
    width     columns
    group     the group, counted in the round; 0 where there is one scale per row
    """

    start: int
    width: int
    group: int


def groups_of_panel(plan: PersistentPlan, panel: int) -> Iterator[GroupColumns]:
    """Yields the columns of a round's panel by group, in order."""
    size = plan.round.step // max(1, plan.scaling.groups)  # columns of a group in the round
    width = plan.schedule.panel_k
    first, end = panel * width, (panel + 1) * width
    while first < end:
        group = first // size
        last = min(end, (group + 1) * size)
        yield GroupColumns(first % width, last - first, group)
        first = last
