"""A tuning problem: what a session looks for schedules for. Its processes hand it to each other."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.scheduling.tables import Key
from lowbit.passes.target import Target
from lowbit.pylib.build.driver import Artifact, load


@dataclass(frozen=True)
class Problem:
    """A matmul and a token tile, for which a session looks for the fastest schedule.

    token_tile   of experts the number of slots: of tokens times top_k
    top_k        different experts of each token; 1 without several experts
    """

    spec: MatmulSpec
    token_tile: int
    top_k: int = 1

    @property
    def tokens(self) -> int:
        """The number of rows of x."""
        return self.token_tile // self.top_k

    @property
    def key(self) -> Key:
        """The key of the problem in a table of schedules."""
        return Key.of(self.spec, self.token_tile)

    def kernel(self, schedule: KernelSchedule, target: Target) -> Artifact:
        """The kernel with a schedule, which may be one for more tokens. Raises SpecError where it does not fit."""
        spec = self.spec
        name = f"{spec.weight}_{spec.n}x{spec.k}_{target.arch}_m{self.token_tile}"
        return load(request(spec, target, schedule), name)

    def __str__(self) -> str:
        of_each = f", {self.top_k} of each token" if self.spec.experts > 1 else ""
        return f"{self.spec}, m = {self.tokens}{of_each}"
