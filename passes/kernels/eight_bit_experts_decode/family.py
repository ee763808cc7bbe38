"""The family for weights of several experts that have few slots each, and activations of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.eight_bit_experts_decode.schedule import EightBitExpertsDecodeSchedule
from lowbit.passes.kernels.experts_decode import legality
from lowbit.passes.kernels.experts_decode.family import ExpertsDecode
from lowbit.passes.kernels.experts_decode.schedule import ExpertsDecodeSchedule
from lowbit.passes.kernels.requirements import check_compute
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


_MOST = 64
"""Slots of a tile, up to which dense kernels that stream weights are predicted to be as fast as those for prompts."""


class EightBitExpertsDecode(ExpertsDecode):
    """The codes of the experts that are hit stream through the tensor cores as bytes, as in the kernels of `eight_bit`.
    Scales and sums of x are those of the rows that the list of slots names."""

    name: ClassVar[str] = "eight_bit_experts_decode"
    operation: ClassVar[Operation] = "quantized_expert_matmul"
    schedule_type = EightBitExpertsDecodeSchedule

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[ExpertsDecodeSchedule]:
        return super().candidates(spec, token_tile, target) if token_tile <= _MOST else ()

    def check(self, spec: MatmulSpec, schedule: ExpertsDecodeSchedule, target: Target) -> None:
        if not spec.compute:
            raise SpecError(f"schedule: ({spec}) has no activations of 8 bits; take an ExpertsDecodeSchedule")
        check_compute(spec, target)
        if not spec.multiplies_codes or spec.folds:
            why = f"{spec.weight} is scaled before it is multiplied"
            raise SpecError(f"schedule: {why}; take an EightBitExpertsMmaSchedule")
        legality.check_streaming(self.name, spec, schedule, target)

    def build(self, spec: MatmulSpec, schedule: ExpertsDecodeSchedule) -> ir.Module:
        from lowbit.passes.kernels.streaming.parts import Bytes, Ending, ExpertWork, activations_of, streaming_kernel

        plan = KernelPlan(spec, schedule)
        return streaming_kernel(plan, work=ExpertWork, activations=activations_of, engine=Bytes, ending=Ending)
