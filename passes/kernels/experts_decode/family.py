"""The family for weights of several experts that have few slots each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import SURE, Candidates, KernelFamily, Operation
from lowbit.passes.kernels.experts_decode import legality
from lowbit.passes.kernels.experts_decode.candidates import IN_ORDER, candidates, cuts, in_order, preferred
from lowbit.passes.kernels.experts_decode.schedule import TOKENS, ExpertsDecodeSchedule
from lowbit.passes.kernels.streaming.cost_model import predict
from lowbit.passes.kernels.streaming.order import sum_order
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.target import Target

if TYPE_CHECKING:
    from lowbit.dialect.bindings import ir

_BY_MMA = 0.7
"""Of the time that the model of dense kernels expects of mma.sync on Hopper: blocks side by side hide decoding."""
_STAGES, _BLOCKS = (2, 3, 4, 6), (1, 2, 3, 4, 6, 8)


class ExpertsDecode(KernelFamily[ExpertsDecodeSchedule]):
    """The weights of the experts that are hit stream through the tensor cores, as in the decode kernels."""

    name: ClassVar[str] = "experts_decode"
    operation: ClassVar[Operation] = "expert_matmul"
    schedule_type = ExpertsDecodeSchedule
    takes_any_tokens: ClassVar[bool] = True

    def token_tiles(self, spec: MatmulSpec, target: Target) -> tuple[int, ...]:
        """Slots of a tile, of which a kernel serves any number."""
        tiles = (IN_ORDER if spec.invariant else TOKENS) if spec.experts > 1 else ()
        return tuple(tile for tile in tiles if self.candidates(spec, tile, target))

    def serves(self, schedule: ExpertsDecodeSchedule, token_tile: int) -> bool:
        return schedule.tokens == token_tile

    def candidates(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[ExpertsDecodeSchedule]:
        return candidates(spec, token_tile, target, self)

    def predict(self, spec: MatmulSpec, token_tile: int, schedule: ExpertsDecodeSchedule, target: Target) -> float:
        """About how many microseconds a launch takes in which all experts are hit, each by one token tile."""
        alone = schedule.wgmma or schedule.max_blocks_per_sm == 1 or not target.has_wgmma
        return (1.0 if alone else _BY_MMA) * predict(replace(spec, experts=1), token_tile, schedule, target)

    def fastest(
        self, spec: MatmulSpec, token_tile: int, hit: int, target: Target, order: SumOrder | None = None
    ) -> ExpertsDecodeSchedule | None:
        """Returns the candidate that is expected to be fastest where so many experts are hit; None without any.

        order   of sums, if there is to be a certain one
        """
        some = replace(spec, n=hit * (spec.n // spec.experts), experts=hit)
        every = in_order(spec, token_tile, target, order, self) if order else self.candidates(spec, token_tile, target)
        return min(preferred(spec, every), key=lambda s: self.predict(some, token_tile, s, target), default=None)

    def search_space(self, spec: MatmulSpec, token_tile: int, target: Target) -> Sequence[ExpertsDecodeSchedule]:
        """The candidates with other numbers of stages and of blocks, too."""

        def others(s: ExpertsDecodeSchedule) -> Iterator[ExpertsDecodeSchedule]:
            for stages, blocks in product(_STAGES, (b for b in _BLOCKS if b % s.cluster == 0)):
                yield replace(s, num_stages=stages, max_blocks_per_sm=blocks)

        every = dict.fromkeys(other for s in self.candidates(spec, token_tile, target) for other in (s, *others(s)))
        return [s for s in every if self.allows(spec, s, target)]

    def sum_order(self, spec: MatmulSpec, schedule: ExpertsDecodeSchedule) -> SumOrder:
        return sum_order(spec, schedule)

    def orders(self, spec: MatmulSpec, target: Target) -> Sequence[SumOrder]:
        return list(dict.fromkeys(sum_order(spec, s) for s in cuts(spec, self.schedule_type)))

    def in_order(
        self, spec: MatmulSpec, token_tile: int, target: Target, order: SumOrder
    ) -> Iterable[Candidates[ExpertsDecodeSchedule]]:
        if found := in_order(spec, token_tile, target, order, self):
            least = min(self.predict(spec, token_tile, s, target) for s in found)
            yield Candidates(SURE * least, lambda: found)

    def check(self, spec: MatmulSpec, schedule: ExpertsDecodeSchedule, target: Target) -> None:
        legality.check_schedule(spec, schedule, target)

    def rounding(self, spec: MatmulSpec, schedule: ExpertsDecodeSchedule) -> dict[str, bool]:
        return KernelPlan(spec, schedule).rounding

    def build(self, spec: MatmulSpec, schedule: ExpertsDecodeSchedule) -> ir.Module:
        from lowbit.passes.kernels.streaming.parts import (
            Ending,
            ExpertWork,
            InPlaceWgmma,
            Mma,
            Wgmma,
            activations_of,
            streaming_kernel,
        )

        plan = KernelPlan(spec, schedule)
        wgmma = InPlaceWgmma if plan.arithmetic.sums_in_place else Wgmma
        engine = wgmma if schedule.wgmma else Mma
        return streaming_kernel(plan, work=ExpertWork, activations=activations_of, engine=engine, ending=Ending)
