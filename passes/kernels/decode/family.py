"""The decode families: matmuls of 1 to 256 tokens, whose kernels stream the weight through the tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.streaming import candidates, search_space
from lowbit.passes.kernels.streaming.engine_plans import has_integer_mma
from lowbit.passes.kernels.streaming.family import StreamingFamily
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


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
        from lowbit.passes.kernels.streaming.parts import (
            Ending,
            InPlaceWgmma,
            Mma,
            SpreadMma,
            Wgmma,
            Work,
            activations_of,
            streaming_kernel,
        )

        plan = KernelPlan(spec, schedule)
        wgmma = InPlaceWgmma if plan.arithmetic.sums_in_place else Wgmma
        engine = wgmma if schedule.wgmma else SpreadMma if schedule.spread_k else Mma
        return streaming_kernel(plan, work=Work, activations=activations_of, engine=engine, ending=Ending)


class DecodeInteger(StreamingFamily[IntegerSchedule]):
    """Codes stay integers, and one token is split into limbs: for narrow codes, whose decoding would be the bound."""

    name: ClassVar[str] = "decode_integer"
    schedule_type = IntegerSchedule

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        return (1,) if has_integer_mma(spec) and not spec.compute else ()

    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[Candidates[IntegerSchedule]]:
        return candidates.integer_schedules(spec, target, self)

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[IntegerSchedule]:
        return search_space.all_schedules(spec, token_tile, target, self)

    def build(self, spec: MatmulSpec, schedule: IntegerSchedule) -> ir.Module:
        from lowbit.passes.kernels.streaming.parts import Ending, LimbMma, Work, activations_of, streaming_kernel

        plan = KernelPlan(spec, schedule)
        return streaming_kernel(plan, work=Work, activations=activations_of, engine=LimbMma, ending=Ending)
