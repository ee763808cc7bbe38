"""A tuner whose GPU is made up: the time of a schedule is a number that no order of the candidates has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.scheduling.tables import Entry
from lowbit.passes.targets import parse_target
from lowbit.pylib.tune.log import Log
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.processes import Failed, kernel_id
from lowbit.pylib.tune.search_space import candidates
from lowbit.pylib.tune.session import Tuner

HOPPER = parse_target("sm_90a")
SPEC = MatmulSpec(n=4096, k=4096, weight="u4", group_size=128)
WORK = [Problem(SPEC, 1), Problem(SPEC, 16), Problem(replace(SPEC, n=8192), 1)]
COUNT = 30  # candidates

known_candidates = lru_cache(maxsize=None)(candidates)
"""The candidates of the tuner, which take seconds for WORK, found once for all tests of a process."""


@dataclass
class Bench:
    """Everything a tuner needs, made up: the time of a schedule is a number that no order of the candidates has, and
    measuring takes a second."""

    path: Path
    unbuildable: tuple[Schedule, ...] = ()
    unrunnable: tuple[Schedule, ...] = ()
    wrong: tuple[Schedule, ...] = ()
    dies_after: float = math.inf
    clock: float = 0.0
    timed: list[tuple[Problem, Schedule, int]] = field(default_factory=list)
    submitted: list[tuple[Problem, Schedule]] = field(default_factory=list)
    finished: list[tuple[Problem, Entry | None, float, int]] = field(default_factory=list)

    @staticmethod
    def truth(problem: Problem, s: Schedule) -> float:
        return 1 + sum(map(ord, f"{s}{problem.token_tile}")) * 7919 % 1000

    def time(self, problem: Problem, schedule: Schedule, replays: int) -> float:
        if len(self.timed) >= self.dies_after:
            raise KeyboardInterrupt
        self.clock += 1
        self.timed.append((problem, schedule, replays))
        if schedule in self.unrunnable:
            raise Failed("too many registers")
        return self.truth(problem, schedule)

    def check(self, problem: Problem, schedule: Schedule) -> bool:
        return schedule not in self.wrong

    def submit(self, problem: Problem, schedule: Schedule) -> Future[str]:
        self.submitted.append((problem, schedule))
        future: Future[str] = Future()
        if schedule in self.unbuildable:
            future.set_exception(Failed("too much shared memory"))
        else:
            future.set_result(kernel_id(f"{problem} {schedule}"))
        return future

    def run(self, work: Sequence[Problem] = WORK, seconds: float = math.inf) -> list[Entry]:
        for each in (self.timed, self.submitted, self.finished):
            each.clear()
        log = Log(self.path, "NVIDIA H200")
        now = {"now": lambda: self.clock}
        search = Tuner(HOPPER, "0.1.0+1", log, self, self.submit, _Progress(self), COUNT, seconds, **now)
        return list(search.run(work))

    def measured(self, problem: Problem, replays: int) -> list[Schedule]:
        return [s for p, s, count in self.timed if p == problem and count == replays]


class _Progress:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def start(self, problems: int) -> None:
        assert problems > 0

    def timed(self, problem: Problem, count: int) -> None:
        assert count <= COUNT

    def finished(self, *what: Any) -> None:
        self._bench.finished.append(what)
