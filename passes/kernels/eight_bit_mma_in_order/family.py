"""The prefill family of invariant matmuls for activations of 8 bits on targets without wgmma: the kernel of
`passes.kernels.eight_bit_prefill_mma`, which visits k chain by chain in the order of sums that the kernels for few
tokens have. What it multiplies is that of `passes.kernels.eight_bit_in_order`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.eight_bit_mma_in_order import cost_model, legality
from lowbit.passes.kernels.eight_bit_mma_in_order.schedule import EightBitMmaInOrderSchedule
from lowbit.passes.kernels.eight_bit_prefill.plan import bytes_plan
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_mma.in_order_family import MmaInOrderFamily
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


class EightBitMmaInOrder(MmaInOrderFamily[EightBitMmaInOrderSchedule]):
    """Codes become bytes and are multiplied by mma.sync of 8-bit types, chain after chain."""

    name: ClassVar[str] = "eight_bit_mma_in_order"
    operation: ClassVar[Operation] = "quantized_matmul"
    schedule_type = EightBitMmaInOrderSchedule
    panels = ((128, 2), (64, 2), (256, 2), (128, 4))

    def misfit(self, spec: MatmulSpec, target: Target) -> str:
        return legality.misfit(spec, target)

    def products_of(self, spec: MatmulSpec) -> tuple[str, ...]:
        return legality.products_of(spec)

    def plan(self, spec: MatmulSpec, schedule: EightBitMmaInOrderSchedule) -> PersistentPlan:
        return bytes_plan(spec, schedule, BYTES_MMA).base

    def least(
        self, spec: MatmulSpec, token_tile: int, tile: EightBitMmaInOrderSchedule, most_k: int, target: Target
    ) -> float:
        return cost_model.least(spec, token_tile, tile, most_k, target)

    def predict(
        self, spec: MatmulSpec, token_tile: int, schedule: EightBitMmaInOrderSchedule, target: Target
    ) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def check(self, spec: MatmulSpec, schedule: EightBitMmaInOrderSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def build(self, spec: MatmulSpec, schedule: EightBitMmaInOrderSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_prefill_mma.kernel import eight_bit_prefill_mma_matmul

        return eight_bit_prefill_mma_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: EightBitMmaInOrderSchedule) -> bool:
        return legality.spills(spec, schedule)
