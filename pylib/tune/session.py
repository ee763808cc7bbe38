"""`lowbit tune`: measures schedules and writes the fastest into a table.

Every matmul and token tile is searched in two passes: the candidates of `pylib.tune.search_space` are timed shortly,
and then the neighbours of the best few. The best of all are timed at length, and the output of the winner is checked
against the definition before it is recorded. Other processes compile meanwhile, one matmul ahead, and the neighbours
are compiled while the next matmul's candidates are timed.

Every measurement is a line of a log (`log.py`), so that a session that was interrupted goes on where it stopped.
Measurements of other sources of the compiler do not count. `work.py` has the list of matmuls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import date
from typing import Protocol, cast

from lowbit.dialect.errors import TargetError
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.scheduling.tables import Entry
from lowbit.passes.target import Target
from lowbit.pylib.tune.log import Log
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import Failed
from lowbit.pylib.tune.search_space import candidates, neighbours

CANDIDATES = 60  # per matmul and token tile
FIRST_PASS = 2 / 3  # of them
PARENTS = 3  # whose neighbours are the second pass
FINALISTS = 4  # the winner was among them in 113 of 114 searches, first in 87 (docs/tuning.md)
SHORT, LONG = 3, 11  # replays of a timing
AHEAD = 1  # matmuls that are being compiled for, beyond the one that is timed
LEAST_SECONDS = 1.0  # of timing for a matmul, however little time there is
MADE = "lowbit tune: the fastest of the candidates, in CUDA graphs over 400 MB of weights"


class Measures(Protocol):
    """The measurements that need a GPU. Raises Failed for a schedule that can't be measured."""

    def time(self, problem: Problem, schedule: KernelSchedule, replays: int) -> float: ...

    def check(self, problem: Problem, schedule: KernelSchedule) -> bool: ...


class Progress(Protocol):
    """A listener that is told how far a session is."""

    def start(self, problems: int) -> None: ...

    def timed(self, problem: Problem, count: int) -> None: ...

    def finished(self, problem: Problem, entry: Entry | None, first: float, timed: int) -> None:
        """first: microseconds with the rule's schedule"""
        ...


class Silent:
    """A listener that tells nobody."""

    def start(self, problems: int) -> None: ...

    def timed(self, problem: Problem, count: int) -> None: ...

    def finished(self, problem: Problem, entry: Entry | None, first: float, timed: int) -> None: ...


Submit = Callable[[Problem, KernelSchedule], "Future[str]"]  # compile it; the kernel's id, or Failed


@dataclass
class Search:
    """One matmul's: what is being compiled, and what was found. Microseconds, inf for what can't run."""

    problem: Problem
    compiling: dict[KernelSchedule, Future[str] | None]  # None: measured in an earlier session
    times: dict[KernelSchedule, float] = field(default_factory=dict)
    kernels: dict[KernelSchedule, str] = field(default_factory=dict)
    share: float = math.inf  # seconds that timing may take
    spent: float = 0.0  # and has taken

    def best(self, count: int) -> list[KernelSchedule]:
        """Returns the fastest of the schedules that run, the fastest first."""
        return sorted((s for s, t in self.times.items() if math.isfinite(t)), key=lambda s: self.times[s])[:count]


@dataclass
class Tuner:
    """The search, apart from what needs a GPU.

    candidates  how many schedules are timed per matmul and token tile
    seconds     that the session may take, about. Every matmul gets an equal share of what is left, so that it has
                fewer candidates rather than none; after that, no other is begun
    """

    target: Target
    version: str
    log: Log
    gpu: Measures
    submit: Submit
    progress: Progress
    candidates: int = CANDIDATES
    seconds: float = math.inf
    now: Callable[[], float] = time.monotonic
    _end: float = math.inf

    def run(self, work: Sequence[Problem]) -> Iterator[Entry]:
        """Yields the fastest right schedule of each problem, as soon as it is known."""
        self.progress.start(len(work))
        with ThreadPoolExecutor(1) as planner:  # while the GPU works
            plans = [(p, planner.submit(self._first_pass, p)) for p in work]
            try:
                yield from self._run(plans)
            finally:
                planner.shutdown(wait=False, cancel_futures=True)

    def _run(self, plans: Sequence[tuple[Problem, Future[list[KernelSchedule]]]]) -> Iterator[Entry]:
        self._end = end = self.now() + self.seconds
        waiting = iter(plans)
        begun: list[Search] = []  # compiling for the first pass
        last: Search | None = None  # compiling for the second
        left = len(plans)
        while True:
            if self.now() < end:
                begun += [self._begin(p, plan.result()) for _, (p, plan) in zip(range(1 + AHEAD - len(begun)), waiting)]
            if self.now() >= end or not begun:
                break
            search = begun.pop(0)
            search.share = max(LEAST_SECONDS, (end - self.now()) / left)
            left -= 1
            self._time_all(search, search.share * FIRST_PASS)
            self._begin_second_pass(search)
            if last:
                yield from self._finish(last)
            last = search
        for search in begun:
            _cancel(search)
        if last:
            yield from self._finish(last)

    def _first_pass(self, p: Problem) -> list[KernelSchedule]:
        return candidates(p.spec, p.token_tile, self.target, math.ceil(self.candidates * FIRST_PASS))

    def _begin(self, problem: Problem, schedules: Sequence[KernelSchedule]) -> Search:
        search = Search(problem, {})
        self._compile(search, schedules)
        return search

    def _begin_second_pass(self, search: Search) -> None:
        p = search.problem
        near = [s for parent in search.best(PARENTS) for s in neighbours(p.spec, p.token_tile, self.target, parent)]
        new = [s for s in dict.fromkeys(near) if s not in search.times]
        self._compile(search, new[: max(0, self.candidates - len(search.times))])

    def _compile(self, search: Search, schedules: Sequence[KernelSchedule]) -> None:
        for s in schedules:
            known = self.log.get(search.problem.key, s, "short") is not None
            search.compiling[s] = None if known else self.submit(search.problem, s)

    def _time_all(self, search: Search, seconds: float) -> None:
        """Time what is being compiled; what does not get its turn within so many seconds of timing is dropped."""
        for schedule, future in list(search.compiling.items()):
            if search.spent >= seconds or not self._waited_for(future):
                _cancel(search)
                return
            if self._compiled(search, schedule):
                search.times[schedule] = self._time(search, schedule, SHORT, "short")
            else:
                search.times[schedule] = math.inf
            search.compiling.pop(schedule)
            self.progress.timed(search.problem, len(search.times))

    def _waited_for(self, future: Future[str] | None) -> bool:
        """Waits for a compilation; tells whether it ended before the session has to."""
        left = self._end - self.now()
        return left > 0 and (not future or bool(wait([future], None if math.isinf(left) else left).done))

    def _compiled(self, search: Search, schedule: KernelSchedule) -> bool:
        future = search.compiling[schedule]
        if future is None:
            return True
        try:
            try:
                kernel = future.result()
            except BrokenProcessPool:  # perhaps on account of another: once more, in a new pool
                kernel = self.submit(search.problem, schedule).result()
        except (BrokenProcessPool, Failed) as error:
            why = str(error) if isinstance(error, Failed) else "the compiler crashed"
            self.log.add(search.problem.key, schedule, "short", math.inf, why)
            return False
        search.kernels[schedule] = kernel
        return True

    def _time(self, search: Search, schedule: KernelSchedule, replays: int, what: str) -> float:
        known = self.log.get(search.problem.key, schedule, what)
        if known is None:
            known = self._measure(search, schedule, what, lambda p, s: self.gpu.time(p, s, replays))
        return known

    def _measure(
        self, search: Search, schedule: KernelSchedule, what: str, measure: Callable[[Problem, KernelSchedule], float]
    ) -> float:
        start, why = self.now(), ""
        try:
            value = float(measure(search.problem, schedule))
        except Failed as error:
            value, why = math.inf, str(error)
        search.spent += self.now() - start
        self.log.add(search.problem.key, schedule, what, value, why)
        return value

    def _finish(self, search: Search) -> Iterator[Entry]:
        """Runs the second pass and the final, checks the winner, and yields its entry."""
        first = next(iter(search.times.values()), math.inf)
        self._time_all(search, search.share)
        entry = self._winner(search)
        self.progress.finished(search.problem, entry, first, len(search.times))
        if entry:
            yield entry

    def _winner(self, search: Search) -> Entry | None:
        problem = search.problem
        long = {s: self._time(search, s, LONG, "long") for s in search.best(FINALISTS)}
        for s in sorted(long, key=lambda s: long[s]):
            if math.isfinite(long[s]) and self._right(search, s):
                kernel = search.kernels.get(s) or self.submit(problem, s).result()
                return Entry(problem.key, s, long[s], date.today().isoformat(), self.version, kernel)
        return None

    def _right(self, search: Search, schedule: KernelSchedule) -> bool:
        known = self.log.get(search.problem.key, schedule, "right")
        if known is None:
            known = self._measure(search, schedule, "right", self.gpu.check)
        return known == 1


def _cancel(search: Search) -> None:
    for future in search.compiling.values():
        if future:
            future.cancel()
    search.compiling.clear()


def this_gpu() -> tuple[str, Target]:
    """Name and target of the GPU to tune for. Raises TargetError where there is none."""
    import torch

    from lowbit.pylib.runtime.devices import target_named

    if not torch.cuda.is_available():
        raise TargetError(
            "lowbit tune measures kernels and needs an NVIDIA GPU; tables from other machines are joined by "
            "lowbit tune --merge A.json B.json"
        )
    return cast(str, torch.cuda.get_device_name()), target_named(None)
