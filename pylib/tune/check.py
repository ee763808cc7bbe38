"""Checks a table of schedules. `stale` finds entries that are out of date. `first_calls` and `first_calls_of_unknown`
measure how good the schedule is that a matmul without an entry gets: of the table's matmuls, each left out in turn, or
of others."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import date
from typing import Any

from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.scheduling.choice import choose, schedule_for
from lowbit.passes.scheduling.tables import Entry, Key, Table, spelled_out
from lowbit.passes.target import Target
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import Failed
from lowbit.pylib.tune.session import LONG, Measures, Submit, Tuner

GOOD = 1.10  # times the best known time is a good first call


def problem(key: Key) -> Problem:
    return Problem(key.spec, key.tokens)


def stale(table: Table, submit: Submit) -> list[Entry]:
    """Returns the entries whose schedule makes another kernel today than when they were measured, or none. Needs no
    GPU."""
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
    """The schedule that a matmul would get without its own entry, and the times of both in microseconds, measured
    side by side; inf for one that can't run."""

    entry: Entry
    schedule: KernelSchedule
    time: float
    best: float  # with the entry's schedule

    @property
    def ratio(self) -> float:
        """Ratio of the time to the best that is known."""
        return self.time / min(self.time, self.best) if math.isfinite(self.time) else math.inf

    def to_json(self) -> dict[str, Any]:
        """The matmul, both schedules and both times."""
        chosen, best = spelled_out(self.schedule), spelled_out(self.entry.schedule)
        times = {"microseconds": self.time, "best_microseconds": min(self.time, self.best)}
        return self.entry.key.to_dict() | {"schedule": chosen, "best_schedule": best} | times


def first_calls(table: Table, target: Target, gpu: Measures, submit: Submit) -> Iterator[FirstCall]:
    """Yields the first call of every matmul of the table, as if its entry were not there. No other table is asked."""
    entries = sorted(table.entries.values(), key=lambda e: (str(e.key.spec), e.key.tokens))
    work: list[tuple[Entry, KernelSchedule]] = []
    for entry in entries:
        others = {key: other for key, other in table.entries.items() if key != entry.key}
        without = Table(table.gpu, table.capability, table.made, others)
        work.append((entry, choose(entry.key.spec, entry.key.tokens, target, [without])))
    compiling = [_both(submit, entry, first) for entry, first in work]
    for (entry, first), futures in zip(work, compiling):
        yield _compare(entry, first, gpu, futures)


def first_calls_of_unknown(work: Sequence[Problem], search: Tuner) -> Iterator[FirstCall]:
    """Yields the first call of each matmul, by the shipped tables or the rule, against the best that a search finds."""
    for entry in search.run(work):
        first = schedule_for(entry.key.spec, entry.key.tokens, search.target)
        compiling = _both(search.submit, entry, first)
        yield _compare(entry, first, search.gpu, compiling)


Compiling = dict[KernelSchedule, "Future[str]"]


def _both(submit: Submit, entry: Entry, first: KernelSchedule) -> Compiling:
    return {schedule: submit(problem(entry.key), schedule) for schedule in dict.fromkeys((entry.schedule, first))}


def _compare(entry: Entry, first: KernelSchedule, gpu: Measures, compiling: Compiling) -> FirstCall:
    """Returns a first call after both of its schedules were timed, one after the other."""
    times: dict[KernelSchedule, float] = {}
    for schedule, future in compiling.items():
        try:
            future.result()
            times[schedule] = gpu.time(problem(entry.key), schedule, LONG)
        except Failed:
            times[schedule] = math.inf
    return FirstCall(entry, first, times[first], times[entry.schedule])


def to_text(calls: Sequence[FirstCall], gpu: str) -> str:
    """Returns the calls as JSON, a call to a line."""
    lines = ",\n  ".join(json.dumps(call.to_json()) for call in calls)
    return f'{{"gpu": {json.dumps(gpu)}, "date": "{date.today().isoformat()}", "calls": [\n  {lines}\n]}}\n'


def summary(calls: Sequence[FirstCall]) -> str:
    """Returns a summary of the calls in a line."""
    ratios = [call.ratio for call in calls]
    good = sum(ratio <= GOOD for ratio in ratios)
    return (
        f"first calls: {good} of {len(ratios)} within {GOOD - 1:.0%} of the best known; "
        f"mean {statistics.mean(ratios):.3f}, worst {max(ratios):.3f}"
    )
