"""What the families for many tokens have in common: one launch of persistent blocks serves any number of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.target import Target

S = TypeVar("S", bound=PrefillSchedule)


class PersistentFamily(KernelFamily[S]):
    """The base of these families.

    chosen_for   the token tiles that a schedule is chosen for
    """

    takes_any_tokens: ClassVar[bool] = True
    chosen_for: ClassVar[tuple[int, ...]]

    def serves(self, schedule: S, token_tile: int) -> bool:
        return token_tile in self.chosen_for

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[S]:
        return [s for group in self.groups(spec, token_tile, target) for s in group.schedules]

    @abstractmethod
    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Iterator[Candidates[S]]: ...

    def new_groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Iterable[Candidates[S]]:
        """None: the more tokens, the more tiles a launch has, which are those of any other number of tokens."""
        return ()

    def suits(self, spec: MatmulSpec, schedule: S, target: Target, measured: MatmulSpec) -> bool:
        """Tiles come in waves, which are others for other sizes: the prediction is better than a neighbour."""
        same = (spec.n, spec.k, spec.compute) == (measured.n, measured.k, measured.compute)
        return same and self.allows(spec, schedule, target)

    def fits(self, spec: MatmulSpec, schedule: S, target: Target) -> bool:
        """Tells whether a schedule is allowed and leaves every thread registers enough."""
        return _fits(self, spec, schedule, target)

    @abstractmethod
    def spills(self, spec: MatmulSpec, schedule: S) -> bool:
        """Tells whether a thread needs more registers than it has."""


@lru_cache(maxsize=4096)  # the candidates of all token tiles of a few matmuls, which are mostly the same schedules
def _fits(family: PersistentFamily[Any], spec: MatmulSpec, schedule: PrefillSchedule, target: Target) -> bool:
    return family.allows(spec, schedule, target) and not family.spills(spec, schedule)
