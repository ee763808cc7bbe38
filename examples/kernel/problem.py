"""What all versions compute, and the check of their results.

    y[t, n] = sum over k of x[t, k] * scale[n, k / 128] * code[n, k]

with up to 8 tokens, x and y in f16, and signed 4-bit codes in groups of 128 columns. Scales are numbers of 7 bits, so
that a scaled weight is exact in f16: all versions have to meet the same narrow bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.weights.packed import PackedWeight, pack

WEIGHT = dtype("i4")
GROUP = 128
TOKENS = 8
PARAMS = {"x": "pointer", "codes": "pointer", "scales": "pointer", "y": "pointer", "m": "i32"}


@dataclass(frozen=True)
class Problem:
    """Random numbers for one shape."""

    n: int
    k: int
    m: int

    @property
    def spec(self) -> MatmulSpec:
        return MatmulSpec(self.n, self.k, WEIGHT.name, GROUP)

    @cached_property
    def x(self) -> Tensor:
        return torch.randn(self.m, self.k, generator=_numbers()).half()

    @cached_property
    def weight(self) -> PackedWeight:
        return pack(self.spec, *self.codes_and_scales)

    @cached_property
    def codes_and_scales(self) -> tuple[Tensor, Tensor]:
        codes = torch.randint(-8, 8, (self.n, self.k), generator=_numbers())
        scales = torch.randint(64, 128, (self.n, self.k // GROUP), generator=_numbers())
        return codes, (scales / 8192).half()

    def worst(self, y: Tensor) -> float:
        """Returns the largest error of y [m, n], as a part of what rounding explains; more than 1 is wrong."""
        codes, scales = self.codes_and_scales
        x, w = self.x.double(), codes.double() * scales.double().repeat_interleave(GROUP, dim=1)
        expected, magnitude = x @ w.T, x.abs() @ w.abs().T
        # Two roundings to f32 of a sum, which is at most sum |x w|, for every mma of 16 columns, and one of y to f16.
        bound = self.k / 8 * 2.0**-23 * magnitude + 2.0**-11 * expected.abs() + 2.0**-25
        error = ((y.double().cpu() - expected).abs() / bound).nan_to_num(nan=torch.inf)
        return float(error.max())


def _numbers() -> torch.Generator:
    return torch.Generator().manual_seed(0)
