"""Weights from codes: decoded, less their zeros, and scaled, as far as that is done before they are multiplied:

    q,  q - z,  s * q,  or  s * q + offset        offset: - s * z, or the offset
"""

from __future__ import annotations

from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Tile
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.scales.step_scales import StepScales
from lowbit.passes.kernels.streaming.operands import FormatTable


class WeightScaling:
    """Decodes and scales the weights of a step."""

    def __init__(self, scales: Scales, table: FormatTable | None) -> None:
        self.p, self.plan, self.spec = scales.p, scales.plan, scales.spec
        self.scales, self.convert = scales, scales.convert
        self.element = compute_element(self.spec.dtype, self.spec.act)
        self._table = table
        in_rows = self.plan.arithmetic.zeros_in_decode and not self.plan.steps.groups
        self._row_zero = scales.of_rows("zeros") if in_rows else None

    def decoded(self, words: Tile, layout: Layout) -> Tile:
        """Returns the weights of a step, not scaled: [warps_k, rows, k]. words: units of codes."""
        arithmetic = self.plan.arithmetic
        codes = self.p.view(words, self.spec.dtype, layout)
        if self._table:
            return self.p.lookup(codes, self._table.buffer, self.element)
        offset = "raw" if arithmetic.raw_codes else "deferred" if arithmetic.defers_offset else "subtracted"
        return self.p.decode(codes, self.element, self.plan.scaling.exponent, offset, self._minus_zeros())

    def _minus_zeros(self) -> list[Tile]:
        """Returns minus the integer zeros of each group, or of rows, which decoding subtracts for nothing: q - z is
        exact. There are none where zeros are subtracted elsewhere."""
        if not self.plan.arithmetic.zeros_in_decode:
            return []
        by_group = [self.scales.of_group("zeros", group) for group in range(self.plan.steps.groups)]
        stored = by_group if self._row_zero is None else [self._row_zero]
        return [self._as_weight(self.convert.minus_zero(zero)) for zero in stored]

    def scaled(self, weights: Tile, group: int) -> Tile:
        """Returns decoded weights of a group with scales and zeros, as far as they are applied to weights; one
        instruction serves both."""
        p, scaling, minus, scale = self.p, self.plan.scaling, None, None
        if scaling.code_power:
            weights = weights * 2.0**scaling.code_power
        if self.scales.step and scaling.rounds_scales:
            return self._scaled_by_step(weights, self.scales.step, group)
        if scaling.rounds_zeros and self.spec.zeros == "float":
            minus = self._as_weight(self.convert.minus_zero(self.scales.of_group("zeros", group)))
        if scaling.rounds_scales:
            scale = self._as_weight(self.convert.with_exponent(self.scales.of_group("scales", group)))
        if scaling.rounds_zeros and self.spec.zeros == "offset" and scale is not None:
            return p.fma(weights, scale, self._as_weight(self.scales.of_group("offsets", group)))
        if minus is not None and scale is not None:
            return p.fma(weights, scale, p.mul(scale, minus))
        if minus is not None:
            return p.add(weights, minus)
        return p.mul(weights, scale) if scale is not None else weights

    def _scaled_by_step(self, weights: Tile, step: StepScales, group: int) -> Tile:
        scale = step.load("scales", group)
        if self.plan.scaling.rounds_zeros:
            return self.p.fma(weights, scale, step.load("offsets", group))
        return self.p.mul(weights, scale)

    def _as_weight(self, number: Tile) -> Tile:
        return self.p.cast(number, self.element)
