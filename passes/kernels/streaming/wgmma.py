"""The engines for wgmma of weights in x's type: four warps side by side multiply, and the instruction reads x itself.

`Wgmma` waits for the product of each group and scales it; where weights are scaled, all of a step go into one chain.
The product of a group may begin before that of the last one has ended (`Schedule.overlap_groups`).

`InPlaceWgmma` has scaled weights of small groups (`Arithmetic.sums_in_place`). The sums are registers that no step
moves, and products of 64 columns are under way while the next weights are scaled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.scales.sum_scaling import SumScaling
from lowbit.passes.kernels.scales.weight_scaling import WeightScaling
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.engine import Engine, by_chain, side_by_side, zero_sums
from lowbit.passes.kernels.streaming.fragments import sum_fragments, weight_fragments
from lowbit.passes.kernels.streaming.operands import Operands

_BATCH = 64  # columns of weights that are multiplied together, of those whose sums stay in place


class Wgmma(Engine):
    """Multiplies by wgmma, with sums that every step carries on."""

    def __init__(self, block: Block, operands: Operands) -> None:
        self.block, self.p, self.plan, self.x = block, block.p, block.plan, operands.x
        self.codes, self.sums = weight_fragments(block.schedule), sum_fragments(block.schedule)
        self.row = self.sums.reduce((1,))
        self.scales = Scales(block, operands.scales, self.sums)
        self.weights, self.scaling = WeightScaling(self.scales, operands.table), SumScaling(self.scales)

    def begin(self) -> list[Tile]:
        return zero_sums(self.block, self.sums)

    def step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        p = self.p
        self.scales.begin_step()
        a = self.weights.decoded(words(), self.codes)
        if not self.plan.steps.groups:
            return self._row_step(a, carried)
        totals = list(carried)
        for chain, group, start, columns in self.plan.steps.products:
            totals[chain] = self._add_group(totals[chain], p.slice(a, 2, start, columns), group, start)
        return totals

    def _row_step(self, a: Tile, carried: list[Tile]) -> list[Tile]:
        """One step where rows have one scale: sums of x are carried beside the products."""
        p, chains = self.p, list[list[Tile]]()
        for some, (total, *sums) in zip(self.plan.steps.products, by_chain(self.block, carried), strict=True):
            of_x = [p.add(each, self._sums_of_x(some.start, some.columns)) for each in sums]
            weights = p.slice(a, 2, some.start, some.columns)
            chains.append([p.warpgroup_mma(weights, self.x.buffer, some.start, total), *of_x])
        return side_by_side(chains)

    def _add_group(self, total: Tile, weights: Tile, group: int, start: int) -> Tile:
        """Returns the total with the products of a group's weights and columns `start` .. of x."""
        p, columns = self.p, weights.shape[2]
        zero = p.constant(0.0, "f32", self.sums)
        weights = self.weights.scaled(weights, group)
        if self.plan.scaling.rounds_scales:
            return p.warpgroup_mma(weights, self.x.buffer, start, total)
        sums = self._sums_of_x(start, columns) if self.plan.arithmetic.zeros_in_sums else None
        product = p.warpgroup_mma(weights, self.x.buffer, start, zero, self.block.schedule.overlap_groups)
        return self.scaling.add_scaled(total, product, group, sums)

    def _sums_of_x(self, start: int, columns: int) -> Tile:
        return self.p.warpgroup_row_sums(self.x.buffer, start, columns, self.row)

    def end(self, carried: list[Tile]) -> list[Tile]:
        chains = by_chain(self.block, carried)
        return [self.scaling.whole(with_sum_power(self.block, total), *of_x) for total, *of_x in chains]


class InPlaceWgmma(Engine):
    """Multiplies scaled weights by wgmma, with sums that stay in place."""

    def __init__(self, block: Block, operands: Operands) -> None:
        self.block, self.p, self.plan, self.x = block, block.p, block.plan, operands.x
        self.codes, self.sums = weight_fragments(block.schedule), sum_fragments(block.schedule)
        self.scales = Scales(block, operands.scales, self.sums)
        self.weights = WeightScaling(self.scales, operands.table)

    def begin(self) -> list[Tile]:
        self.total = self.p.accumulator(self.sums)
        self.p.clear(self.total)
        return []

    def step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        """Begins products of 64 columns, and waits for those before: their registers are needed."""
        p, s, count = self.p, self.block.schedule, self.plan.steps.groups
        self.scales.begin_step()
        a = self.weights.decoded(words(), self.codes)
        groups, width = range(count), s.step_k // count
        weights = [self.weights.scaled(p.slice(a, 2, group * width, width), group) for group in groups]
        for block, group in itertools.product(range(s.row_blocks), groups):
            start, held = group * width, (group + 1) * width % _BATCH != 0
            pending = None if held else 1
            p.accumulate(weights[group], self.x.buffer, start, self.total, held=held, block=block, pending=pending)
        p.await_products(0)
        return []

    def end(self, carried: list[Tile]) -> list[Tile]:
        return [with_sum_power(self.block, self.p.read(self.total))]


def with_sum_power(block: Block, total: Tile) -> Tile:
    """Returns sums with the part of the power of two that neither codes nor scales took."""
    power = block.plan.scaling.sum_power
    return block.p.mul(total, block.p.constant(2.0**power, "f32", total.layout)) if power else total
