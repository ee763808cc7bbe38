"""What is scaled, weights or sums, and which number takes which part of the power of two that decoding leaves out.
No MLIR is needed.

Sums are scaled late: once per group and accumulator instead of once per weight. With wgmma it is cheaper in some cases
to scale weights before they are multiplied (`Scaling.rounds_scales`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lowbit.dialect.formats.byte_codes import byte_exponent
from lowbit.dialect.formats.recipes import compute_element, exponent
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.requirements import has_scales_of_x
from lowbit.passes.kernels.scales.in_order import scales_weights
from lowbit.passes.kernels.streaming.steps import Steps

IN_PLACE, MOST_IN_PLACE = 32, 64  # columns of a group and tokens up to which sums of scaled weights stay in place
MOST_SCALED = 128  # tokens for which a thread has registers for a group's sums beside all of k's


@dataclass(frozen=True)
class Scaling:
    """Whether weights are scaled before they are multiplied, and the powers of two of codes, scales and sums."""

    spec: MatmulSpec
    schedule: Schedule
    steps: Steps

    @property
    def rounds_zeros(self) -> bool:
        """Whether zeros (or scaled ones), and codes less zeros, are rounded to x's type: where zeros are no integers,
        and the sums of x that would make up for them would cost as much as 64 rows of products, or where all kernels
        of an order scale weights. Offsets are added to codes that have been scaled, so scales must be numbers of x's
        type for that."""
        zeros = self.spec.zeros
        if self.spec.invariant:
            return self.rounds_scales and zeros in ("float", "offset")
        wanted = zeros == "float" or (zeros == "offset" and self._scales_like_x)
        return self.schedule.wgmma and wanted and self.steps.groups > 0 and self._decodes_values

    @cached_property
    def rounds_scales(self) -> bool:
        """Whether weights are scaled before they are multiplied, and so rounded to x's type, as by `dequantize`. Scales
        must be numbers of x's type. It is done

        - in groups with no more columns than there are tokens: weights, two to an instruction, take fewer
          multiplications than sums;
        - in groups of up to twice as many columns, where scales are computed and sums stay in place: no product has to
          be waited for;
        - with float zeros: the instruction that subtracts them scales as well;
        - with so many tokens that there are registers for one set of sums only.

        Where one result serves every number of tokens all kernels do it, or none (`scales_weights`).
        """
        s, group = self.schedule, self.spec.packing.padded_group
        if self.spec.invariant:
            return scales_weights(self.spec) and not s.raw_codes
        if not s.wgmma or group is None or self.spec.compute:
            return False
        most = s.tokens * (2 if self.computes_scales and self.has_small_groups else 1)
        less = group <= most or self.rounds_zeros or s.tokens > MOST_SCALED
        return less and self._scales_like_x and self._decodes_values

    @property
    def computes_scales(self) -> bool:
        """Whether scales take some computing: codes, and bytes of e4m3."""
        return self.spec.bilevel is not None or self.spec.scale == "e4m3"

    @property
    def has_small_groups(self) -> bool:
        """Whether groups and tokens are so few that the sums of scaled weights may stay in place."""
        group = self.spec.packing.padded_group
        return group is not None and group <= IN_PLACE and self.schedule.tokens <= MOST_IN_PLACE

    @property
    def _scales_like_x(self) -> bool:
        """Whether scales are numbers of x's type, or codes, whose numbers are rounded to it."""
        return has_scales_of_x(self.spec) or self.spec.bilevel is not None

    @property
    def _decodes_values(self) -> bool:
        """Whether codes can be decoded to their values: with no power of two left out but that of a float format whose
        products with scales of e4m3 have fewer digits than f16."""
        t, scale = self.spec.dtype, self.spec.scale
        short = t.kind == "float" and t.mantissa <= 6 and scale == "e4m3" and not self.spec.bilevel
        return not self.schedule.raw_codes and (self.exponent == 0 or (short and self.exponent > 0))

    @property
    def exponent(self) -> int:
        """The power of two that decoding leaves out."""
        t = self.spec.dtype
        return exponent(t, compute_element(t, self.spec.act))

    @property
    def code_power(self) -> int:
        """The part of this power by which decoded codes are multiplied: all of it where zeros or offsets are added to
        scaled weights. Divided by it, these would have too few digits in f16."""
        return self.exponent if self.rounds_zeros else 0

    @property
    def scale_power(self) -> int:
        """The part of this power by which scales are multiplied: all of it where sums are scaled; where weights are, as
        little as makes every product with a scale of e4m3 a multiple of f16's least number. Codes that are multiplied
        as bytes leave out a power of their own, which scales take."""
        if self.spec.compute:
            return byte_exponent(self.spec.dtype, self.spec.compute, self.spec.zeros)
        if not self.rounds_scales or self.exponent <= 0:
            return self.exponent
        return 0 if self.code_power else max(0, self.spec.dtype.mantissa - 1)

    @property
    def sum_power(self) -> int:
        """The part of this power by which sums are multiplied at the end."""
        return 0 if self.spec.compute else self.exponent - self.code_power - self.scale_power
