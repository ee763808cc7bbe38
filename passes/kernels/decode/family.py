"""The decode families: matmuls of 1 to 256 tokens, whose kernels stream the weight through the tensor cores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, KernelFamily, Operation
from lowbit.passes.kernels.decode import candidates, cost_model, legality, search_space
from lowbit.passes.kernels.decode.plan import KernelPlan
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

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

    def rounding(self, spec: MatmulSpec, schedule: S) -> dict[str, bool]:
        return KernelPlan(spec, schedule).rounding


class Decode(StreamingFamily[Schedule]):
    """Codes are decoded to the activation's type (or f32) and multiplied by mma.sync or wgmma."""

    name: ClassVar[str] = "decode"
    schedule_type = Schedule

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        return () if spec.compute else candidates.token_tiles(spec, target)

    def token_tile_limit(self, spec: MatmulSpec, target: Target) -> str:
        return candidates.token_tile_limit(spec, target)

    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[Candidates[Schedule]]:
        preloaded = candidates.preloaded_schedule(spec, token_tile, target, self)
        if preloaded:
            return [Candidates(0.0, lambda: [preloaded])]
        return candidates.streaming_schedules(spec, token_tile, target, self)

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[Schedule]:
        return search_space.all_schedules(spec, token_tile, target, self)

    def build(self, spec: MatmulSpec, schedule: Schedule) -> ir.Module:
        from lowbit.passes.kernels.decode.kernel import decode_matmul
        from lowbit.passes.kernels.decode.spread import decode_matmul_spread

        return (decode_matmul_spread if schedule.spread_k else decode_matmul)(spec, schedule)


class DecodeInteger(StreamingFamily[IntegerSchedule]):
    """Codes stay integers, and one token is split into limbs: for narrow codes, whose decoding would be the bound."""

    name: ClassVar[str] = "decode_integer"
    schedule_type = IntegerSchedule

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        return (1,) if legality.has_integer_mma(spec) and not spec.compute else ()

    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[Candidates[IntegerSchedule]]:
        return candidates.integer_schedules(spec, target, self)

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[IntegerSchedule]:
        return search_space.all_schedules(spec, token_tile, target, self)

    def build(self, spec: MatmulSpec, schedule: IntegerSchedule) -> ir.Module:
        from lowbit.passes.kernels.decode.integer import decode_matmul_integer

        return decode_matmul_integer(spec, schedule)
