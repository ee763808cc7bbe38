"""Lower bounds of what `streaming.cost_model` predicts: candidates that can't win need not be made.

A bound knows the shape of a block, how k is split and the steps to choose from, but no stages, and takes
multiprocessors to hold as many blocks as their threads allow: the more there are, the better latency is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.costs import DecodeCosts, EngineCosts
from lowbit.passes.kernels.base import SURE
from lowbit.passes.kernels.decode.schedule import Schedule, usual_refill
from lowbit.passes.kernels.streaming.arithmetic import arithmetic_of
from lowbit.passes.kernels.streaming.cost_model import correction, costs_of
from lowbit.passes.kernels.streaming.engine_plans import COLUMNS, overlapped
from lowbit.passes.kernels.streaming.scaling import IN_PLACE
from lowbit.passes.target import Target

_MOST_STAGES = 3
_LONGEST_STEP = 256  # columns
_MOST_ROW_BLOCKS = 32  # of a block


@dataclass(frozen=True)
class Bounds:
    """Those of all candidates for so many tokens that multiply by wgmma, or do not."""

    spec: MatmulSpec
    token_tile: int
    target: Target
    costs: EngineCosts
    wgmma: bool

    @cached_property
    def _common(self) -> DecodeCosts:
        """The constants that do not depend on the engine."""
        return self.target.costs.decode

    @cached_property
    def of_all(self) -> float:
        """Microseconds that no candidate is predicted to be below."""
        spec, costs = self.spec, self.costs
        x = self._x(spec.packing.row_blocks / _MOST_ROW_BLOCKS)
        arithmetic = self._arithmetic(_MOST_ROW_BLOCKS, math.inf)
        if self.wgmma:  # which several warps share
            arithmetic *= min(map(self._waiting, (4, 8, 16)))
        work = max(spec.bytes / costs.memory, spec.bytes / costs.l2 + x, arithmetic)
        factor = min(correction(spec, self.token_tile, self.wgmma, cluster, self._common) for cluster in (1, 4))
        return (work + costs.round + costs.block) * factor * SURE

    def of_shape(
        self, row_blocks: int, warps_n: int, warps_k: int, split_k: int, *, steps: Sequence[int], sums: int
    ) -> float:
        """Microseconds that no candidate whose blocks have this shape is predicted to be below.

        steps  columns that a step may have
        sums   columns of the sums that a block ends with
        """
        spec, costs, target, warps = self.spec, self.costs, self.target, warps_n * warps_k
        cluster = split_k if target.has_clusters else 1
        tiles = -(-spec.packing.row_blocks // (row_blocks * warps_n))
        waves = tiles * split_k / (target.multiprocessors * (self._common.reach if cluster > 2 else 1.0))
        beside = min(target.max_threads_per_sm // (32 * warps), waves)
        step_k, padded_k, sharing = max(steps), spec.packing.padded_k, warps_k * split_k
        rounds = -(-padded_k // (step_k * sharing))
        under_way = beside * row_blocks * warps * 16 * step_k * spec.packing.bits / 8 * min(rounds, _MOST_STAGES - 1)
        arithmetic = self._arithmetic(row_blocks, max(1.0, beside) * warps) * self._waiting(warps_n) / min(1.0, waves)
        work = max(self._memory(tiles, under_way), spec.bytes / costs.l2 + self._x(tiles), arithmetic)
        work *= min(_beyond(-(-padded_k // step), sharing) for step in steps)
        if waves > 1:
            work *= 1 + costs.idle * (math.ceil(waves) / waves - 1)
        turns = max(1.0, waves / beside)
        ends = (costs.round * rounds + costs.block) * turns
        if split_k > 1:
            ends += 2 * tiles * split_k * 16 * row_blocks * warps_n * sums * 4 / costs.l2
            ends += costs.split if cluster == 1 else costs.cluster * math.log2(cluster)
        return (work + ends) * correction(spec, self.token_tile, self.wgmma, cluster, self._common) * SURE

    def _x(self, tiles: float) -> float:
        """Microseconds to read x for every tile."""
        return tiles * self.token_tile * self.spec.k * self.spec.x.bytes / self.costs.l2

    def _memory(self, tiles: int, under_way: float) -> float:
        """Microseconds of the weight from device memory, with so many bytes under way to a multiprocessor."""
        costs = self.costs
        x = costs.x * self._x(tiles) if self.token_tile <= 32 else 0.0
        return self.spec.bytes / costs.memory * math.hypot(1.0, costs.in_flight / under_way) + x

    def _waiting(self, warps_n: int) -> float:
        """Times as long as warps take that wait for one another in every round."""
        if warps_n == 1 or self.token_tile == 1:
            return 1.0
        alone = self.wgmma and usual_refill(self.token_tile, warps_n) == "per_warp"
        return self.costs.barrier * (self.costs.per_warp if alone else 1.0)

    def _arithmetic(self, row_blocks: int, warps: float) -> float:
        """Microseconds of decoding and products, with so many warps on a multiprocessor."""
        spec, costs = self.spec, self.costs
        mma = max(8, self.token_tile) / 4 * costs.tensor / (2 if spec.compute else 1)
        read = spec.packing.bits / 2 + (0.0 if self.wgmma else mma / (4 * row_blocks))
        clocks = overlapped(mma, read, self._decoding) * math.hypot(1.0, costs.warps / warps)
        if self._may_scale_in_place:
            hidden = math.hypot(1.0, self._common.scaled_warps / warps)
            clocks = min(clocks, overlapped(mma, read, self._common.scaled) * hidden)
        return spec.n * spec.k / 256 / self.target.multiprocessors * clocks / self._common.clock

    @property
    def _may_scale_in_place(self) -> bool:
        """Whether sums of scaled weights may stay in place (`Arithmetic.sums_in_place`), with scales of a step."""
        spec, group = self.spec, self.spec.packing.padded_group
        computed = spec.bilevel is not None or spec.scale == "e4m3"
        return self.wgmma and computed and group is not None and group <= IN_PLACE

    @cached_property
    def _decoding(self) -> float:
        """Clocks to decode 256 codes and to scale them or their products, at least."""
        costs, kind = self.costs, self.spec.dtype.kind
        if self.wgmma:  # then neither depends on the shape of a block
            arithmetic = arithmetic_of(self.spec, Schedule(max(8, self.token_tile), 1, 4, 1, wgmma=True))
            scaled = 1.0 if arithmetic.scaling.rounds_scales else self._products_per_group
            return arithmetic.decode_clocks(costs) + costs.scale * 2 * scaled
        of_code = costs.decode[self.spec.packing.bits - 1]
        least = min(1.0, costs.decode_raw) * of_code
        decode = costs.decode_table if kind == "table" else costs.decode_float * of_code if kind == "float" else least
        return decode + costs.scale * 2 * self._products_per_group / (1 if self.spec.compute else COLUMNS)

    @property
    def _products_per_group(self) -> float:
        """Columns of products that are scaled for a column of a group, or for one of the longest step."""
        group = self.spec.group_size
        return max(8, self.token_tile) / min(group, _LONGEST_STEP) if group else 0.0


def _beyond(steps: int, sharing: int) -> float:
    """Times as many steps as a row has are in whole rounds, of which blocks and warps have one step each."""
    return -(-steps // sharing) * sharing / steps


@lru_cache(maxsize=64)
def known_bounds(spec: MatmulSpec, token_tile: int, target: Target, wgmma: bool, integer_mma: bool) -> Bounds:
    """Returns bounds that are kept for a while: a choice asks for those of all candidates, then for each shape's."""
    return Bounds(spec, token_tile, target, costs_of(target, wgmma, integer_mma), wgmma)
