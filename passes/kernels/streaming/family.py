"""The base of the families for few tokens, whose kernels stream the weight through the tensor cores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily, Operation
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming import candidates, cost_model, legality, search_space
from lowbit.passes.kernels.streaming.order import in_order, orders, sum_order
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.target import Target

S = TypeVar("S", bound=Schedule)


class StreamingFamily(KernelFamily[S]):
    """The base of families whose kernels stream the weight: they differ in how a warp multiplies its step."""

    operation: ClassVar[Operation] = "matmul"

    def serves(self, schedule: S, token_tile: int) -> bool:
        return schedule.tokens in (token_tile, max(8, token_tile))  # a tile of eight is for one token, too

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[S]:
        return [s for group in self.groups(spec, token_tile, target) for s in group.schedules]

    def least_time(self, spec: MatmulSpec, token_tile: int, target: Target) -> float:
        return candidates.least_time(spec, token_tile, target, self)

    @abstractmethod
    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[Candidates[S]]: ...

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: S, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def bounds(self, spec: MatmulSpec, tokens: int, schedule: S, target: Target) -> dict[str, float]:
        return cost_model.bounds(spec, tokens, schedule, target)

    def check(self, spec: MatmulSpec, schedule: S, target: Target) -> None:
        if spec.compute and self.operation == "matmul":
            raise SpecError(f"schedule: compute={spec.compute!r} needs an EightBitSchedule, not one of {self.name}")
        legality.check_schedule(spec, schedule, target)

    def suits(self, spec: MatmulSpec, schedule: S, target: Target, measured: MatmulSpec) -> bool:
        alike = spec.compute == measured.compute and self.allows(spec, schedule, target)
        return alike and candidates.suits(spec, schedule, target, measured)

    def neighbours(self, spec: MatmulSpec, token_tile: int, target: Target, around: S) -> Sequence[S]:
        return search_space.neighbours(spec, token_tile, target, around, self)

    def shape(self, schedule: S) -> tuple[object, ...]:
        return tuple(getattr(schedule, name) for name in search_space.SHAPE)

    def sum_order(self, spec: MatmulSpec, schedule: S) -> SumOrder:
        return sum_order(spec, schedule)

    def orders(self, spec: MatmulSpec, target: Target) -> Sequence[SumOrder]:
        return () if self.schedule_type.integer_mma else orders(spec, target, self)

    def in_order(
        self, spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder
    ) -> Iterable[Candidates[S]]:
        return () if self.schedule_type.integer_mma else in_order(spec, token_tile, target, order, self)

    def rounding(self, spec: MatmulSpec, schedule: S) -> dict[str, bool]:
        return KernelPlan(spec, schedule).rounding
