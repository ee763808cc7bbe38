"""Scales and zeros that are codes: the second level of SpQR (`lowbit.Bilevel`).

    value[n, g] = S[n // rows, g] * (code[n, g] - B[n // rows, g])

S and B are rounded to the type in which they are stored before codes are chosen, and values are computed in f32, as
kernels do: what is quantized with them is what will be multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 2.0**-14  # the least normal number of f16
PRECISION = 2.0**-13  # an f16 number B with |B| <= 1 / PRECISION moves values by at most four steps S


class TwoLevels(NamedTuple):
    """Numbers [n, ...] as codes in uint8, with the S and B [n / rows, ...] of each block of rows."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def values(self, rows: int) -> Tensor:
        """Returns the numbers in f32."""
        block = torch.arange(len(self.codes), device=self.codes.device) // rows
        return (self.codes.float() - self.zeros.float()[block]) * self.scales.float()[block]

    @staticmethod
    def stack(groups: Sequence[TwoLevels]) -> TwoLevels:
        """Returns the numbers of several groups, a column for each."""
        return TwoLevels(*(torch.stack(tensors, dim=1) for tensors in zip(*groups)))


def coded(
    values: Tensor,
    rows: int,
    bits: int,
    kind: torch.dtype = torch.float16,
    cut: tuple[float, float] = (0.0, 0.0),
) -> TwoLevels:
    """Returns values [n] in f32 rounded to codes of some bits between the least and the largest of each `rows` of them;
    S and B have this type. Values above 0 stay above 0.

    cut: the parts of the range below and above whose values get the first and the last code
    """
    padded = torch.cat([values, values[-1:].expand(-len(values) % rows)]).view(-1, rows)
    low, high = padded.aminmax(dim=1, keepdim=True)
    low, high = low + cut[0] * (high - low), high - cut[1] * (high - low)
    most = (1 << bits) - 1
    scale = ((high - low) / most).to(kind).float()
    least = PRECISION * torch.maximum(low.abs(), high.abs())
    scale = torch.where(scale <= least, _power_above(least), scale)
    zero = (-low / scale).to(kind).float()
    zero = torch.where(low > 0, zero.clamp(max=-LEAST), zero)
    codes = (padded / scale + zero).round_().clamp_(0, most)
    return TwoLevels(codes.view(-1)[: len(values)].to(torch.uint8), scale[:, 0], zero[:, 0])


def _power_above(x: Tensor) -> Tensor:
    """Returns the least power of two above x that f16 holds; 1 for 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(mantissa), exponent).clamp(min=2.0**-24)
