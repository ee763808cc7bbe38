"""The decode families: matmuls of 1 to 256 tokens, whose kernels stream the weight through the tensor cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.streaming import candidates, legality, search_space
from lowbit.passes.kernels.streaming.family import StreamingFamily
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
        from lowbit.passes.kernels.streaming.kernel import decode_matmul
        from lowbit.passes.kernels.streaming.spread import decode_matmul_spread

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
        from lowbit.passes.kernels.streaming.integer import decode_matmul_integer

        return decode_matmul_integer(spec, schedule)
