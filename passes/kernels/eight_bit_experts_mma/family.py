"""The family for weights of several experts and activations of 8 bits, without wgmma.

The kernel is that of `passes.kernels.eight_bit_prefill_mma`, whose tiles are those of `ExpertOrder`. The scale of a
slot is that of its row of x, which the list of slots names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import Operation
from lowbit.passes.kernels.eight_bit_experts_mma import legality
from lowbit.passes.kernels.eight_bit_experts_mma.schedule import EightBitExpertsMmaSchedule
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.persistent.expert_family import ExpertFamily, with_fewest_columns
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_CHOICES = (
    *(((128, 4), 1, 2), ((128, 2), 1, 2)),
    *(((128, 4), 2, 1), ((128, 2), 2, 1), ((128, 4), 1, 1), ((128, 2), 1, 1)),
)
"""Columns and stages of panels, row blocks of a warp, and blocks of a multiprocessor, the most promising first."""


class EightBitExpertsMma(ExpertFamily[EightBitExpertsMmaSchedule]):
    """Codes become bytes and are multiplied by mma.sync of 8-bit types, by the slots of their expert."""

    name: ClassVar[str] = "eight_bit_experts_mma"
    operation: ClassVar[Operation] = "quantized_expert_matmul"
    schedule_type = EightBitExpertsMmaSchedule
    tiles: ClassVar[tuple[int, ...]] = EightBitExpertsMmaSchedule.allowed["tokens"]

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[EightBitExpertsMmaSchedule]:
        """The first that fits of those whose rounds go through the fewest columns, or a tenth more."""
        kind = EightBitExpertsMmaSchedule
        every = (kind(token_tile, *panels, row_blocks=b, blocks_per_sm=n) for panels, b, n in _CHOICES)
        plans = {s: PersistentPlan(spec, s, BYTES_MMA) for s in every if self.fits(spec, s, target)}
        return with_fewest_columns(plans)[:1]

    def every(self, token_tile: int) -> Iterator[EightBitExpertsMmaSchedule]:
        kind = EightBitExpertsMmaSchedule
        sizes = product(*(kind.allowed[name] for name in ("panel_k", "num_stages", "row_blocks", "blocks_per_sm")))
        return (kind(token_tile, k, n, row_blocks=b, blocks_per_sm=many) for k, n, b, many in sizes)

    def spills(self, spec: MatmulSpec, schedule: EightBitExpertsMmaSchedule) -> bool:
        return legality.spills(spec, schedule)

    def check(self, spec: MatmulSpec, schedule: EightBitExpertsMmaSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: EightBitExpertsMmaSchedule) -> dict[str, bool]:
        return {"folded": spec.for_tokens(schedule.tokens).fold_scales}

    def build(self, spec: MatmulSpec, schedule: EightBitExpertsMmaSchedule) -> ir.Module:
        from lowbit.passes.kernels.eight_bit_prefill_mma.kernel import eight_bit_prefill_mma_matmul

        return eight_bit_prefill_mma_matmul(spec, schedule)
