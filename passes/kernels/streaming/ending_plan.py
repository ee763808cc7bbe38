"""`EndingPlan`: how sums of warps and blocks meet, in shared and in device memory. No MLIR is needed."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.streaming.stage_plans import padded
from lowbit.passes.kernels.streaming.steps import Steps
from lowbit.passes.launch import COUNTERS
from lowbit.passes.target import Target


@dataclass(frozen=True)
class EndingPlan:
    """What adding up over warps and splits takes, and needs."""

    spec: MatmulSpec
    schedule: Schedule
    steps: Steps

    @property
    def adds_experts(self) -> bool:
        """Whether each block has one of a token's experts, and those of all are added up."""
        top_k = self.spec.top_k
        return top_k is not None and top_k.weights is not None

    @property
    def cluster(self) -> int:
        """Blocks that add up through distributed shared memory."""
        return self.spec.top_k.count if self.spec.top_k and self.adds_experts else self.schedule.cluster

    @property
    def workspace_bytes(self) -> int:
        """Counters, one for a tile, and partial sums of all splits, where splits add up through device memory."""
        s = self.schedule
        return 0 if s.split_k == s.cluster else 4 * (COUNTERS + self.steps.tiles * s.split_k * s.rows * s.columns)

    @property
    def bytes(self) -> int:
        """Bytes of shared memory, which take the place of everything else."""
        s = self.schedule
        meet = s.warps_k > 1 or self.cluster > 1
        sums = s.chains * padded(s.warps_k * s.tokens * (s.rows + 4) * 4) if meet else 0
        flag = 128 if s.split_k > s.cluster else 0  # of the last block to arrive
        return sums + flag

    def check(self, target: Target) -> None:
        """Raises SpecError where blocks cannot add up."""
        spec, s = self.spec, self.schedule
        if s.cluster > 1 and not target.has_clusters:
            raise SpecError(
                f"schedule: cluster={s.cluster} needs clusters, which {target} does not have; take cluster=1"
            )
        if spec.is_gated and s.rows % (ROWS * s.cluster):
            raise SpecError(
                f"schedule: each block of a cluster adds up whole row blocks for {spec.epilogue}, but {s.rows} rows of "
                f"cluster={s.cluster} are fewer than {ROWS} each; take more row_blocks or warps_n, or a smaller cluster"
            )
        if self.workspace_bytes and self.steps.tiles > COUNTERS:
            raise SpecError(
                f"schedule: split_k={s.split_k} in device memory counts blocks of up to {COUNTERS} tiles, "
                f"n={spec.n} has {self.steps.tiles}; take more row_blocks or split_k=1"
            )
