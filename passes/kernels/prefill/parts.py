"""How a panel is cut where a group of the weight ends. No MLIR is needed here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.passes.kernels.prefill.plan import PrefillPlan


@dataclass(frozen=True)
class Part:
    """Columns of a panel that have one scale.

    start     first column in the panel
    width     columns
    group     the group, counted in the round; 0 where there is one scale per row
    """

    start: int
    width: int
    group: int


def parts_of_panel(plan: PrefillPlan, panel: int) -> Iterator[Part]:
    """The parts of a round's panel, in order."""
    size = plan.step // max(1, plan.groups)  # columns of a group in the round
    width = plan.schedule.panel_k
    first, end = panel * width, (panel + 1) * width
    while first < end:
        group = first // size
        last = min(end, (group + 1) * size)
        yield Part(first % width, last - first, group)
        first = last
