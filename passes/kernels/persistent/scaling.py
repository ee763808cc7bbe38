"""Where persistent kernels apply the scales of a weight: `Scaling`. No MLIR is needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lowbit.dialect.formats.byte_codes import sums_correct
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.formats.raw_codes import can_be_raw, zero_code
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.round import Round
from lowbit.passes.kernels.requirements import has_scales_of_x
from lowbit.passes.kernels.scales.in_order import scales_products, scales_weights

GROUPS_AT_ONCE = 4  # whose numbers a lane reads at once where a warp computes those of a panel


class Scaled(Enum):
    """What scales multiply, and in which type.

    SUMS            the sums of all columns, at the end of a tile: scales of whole rows
    PRODUCTS        products of a group, which are added to sums: of bytes, and of some where an order of sums is given
    WEIGHTS         weights, in x's type, of which scales are numbers; they are rounded as `dequantize` rounds them. In
                    a given order of sums, scales of a second level are rounded to x's type first
    WEIGHTS_IN_TWO  the same with two numbers of x's type that add up to a scale: 16 of its bits in bf16, which has the
                    range of f32. So s_high q + s_low q is as good as rounded once
    WEIGHTS_BY_PANEL  the same with numbers that a warp computes once for a panel (`PanelScales`): 22 bits in f16
    WEIGHTS_IN_F32  weights in f32, rounded then, as `dequantize` does it
    """

    SUMS = "sums"
    PRODUCTS = "products"
    WEIGHTS = "weights"
    WEIGHTS_IN_TWO = "weights in two"
    WEIGHTS_BY_PANEL = "weights by panel"
    WEIGHTS_IN_F32 = "weights in f32"


def multiplies_raw_codes(spec: MatmulSpec) -> bool:
    """Tells whether codes may be multiplied as they are stored, where sums are scaled: there is nothing to subtract, or
    sums of x make up for it."""
    nothing = spec.dtype.kind == "uint" and spec.zeros == "none"
    return (nothing or spec.zeros in ("float", "offset")) and can_be_raw(
        spec.dtype, compute_element(spec.dtype, spec.act)
    )


@dataclass(frozen=True)
class Scaling:
    """How a round's scales are applied, and what else is done to codes."""

    spec: MatmulSpec
    round: Round

    @cached_property
    def scaled(self) -> Scaled:
        """What scales multiply: of an order of sums what they multiply in kernels for few tokens."""
        if self.round.schedule.order:
            if scales_weights(self.spec):
                return Scaled.WEIGHTS
            return Scaled.PRODUCTS if scales_products(self.spec) else Scaled.SUMS
        return self._of_bytes if self.spec.compute else self._of_numbers

    @property
    def _of_bytes(self) -> Scaled:
        spec = self.spec
        if spec.folds:
            return Scaled.WEIGHTS if spec.folds_in_f16 else Scaled.WEIGHTS_IN_F32
        return Scaled.SUMS if spec.group_size is None else Scaled.PRODUCTS

    @property
    def _of_numbers(self) -> Scaled:
        spec = self.spec
        late = spec.group_size is None and spec.zeros in ("none", "int") and not spec.outliers
        if late and self._decodes_to_x:
            return Scaled.SUMS
        if self._has_exact_scales:
            return Scaled.WEIGHTS
        if self._shares_second_level:
            return Scaled.WEIGHTS_BY_PANEL
        rounds_added = not spec.outliers and (spec.zeros != "offset" or spec.bilevel is not None)
        in_two = spec.act == "bf16" and self._decodes_to_x and rounds_added  # what is added is rounded before
        return Scaled.WEIGHTS_IN_TWO if in_two else Scaled.WEIGHTS_IN_F32

    @property
    def _decodes_to_x(self) -> bool:
        """Whether codes are numbers of x's type."""
        return compute_element(self.spec.dtype, self.spec.act) == self.spec.act

    @property
    def _has_exact_scales(self) -> bool:
        """Whether scales and codes are numbers of x's type."""
        spec = self.spec
        exact = has_scales_of_x(spec) and not spec.bilevel and not self.rows_early
        return exact and self._decodes_to_x and (spec.dtype.kind != "table" or self.exponent == 0)

    @property
    def _shares_second_level(self) -> bool:
        """Whether all 16 rows of a row block share the second level of their scales and zeros, f16 numbers of small
        groups. What a scale lacks as a sum of two f16 numbers is less than half the least subnormal."""
        spec, bilevel, groups = self.spec, self.spec.bilevel, self.panel_groups
        if bilevel is None or not self.round.engine.asynchronous or spec.zeros == "int" or self.rows_early:
            return False
        shared = bilevel.rows == ROWS and bilevel.lanes(spec.packing) == bilevel.groups == 1
        in_f16 = spec.act == bilevel.scale == compute_element(spec.dtype, spec.act) == "f16"
        return shared and in_f16 and groups > 0 and groups % GROUPS_AT_ONCE == 0

    @property
    def of_weights(self) -> bool:
        """Tells whether weights are scaled before they are multiplied, and so rounded to x's type."""
        return self.scaled not in (Scaled.SUMS, Scaled.PRODUCTS)

    @property
    def in_rounds(self) -> bool:
        """Tells whether scales of groups are needed in every round, and not at the end of a tile."""
        return self.scaled is not Scaled.SUMS

    @property
    def in_f32(self) -> bool:
        """Tells whether weights are scaled in f32."""
        return self.scaled is Scaled.WEIGHTS_IN_F32

    @property
    def panel_numbers(self) -> tuple[str, ...]:
        """Numbers that a warp computes once for a panel: a scale as two of x's type, and what is added; none where
        every lane computes its own."""
        if self.scaled is not Scaled.WEIGHTS_BY_PANEL:
            return ()
        return ("high", "low") if self.spec.zeros == "none" else ("high", "low", "added")

    @property
    def panel_groups(self) -> int:
        """Groups of a panel, where they are whole; 0 where they are not."""
        group, width = self.spec.packing.padded_group, self.round.schedule.panel_k
        return width // group if group and width % group == 0 else 0

    @property
    def rows_early(self) -> bool:
        """Tells whether scales of rows multiply weights, and not sums: outliers are not scaled."""
        return self.spec.row_scales and self.spec.outliers

    @property
    def groups(self) -> int:
        """Parts of a round that have one scale; 0 where scales are for sums."""
        group = self.spec.packing.padded_group
        if not self.in_rounds:
            return 0
        return 1 if group is None else self.round.step // math.gcd(self.round.run, group)

    @property
    def raw_codes(self) -> bool:
        """Tells whether codes are multiplied as they are stored, with no subtraction."""
        spec = self.spec
        if self.round.schedule.order:
            return multiplies_raw_codes(spec) and not self.of_weights
        return not self.groups and spec.zeros == "none" and multiplies_raw_codes(spec)  # scales lack powers of two

    @property
    def stored_offset(self) -> float:
        """By how much the multiplied codes are too large: signed codes are in offset binary."""
        return zero_code(self.spec.dtype) if self.raw_codes else 0.0

    @property
    def sums_x(self) -> bool:
        """Tells whether sums of x make up for zeros and offsets; where an order of sums is given, beside x in f8e4m3,
        too, as in kernels for few tokens, and beside x in i8 for differences of codes and zeros that are no bytes."""
        spec = self.spec
        if spec.compute:
            needed = sums_correct(spec.dtype, spec.compute, spec.zeros)
            exact = spec.compute == "i8" and spec.dtype.bits < 8
            return self.round.schedule.order is not None and needed and not exact
        return not self.of_weights and spec.zeros in ("float", "offset")

    @property
    def exponent(self) -> int:
        """The power of two that decoding leaves out."""
        return exponent(self.spec.dtype, compute_element(self.spec.dtype, self.spec.act))

    @property
    def rounding(self) -> dict[str, bool]:
        """What the kernel rounds besides its sums, as arguments of `pylib.reference.tolerance`."""
        rounds_zeros = self.of_weights and not self.in_f32 and self.spec.zeros == "float"
        rounding = {"dequantized": self.of_weights, "rounded_zeros": rounds_zeros}
        return rounding | ({"rounded_outliers": True} if self.spec.outliers else {})
