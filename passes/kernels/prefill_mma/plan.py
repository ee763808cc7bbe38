"""`PrefillMmaPlan`: what follows from a spec and a schedule of the prefill kernel with mma.sync, in numbers. No MLIR
is needed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule


@dataclass(frozen=True)
class PrefillMmaPlan(PrefillPlan):
    """Numbers that follow from a spec and a schedule: those of `PrefillPlan`, with other warps and other stages."""

    steps: ClassVar[tuple[int, int]] = (128, 2048)
    asynchronous: ClassVar[bool] = False
    least_rounds: ClassVar[int] = 1

    schedule: PrefillMmaSchedule

    @property
    def rows(self) -> Layout:
        """The layout of a tile's row blocks over warps. Warps that differ in tokens alone have the same."""
        along_rows, along_tokens = self.schedule.warps
        return spatial(along_rows, 1).replicated(along_tokens).local(self.schedule.row_blocks, 1)

    @property
    def warp_tokens(self) -> int:
        """Tokens of a warp."""
        return self.schedule.tokens // self.schedule.warps[1]

    @property
    def ahead(self) -> int:
        """Panels of x under way while one is multiplied: the barrier of a panel frees the stage of the one before."""
        return self.schedule.num_stages - 1

    @property
    def pitch(self) -> int:
        """Numbers from a token of x to the next in shared memory: 16 bytes more than a panel keep the rows that one
        ldmatrix reads in different banks."""
        return self.schedule.panel_k + self.spec.x.per_vector
