"""Who is told how far a tuning session is."""

from __future__ import annotations

from typing import Protocol

from lowbit.passes.scheduling.tables import Entry
from lowbit.pylib.tune.problem import Problem


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
