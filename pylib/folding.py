"""Weights whose scales are folded into numbers of f8e4m3 (`MatmulSpec.fold_scales`): the scales of rows that `pack`
chooses for them, and the numbers that are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.dialect.formats.byte_codes import LARGEST
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.dequantized import dequantize, numbers
from lowbit.pylib.torch_types import TORCH

_EXPONENTS = -126, 127  # of scales of rows: the normal numbers of f32


def with_row_scales(spec: MatmulSpec, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as `pack` takes them, where a power of two has gone from the scales of every row to the scale of
    the row: the least with which no weight of the row is beyond the largest number of f8e4m3.

    Scales stay exact, but for those that become subnormal numbers of their type.
    """
    exponent = _exponents(_largest(spec, values))
    one = torch.ones_like(exponent, dtype=torch.float64)
    scales = torch.ldexp(values["scales"].double(), -exponent)
    of_rows = torch.ldexp(values["row_scales"].double().view(-1, 1) if "row_scales" in values else one, exponent)
    return {**values, "scales": scales, "row_scales": of_rows[:, 0]}


def _largest(spec: MatmulSpec, values: Mapping[str, Tensor]) -> Tensor:
    """Returns a bound of the weights of each row [n, 1]: that of a group is its scale times the largest value less
    zero."""
    decoded = spec.dtype.values()
    decoded = decoded[abs(decoded) < float("inf")]
    zeros = values["zeros"].double() if "zeros" in values else torch.zeros(())
    value = torch.maximum((float(decoded.min()) - zeros).abs(), (float(decoded.max()) - zeros).abs())
    return (values["scales"].double().abs() * value.to(values["scales"].device)).amax(1, keepdim=True)


def _exponents(largest: Tensor) -> Tensor:
    """Returns the least e with largest <= 448 * 2^e, and 0 for rows of zeros; numbers that are not finite are left to
    the checks of `pack`."""
    mantissa, exponent = torch.frexp(largest / LARGEST["f8e4m3"])  # mantissa in [0.5, 1)
    least = exponent - (mantissa == 0.5).int()
    return torch.where((largest > 0) & largest.isfinite(), least, 0).clamp(*_EXPONENTS)


def folded(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the weight [n, k] in f32 as kernels for many tokens multiply it: without the scale of its row, rounded to
    f16 and then to f8e4m3, to nearest even and to 448 at most; times the scale of the row."""
    plain = replace(spec, compute=None, fold_scales=False, row_scales=False)
    largest = LARGEST["f8e4m3"]
    near = dequantize(plain, tensors, torch.float16).float().clamp(-largest, largest).to(TORCH["e4m3"])
    return near.float() * numbers(spec, "row_scales", tensors)
