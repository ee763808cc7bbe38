"""The prefill family of invariant matmuls on targets without wgmma: the kernel of `passes.kernels.prefill_mma`, which
visits k chain by chain in the order of sums that the kernels for few tokens have, and scales products of groups as they
do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_in_order.legality import products_of
from lowbit.passes.kernels.prefill_mma.in_order_family import MmaInOrderFamily
from lowbit.passes.kernels.prefill_mma_in_order import cost_model, legality
from lowbit.passes.kernels.prefill_mma_in_order.schedule import PrefillMmaInOrderSchedule
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir


class PrefillMmaInOrder(MmaInOrderFamily[PrefillMmaInOrderSchedule]):
    """Codes are decoded to the activation's type and multiplied by mma.sync, tile after tile, chain after chain."""

    name: ClassVar[str] = "prefill_mma_in_order"
    operation: ClassVar[Operation] = "matmul"
    schedule_type = PrefillMmaInOrderSchedule
    panels = ((64, 2), (64, 4), (128, 2), (128, 4), (256, 2))

    def misfit(self, spec: MatmulSpec, target: Target) -> str:
        return legality.misfit(spec, target)

    def products_of(self, spec: MatmulSpec) -> tuple[str, ...]:
        return products_of(spec)

    def rounding(self, spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule) -> dict[str, bool]:
        return self.plan(spec, schedule).scaling.rounding

    def plan(self, spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule) -> PersistentPlan:
        return PersistentPlan(spec, schedule, MMA)

    def least(
        self, spec: MatmulSpec, token_tile: int, tile: PrefillMmaInOrderSchedule, most_k: int, target: Target
    ) -> float:
        return cost_model.least(spec, token_tile, tile, most_k, target)

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: PrefillMmaInOrderSchedule, target: Target) -> float:
        return cost_model.predict(spec, token_tile, schedule, target)

    def check(self, spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def build(self, spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule) -> ir.Module:
        from lowbit.passes.kernels.prefill_mma_in_order.kernel import prefill_mma_in_order_matmul

        return prefill_mma_in_order_matmul(spec, schedule)

    def spills(self, spec: MatmulSpec, schedule: PrefillMmaInOrderSchedule) -> bool:
        return legality.spills(spec, schedule)
