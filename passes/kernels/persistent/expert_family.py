"""What the families for weights of several experts have in common: one launch serves any number of slots, in tiles of
slots of one expert each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.target import Target

S = TypeVar("S", bound=PrefillSchedule)
_MOST_WASTED = 1.1  # times as many columns as with other panels


class ExpertFamily(KernelFamily[S]):
    """The base of these families.

    tiles   numbers of slots of a tile that a schedule may be chosen for
    """

    takes_any_tokens: ClassVar[bool] = True
    tiles: ClassVar[tuple[int, ...]]

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        """Slots of a tile, of which a kernel serves any number."""
        return tuple(tile for tile in self.tiles if self.candidates(spec, tile, target)) if spec.experts > 1 else ()

    def serves(self, schedule: S, token_tile: int) -> bool:
        return schedule.tokens == token_tile

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[S]:
        return [s for s in self.every(token_tile) if self.fits(spec, s, target)]

    @abstractmethod
    def every(self, token_tile: int) -> Iterable[S]:
        """Returns all schedules with tiles of so many slots."""

    def fits(self, spec: MatmulSpec, schedule: S, target: Target) -> bool:
        """Tells whether a schedule is allowed and leaves every thread registers enough."""
        return self.allows(spec, schedule, target) and not self.spills(spec, schedule)

    @abstractmethod
    def spills(self, spec: MatmulSpec, schedule: S) -> bool:
        """Tells whether a thread is likely to need more registers than it has."""


def with_fewest_columns(plans: Mapping[S, PersistentPlan], most_wasted: float = _MOST_WASTED) -> list[S]:
    """Returns the schedules whose rounds go through the fewest columns, or so many times as many, in their order."""
    columns = {s: plan.tiles.columns for s, plan in plans.items()}
    return [s for s, some in columns.items() if some <= most_wasted * min(columns.values())]
