"""The eight_bit family: matmuls of activations of 8 bits, up to 256 tokens a launch, with the weight that all read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Candidates, Operation
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.requirements import check_compute
from lowbit.passes.kernels.streaming import candidates, search_space
from lowbit.passes.kernels.streaming.family import StreamingFamily
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


_OVERLAPPING = 256  # threads of a block


class EightBit(StreamingFamily[EightBitSchedule]):
    """Codes become bytes and are multiplied by mma.sync or wgmma of 8-bit types."""

    name: ClassVar[str] = "eight_bit"
    operation: ClassVar[Operation] = "quantized_matmul"
    schedule_type = EightBitSchedule

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        tiles = candidates.token_tiles(spec, target) if spec.multiplies_codes else ()
        return tuple(tile for tile in tiles if tile > 1)  # eight are for one, too

    def groups(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[Candidates[EightBitSchedule]]:
        check_compute(spec, target)
        found = candidates.streaming_schedules(spec, token_tile, target, self)
        return [Candidates(group.least, partial(_overlapping, spec, group)) for group in found]

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[EightBitSchedule]:
        return search_space.all_schedules(spec, token_tile, target, self)

    def check(self, spec: MatmulSpec, schedule: EightBitSchedule, target: Target) -> None:
        check_compute(spec, target)
        if not spec.multiplies_codes:
            why = f"{spec.weight} is scaled before it is multiplied"
            raise SpecError(f"schedule: {why}; take an EightBitPrefillSchedule")
        super().check(spec, schedule, target)

    def build(self, spec: MatmulSpec, schedule: EightBitSchedule) -> ir.Module:
        from lowbit.passes.kernels.streaming.parts import Bytes, Ending, Work, activations_of, streaming_kernel

        plan = KernelPlan(spec, schedule)
        return streaming_kernel(plan, work=Work, activations=activations_of, engine=Bytes, ending=Ending)


def _overlapping(spec: MatmulSpec, group: Candidates[EightBitSchedule]) -> list[EightBitSchedule]:
    """The schedules of a group, with products that overlap where there is room."""
    return [replace(s, overlap_groups=True) if _has_room_to_overlap(spec, s) else s for s in group.schedules]


def _has_room_to_overlap(spec: MatmulSpec, s: EightBitSchedule) -> bool:
    """Whether a thread has registers for the products of two groups beside the sums: 1 to 3 % faster at 128 tokens."""
    return s.wgmma and s.row_blocks == 1 and s.threads <= _OVERLAPPING and spec.group_size is not None
