"""What can be said of a table of schedules: is it out of date (`stale`), and how good is what a matmul gets that is
not in it (`first_calls`)?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.scheduling.choice import choose
from lowbit.passes.scheduling.tables import Entry, Key, Table
from lowbit.passes.target import Target
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import Failed
from lowbit.pylib.tune.session import LONG, Measures, Submit

GOOD = 1.10  # times the best known time is a good first call


def problem(key: Key) -> Problem:
    return Problem(key.spec, key.tokens)


def stale(table: Table, submit: Submit) -> list[Entry]:
    """The entries whose schedule makes another kernel today, or none; needs no GPU."""
    compiling = [(entry, submit(problem(entry.key), entry.schedule)) for entry in table.entries.values()]
    found: list[Entry] = []
    for entry, future in compiling:
        try:
            if future.result() != entry.kernel:
                found.append(entry)
        except Failed:
            found.append(entry)
    return found


@dataclass(frozen=True)
class FirstCall:
    """What a matmul would get if its own entry were not there, and what that costs. Microseconds, measured side by
    side; inf for what can't run."""

    entry: Entry
    schedule: Schedule
    time: float
    best: float  # with the entry's schedule

    @property
    def ratio(self) -> float:
        """To the best that is known."""
        return self.time / min(self.time, self.best) if math.isfinite(self.time) else math.inf


def first_calls(table: Table, target: Target, gpu: Measures, submit: Submit) -> Iterator[FirstCall]:
    """Every entry left out in turn. The most trusted table is this one; no other is asked."""
    entries = sorted(table.entries.values(), key=lambda e: (str(replace(e.key, tokens=1)), e.key.tokens))
    work: list[tuple[Entry, Schedule]] = []
    for entry in entries:
        others = {key: other for key, other in table.entries.items() if key != entry.key}
        without = Table(table.gpu, table.capability, table.made, others)
        work.append((entry, choose(entry.key.spec, entry.key.tokens, target, [without])))
    compiling = [[submit(problem(e.key), s) for s in dict.fromkeys((e.schedule, first))] for e, first in work]

    for (entry, first), futures in zip(work, compiling):
        times: dict[Schedule, float] = {}
        for schedule, future in zip(dict.fromkeys((entry.schedule, first)), futures):
            try:
                future.result()
                times[schedule] = gpu.time(problem(entry.key), schedule, LONG)
            except Failed:
                times[schedule] = math.inf
        yield FirstCall(entry, first, times[first], times[entry.schedule])


def summary(calls: Sequence[FirstCall]) -> str:
    """In a line."""
    ratios = [call.ratio for call in calls]
    good = sum(ratio <= GOOD for ratio in ratios)
    return (
        f"first calls: {good} of {len(ratios)} within {GOOD - 1:.0%} of the best known; "
        f"mean {statistics.mean(ratios):.3f}, worst {max(ratios):.3f}"
    )
