"""A tuning problem: what a session looks for schedules for. Its processes hand it to each other."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.scheduling.tables import Key


@dataclass(frozen=True)
class Problem:
    """A matmul and a token tile, for which a session looks for the fastest schedule."""

    spec: MatmulSpec
    tile: int

    @property
    def key(self) -> Key:
        """The key of the problem in a table of schedules."""
        return Key.of(self.spec, self.tile)

    def __str__(self) -> str:
        return f"{self.spec}, m = {self.tile}"
