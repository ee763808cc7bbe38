"""The engine for mma.sync of weights in x's type: x comes as fragments by ldmatrix.

    for group in step:
        p   = weights x^T              from zero, or from what makes up for offsets that codes keep
        acc = acc + scale * p          with sums of x where zeros are not subtracted from codes

Where weights are scaled (`Scaling.rounds_scales`), products are added to acc directly. Sums of x are one mma with ones,
for all row blocks of a warp.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.scales.sum_scaling import SumScaling
from lowbit.passes.kernels.scales.weight_scaling import WeightScaling
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.engine import Engine, by_chain, side_by_side, zero_sums
from lowbit.passes.kernels.streaming.fragments import sum_fragments, weight_fragments, x_fragments
from lowbit.passes.kernels.streaming.operands import Operands


class Mma(Engine):
    """Multiplies by mma.sync."""

    def __init__(self, block: Block, operands: Operands) -> None:
        self.block, self.p, self.plan, self.x = block, block.p, block.plan, operands.x
        self.codes, self.fragments = weight_fragments(block.schedule), x_fragments(block.schedule)
        self.sums = sum_fragments(block.schedule)
        self.row = self.sums.reduce((1,))
        self.scales = Scales(block, operands.scales, self.sums)
        self.weights, self.scaling = WeightScaling(self.scales, operands.table), SumScaling(self.scales)

    def begin(self) -> list[Tile]:
        return zero_sums(self.block, self.sums)

    def step(self, carried: list[Tile], words: Callable[[], Tile]) -> list[Tile]:
        p = self.p
        self.scales.begin_step()
        a = self.weights.decoded(words(), self.codes)
        b = p.load_matrix(self.x.buffer, self.block.work.tokens, self.fragments)
        if not self.plan.steps.groups:
            return self._row_step(a, b, carried)
        totals = list(carried)
        for chain, group, start, columns in self.plan.steps.products:
            a_part, b_part = (p.slice(t, 2, start, columns) for t in (a, b))
            totals[chain] = self._add_group(totals[chain], a_part, b_part, group, start)
        return totals

    def _row_step(self, a: Tile, b: Tile, carried: list[Tile]) -> list[Tile]:
        """One step where rows have one scale: sums of x are carried beside the products."""
        p, chains = self.p, list[list[Tile]]()
        for some, (total, *sums) in zip(self.plan.steps.products, by_chain(self.block, carried), strict=True):
            a_part, b_part = (p.slice(t, 2, some.start, some.columns) for t in (a, b))
            of_x = [p.add(each, p.row_sums(b_part, self.row)) for each in sums]
            chains.append([p.mma(a_part, b_part, self._with_offset_sums(total, b_part)), *of_x])
        return side_by_side(chains)

    def _add_group(self, total: Tile, weights: Tile, x: Tile, group: int, start: int) -> Tile:
        """Returns the total with the products of a group's weights and x, columns `start` .. of the step."""
        p = self.p
        if self.plan.scaling.rounds_scales:
            return p.mma(self.weights.scaled(weights, group), x, total)
        product = p.mma(weights, x, self._begun(x, start))
        sums = p.row_sums(x, self.row) if self.plan.arithmetic.zeros_in_sums else None
        return self.scaling.add_scaled(total, product, group, sums)

    def end(self, carried: list[Tile]) -> list[Tile]:
        return [self.scaling.whole(*of_chain) for of_chain in by_chain(self.block, carried)]

    def _begun(self, x: Tile, start: int) -> Tile:
        """Returns the accumulator of a product with columns `start` .. of a step."""
        if not self.plan.arithmetic.defers_offset:
            return self.p.constant(0.0, "f32", self.sums)
        spec = self.block.spec
        return self.p.offset_sums(x, spec.dtype, start % spec.packing.chunk, self.sums)

    def _with_offset_sums(self, total: Tile, x: Tile) -> Tile:
        """Returns sums of earlier steps as the accumulator of a product with x."""
        return self.p.add(total, self._begun(x, 0)) if self.plan.arithmetic.defers_offset else total
