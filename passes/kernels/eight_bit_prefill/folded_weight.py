"""The weight side of the prefill kernel for activations of 8 bits where scales of groups are folded into weights.

Fragments are those of the prefill kernel for f16, scaled and rounded as `dequantize` rounds them, and then rounded to
f8e4m3. What is left for sums is the scale of the row, so the tensor core adds up all columns.
"""

from __future__ import annotations

import math
from dataclasses import replace

from lowbit.dialect.layouts.fragments import MMA_M16N8K32_A
from lowbit.passes.builder import Program, Tile
from lowbit.passes.kernels.eight_bit_prefill.plan import Columns, EightBitPlan
from lowbit.passes.kernels.eight_bit_prefill.weight import EightBitWeight
from lowbit.passes.kernels.prefill.parts import Part
from lowbit.passes.kernels.prefill.weight import WeightRegisters


class FoldedWeight(EightBitWeight):
    """Loads, scales and rounds the weight in program `p`."""

    def __init__(self, p: Program, plan: EightBitPlan) -> None:
        # Weights are scaled in f16, whatever the type of x was before it got 8 bits.
        super().__init__(p, replace(plan, spec=replace(plan.spec, act="f16", out=plan.spec.out_dtype)))
        self.convert = self.factors.convert

    def bytes_of(self, columns: Columns, panel: int, registers: WeightRegisters) -> Tile:
        """The weights of a panel, which is one product, in parts of one group each."""
        loaded, width = self._as_round(registers), math.gcd(self.plan.step // self.plan.groups, columns.width)
        starts = range(0, columns.width, width)
        parts = [self.fragments(Part(start, width, columns.group), panel, loaded) for start in starts]
        layout = self.plan.rows.local(1, columns.width // MMA_M16N8K32_A.shape[1]) * MMA_M16N8K32_A
        return self.p.encode_fragments(parts, layout)

    def scale_of(self, columns: Columns, registers: WeightRegisters) -> Tile | None:
        """Returns None: weights are scaled already."""
        return None

    def _as_round(self, registers: WeightRegisters) -> WeightRegisters:
        """Returns the registers by number in the round: numbers that have the same place take turns there."""
        codes = [self.codes.of(registers, piece) for piece in range(self.plan.pieces)]
        counts = {name: factor.count for name, factor in self.factors.loaded.items()}
        factors = {name: [held[i % len(held)] for i in range(counts[name])] for name, held in registers.factors.items()}
        return WeightRegisters(codes, factors)
