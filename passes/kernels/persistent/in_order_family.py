"""What the families of invariant matmuls for many tokens have in common: `InOrderFamily`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates
from lowbit.passes.kernels.persistent.family import PersistentFamily
from lowbit.passes.kernels.persistent.ordered import cut_of
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill.family import TOKEN_TILES
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.target import Target

S = TypeVar("S", bound=PrefillSchedule)


class InOrderFamily(PersistentFamily[S]):
    """The base of families of persistent kernels that add up in the order of those for few tokens."""

    chosen_for: ClassVar[tuple[int, ...]] = TOKEN_TILES

    @abstractmethod
    def misfit(self, spec: MatmulSpec, target: Target) -> str:
        """What of an invariant spec has no such kernel, or "" if all has."""

    @abstractmethod
    def products_of(self, spec: MatmulSpec) -> tuple[str, ...]:
        """`SumOrder.products` of the kernels."""

    @abstractmethod
    def of_cut(
        self, spec: MatmulSpec, token_tile: int, target: Target, cut: Mapping[str, Any]
    ) -> Iterator[Candidates[S]]:
        """The candidates with a cut of k, which is given as fields of a schedule."""

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        return self.chosen_for if spec.invariant and not self.misfit(spec, target) else ()

    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Iterator[Candidates[S]]:
        """Those of a single chain; what is chosen has the order of the matmul."""
        return iter(self.in_order(spec, token_tile, target, SumOrder.of(spec, 1, 1, 256, self.products_of(spec))))

    def sum_order(self, spec: MatmulSpec, schedule: S) -> SumOrder | None:
        order, products = schedule.order, self.products_of(spec)
        return SumOrder.of(spec, order.parts, order.chains, order.step_k, products) if order else None

    def in_order(
        self, spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder
    ) -> Iterable[Candidates[S]]:
        cut, allowed = cut_of(order), self.schedule_type.allowed
        misfit = not spec.invariant or self.misfit(spec, target) or order.products != self.products_of(spec)
        if misfit or any(v not in allowed[f] for f, v in cut.items()):
            return ()
        return self.of_cut(spec, token_tile, target, cut)
