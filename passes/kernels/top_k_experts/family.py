"""The family for weights of several experts and few tokens, whose experts' ids it reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelFamily, Operation
from lowbit.passes.kernels.decode.family import Decode
from lowbit.passes.kernels.requirements import check_experts
from lowbit.passes.kernels.streaming import candidates, cost_model, legality
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.kernels.top_k_experts.schedule import TopKSchedule
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_DENSE = Decode()
_PRELOADED = ((2, 1, 4), (2, 1, 3), (2, 1, 2), (1, 4, 1), (1, 4, 3), (2, 2, 4), (1, 1, 4))


class TopKExperts(KernelFamily[TopKSchedule]):
    """One launch, without a table of slots: each block reads which expert's rows it has. With the weights of a token's
    experts it adds these up as well."""

    name: ClassVar[str] = "top_k_experts"
    operation: ClassVar[Operation] = "top_k_expert_matmul"
    schedule_type = TopKSchedule
    takes_any_tokens: ClassVar[bool] = True

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        """One token of a block, if there is a kernel."""
        return (1,) if spec.top_k and self.candidates(spec, 1, target) else ()

    def serves(self, schedule: TopKSchedule, token_tile: int) -> bool:
        return token_tile == 1

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[TopKSchedule]:
        """Those of a dense matrix that is as large as the experts of a token together."""
        if not spec.top_k or not self.allows(spec, least_schedule(spec), target):
            return []
        dense, adds_up = _of_one_token(spec), spec.top_k.weights is not None
        found = candidates.streaming_schedules(dense, 1, target, _DENSE)
        plain = (s for group in found for s in group.schedules if s.split_k == (1 if adds_up else s.cluster))
        every = dict.fromkeys(TopKSchedule(**asdict(s)) for s in plain)
        every |= dict.fromkeys(_preloaded(spec)) if adds_up else {}
        fitting = [s for s in every if self.allows(spec, s, target)]
        return fitting or [least_schedule(spec)]

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: TopKSchedule, target: Target) -> float:
        """About how many microseconds a launch with one token takes: where experts are added up, as many as if the
        blocks of a cluster had parts of one long k."""
        top_k = spec.top_k
        if top_k is None or top_k.weights is None:
            return cost_model.predict(_of_one_token(spec), 1, schedule, target)
        long = replace(spec, n=spec.n // spec.experts, k=top_k.count * spec.k, experts=1, top_k=None)
        parts = 1 << (top_k.count - 1).bit_length()  # a cluster of a dense matrix has no other numbers of blocks
        return cost_model.predict(long, 1, replace(schedule, split_k=parts, cluster=parts), target)

    def check(self, spec: MatmulSpec, schedule: TopKSchedule, target: Target) -> None:
        if spec.top_k is None:
            raise SpecError(f"schedule: top_k_experts needs a spec with top_k, ({spec}) has rows sorted by expert")
        check_experts("top_k_experts", spec)
        if spec.outliers or spec.permuted:
            given = "outliers" if spec.outliers else "columns of its own order for each expert"
            raise SpecError(f"schedule: top_k_experts takes no {given}; take rows sorted by expert")
        if spec.top_k.weights:
            _check_sum(spec, schedule, target)
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: TopKSchedule) -> dict[str, bool]:
        return KernelPlan(spec, schedule).rounding

    def build(self, spec: MatmulSpec, schedule: TopKSchedule) -> ir.Module:
        from lowbit.passes.kernels.streaming.parts import (
            Ending,
            Mma,
            SpreadMma,
            SumOfExperts,
            TopKWork,
            activations_of,
            streaming_kernel,
        )

        plan = KernelPlan(spec, schedule)
        engine, ending = SpreadMma if schedule.spread_k else Mma, SumOfExperts if plan.ending.adds_experts else Ending
        return streaming_kernel(plan, work=TopKWork, activations=activations_of, engine=engine, ending=ending)


def least_schedule(spec: MatmulSpec) -> TopKSchedule:
    """Returns the smallest schedule, which fits wherever any does."""
    return TopKSchedule(8, 1, 1, 1, spec.packing.chunk, num_stages=2)


def _check_sum(spec: MatmulSpec, schedule: TopKSchedule, target: Target) -> None:
    """Raises SpecError where the blocks of a token's experts can't be a cluster."""
    count = spec.top_k.count if spec.top_k else 1
    if not target.has_clusters:
        raise SpecError(f"schedule: top_k_experts adds up experts in clusters, which {target} does not have")
    if count > legality.MOST_IN_CLUSTER:
        most = f"at most {legality.MOST_IN_CLUSTER} experts, the blocks of a cluster"
        raise SpecError(f"schedule: top_k_experts adds up {most}, not {count}; take rows sorted by expert")
    if schedule.cluster > 1:
        raise SpecError(f"schedule: cluster={schedule.cluster} must be 1 where blocks add up a token's experts")
    if spec.is_gated:
        raise SpecError(f"schedule: top_k_experts adds up no halves of epilogue={spec.epilogue!r}")


def _of_one_token(spec: MatmulSpec) -> MatmulSpec:
    """Returns the dense matmul with as many rows as the experts of a token have."""
    count = spec.top_k.count if spec.top_k else 1
    return replace(spec, n=count * (spec.n // spec.experts), experts=1, top_k=None)


def _preloaded(spec: MatmulSpec) -> Iterator[TopKSchedule]:
    """Yields schedules for a short k, all of whose weights are on their way before x is there."""
    for (row_blocks, warps_n, warps_k), step in itertools.product(_PRELOADED, (64, 128, 256)):
        if step % spec.packing.chunk == 0 and spec.packing.padded_k % (step * warps_k) == 0:
            yield TopKSchedule(8, row_blocks, warps_n, warps_k, step, 1, preload_weights=True)
