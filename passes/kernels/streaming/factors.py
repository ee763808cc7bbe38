"""What the decode kernel multiplies sums and weights by, and adds to them: scales, zeros and offsets of its rows.

Those of groups come with a stage of the pipeline, those of whole rows from device memory. Where they scale sums, a
group's product p and the sums of x go into

    acc = acc + scale * p + shift * (sums of x)         shift: - scale * zero, or the offset

and where they scale weights, s * q + shift is computed before the product. What a step computes once for all lanes of a
warp is in `StepFactors`; all else is read where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Program, Tile
from lowbit.passes.kernels.scales_zeros import ScalesZeros
from lowbit.passes.kernels.streaming.group_numbers import GroupNumbers
from lowbit.passes.kernels.streaming.operands import Operands
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.kernels.streaming.step_factors import StepFactors


class Factors:
    """The factors of a block's rows, in program `p`.

    layout  of a number for each row of the tile [warps_k, rows, 1], as the lanes have the rows of its sums
    """

    def __init__(self, p: Program, plan: KernelPlan, operands: Operands, convert: ScalesZeros, sums: Layout) -> None:
        """sums: the layout of the tile's sums [warps_k, rows, columns]."""
        self.p, self.plan, self.spec, self.convert = p, plan, plan.spec, convert
        self.layout = sums.reduce((2,))
        self._first_block, self._row_boundary = operands.first_block, operands.row_boundary
        self._weight_element = compute_element(plan.spec.dtype, plan.spec.act)
        self.numbers = GroupNumbers(p, plan, operands, convert)
        self._of_step = self._make_step_factors(operands)
        self._row_zero = self.of_rows("zeros") if plan.zeros_in_decode and not plan.groups else None

    def _make_step_factors(self, operands: Operands) -> StepFactors | None:
        if not self.plan.step_factors:
            return None
        element = self._weight_element if self.plan.rounds_scales else "f32"
        factors = StepFactors(self.p, self.plan, self.layout, element)
        operands.buffers.append(factors.buffer)
        return factors

    # -- numbers

    def of_group(self, name: str, group: int) -> Tile:
        """Loads a scale, zero or offset of every row in one group of the step, from shared memory, as f32."""
        layout = self.layout.reshape((self.plan.schedule.warps_k, self.plan.row_blocks, 1, ROWS))
        return self.p.reshape(self.numbers.load(name, group, layout), self.layout.shape)

    def of_rows(self, name: str) -> Tile:
        """Loads the scale, zero or offset of every row, from device memory, as f32."""
        p, warps, blocks = self.p, self.plan.schedule.warps_k, self.spec.packing.row_blocks
        kind = self.spec.slot(name).storage
        view = p.global_view(p[name], ScalesZeros.element(kind), (warps, blocks, ROWS), (0, ROWS, 1))
        layout = self.layout.reshape((warps, self.plan.row_blocks, ROWS))
        loaded = p.load(view, (0, self._first_block, 0), layout, ("none", self._row_boundary, "none"))
        return p.reshape(self.convert.as_f32(loaded, kind), self.layout.shape)

    def begin_step(self) -> None:
        """Computes what the lanes of a warp share in this step."""
        self.numbers.fill()
        if shared := self._of_step:
            shared.fill(lambda: self._shared_numbers(shared))

    def _shared_numbers(self, shared: StepFactors) -> dict[str, Tile]:
        """Returns the factors of all groups of the step, by name."""

        def load(name: str) -> Tile:
            return shared.rows_first(self.numbers.load(name, 0, shared.layout))

        scale, shift = self._scale_and_shift(load, "shifts" in self.plan.step_factors)
        return {"scales": scale} | ({} if shift is None else {"shifts": shift})

    # -- of sums

    def add_scaled(self, total: Tile, product: Tile, group: int, sums_of_x: Tile | None) -> Tile:
        """Returns total + scale * product, and + shift * (sums of x) where zeros or offsets are still to add."""
        p = self.p
        scale, shift = self._of_sums(group, sums_of_x is not None)
        total = p.fma(product, scale, total)
        return total if shift is None or sums_of_x is None else p.fma(shift, sums_of_x, total)

    def scale_rows(self, total: Tile, *sums_of_x: Tile) -> Tile:
        """Returns a warp's sums over all of its columns times the scales of rows, with zeros or offsets added."""
        p = self.p
        scale = self.of_rows("scales")
        result = p.mul(total, self.convert.with_exponent(scale))
        if sums_of_x:
            result = p.fma(self._shift(scale, self.of_rows), sums_of_x[0], result)
        return result

    def _of_sums(self, group: int, shifted: bool) -> tuple[Tile, Tile | None]:
        """Returns the factor of a group's sums and, if `shifted`, that of the sums of x."""
        if self._of_step:
            names = ("scales", "shifts")[: 1 + shifted]
            scale, *shift = (self._of_step.load(name, group) for name in names)
            return scale, shift[0] if shift else None
        return self._scale_and_shift(lambda name: self.of_group(name, group), shifted)

    def _scale_and_shift(self, load: Callable[[str], Tile], shifted: bool) -> tuple[Tile, Tile | None]:
        """Returns a scale with the power of two that decoding left out and, if `shifted`, the shift that goes with it.
        load: gives scales, zeros and offsets, by name, as f32."""
        scale = load("scales")
        return self.convert.with_exponent(scale), self._shift(scale, load) if shifted else None

    def _shift(self, scale: Tile, load: Callable[[str], Tile]) -> Tile:
        """Returns what sums of x are multiplied by, or what is added to scaled weights."""
        p, zeros, convert = self.p, self.spec.zeros, self.convert
        if zeros == "offset":
            return convert.with_code_offset(load("offsets"), scale)
        if zeros == "none":
            return p.mul(scale, p.constant(-convert.offset, "f32", scale.layout))
        return p.mul(scale, convert.minus_zero(load("zeros")))

    # -- of weights

    def minus_zeros(self) -> list[Tile]:
        """Returns minus the integer zeros of each group, or of rows, which decoding subtracts for nothing: q - z is
        exact. There are none where zeros are subtracted elsewhere."""
        if not self.plan.zeros_in_decode:
            return []
        by_group = [self.of_group("zeros", group) for group in range(self.plan.groups)]
        stored = by_group if self._row_zero is None else [self._row_zero]
        return [self._as_weight(self.convert.minus_zero(zero)) for zero in stored]

    def of_weights(self, codes: Tile, group: int) -> Tile:
        """Returns decoded codes less their zeros, and scaled, as far as that is done before they are multiplied:
        q, q - z, s * q, or s * q + (- s * z), or s * q + o, which is one instruction for both."""
        p, plan, minus, scale = self.p, self.plan, None, None
        if plan.code_power:
            codes = codes * 2.0**plan.code_power
        if self._of_step and plan.rounds_scales:
            return self._scaled_by_step(codes, self._of_step, group)
        if plan.rounds_zeros and self.spec.zeros == "float":
            minus = self._as_weight(self.convert.minus_zero(self.of_group("zeros", group)))
        if plan.rounds_scales:
            scale = self._as_weight(self.convert.with_exponent(self.of_group("scales", group)))
        if plan.rounds_zeros and self.spec.zeros == "offset" and scale is not None:
            return p.fma(codes, scale, self._as_weight(self.of_group("offsets", group)))
        if minus is not None and scale is not None:
            return p.fma(codes, scale, p.mul(scale, minus))
        if minus is not None:
            return p.add(codes, minus)
        return p.mul(codes, scale) if scale is not None else codes

    def _scaled_by_step(self, codes: Tile, shared: StepFactors, group: int) -> Tile:
        """Returns s * q, or s * q + shift."""
        scale = shared.load("scales", group)
        if self.plan.rounds_zeros:
            return self.p.fma(codes, scale, shared.load("shifts", group))
        return self.p.mul(codes, scale)

    def _as_weight(self, number: Tile) -> Tile:
        return self.p.cast(number, self._weight_element)
