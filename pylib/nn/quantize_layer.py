"""One weight quantized and packed, and how far it has moved: `quantize_` does this to each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.config import QuantConfig


@dataclass(frozen=True)
class Change:
    """How far quantizing has moved weights, which add up.

    squared   sum of the squares of the differences
    norm      sum of the squares of the weights
    """

    squared: float = 0.0
    norm: float = 0.0

    def __add__(self, other: Change) -> Change:
        return Change(self.squared + other.squared, self.norm + other.norm)

    @property
    def relative(self) -> float:
        """The norm of the change relative to the norm of the weights."""
        return math.sqrt(self.squared / self.norm) if self.norm else 0.0


def quantized_layer(
    weight: Tensor,
    bias: Tensor | None,
    spec: MatmulSpec,
    config: QuantConfig,
    calibration: Calibration | None = None,
    device: torch.device | str | None = None,
    columns: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[LowbitLinear, Change]:
    """Returns a layer for a weight [n, k], where the weight is, and how far its values have moved.

    device    where to quantize; None: where the weight is
    columns   scales [k] of the columns, which the layer before divides its output by; None: ones
    rows      what the rows [n] and the bias are divided by, which the layer after makes up for; None: ones
    """
    home = weight.device
    weight = weight.detach().to(device or home)
    bias = None if bias is None else bias.detach().to(weight.device)
    factors = _factors(weight, columns, rows)
    if factors is not None:
        weight = weight.float() * factors
        bias = bias if bias is None or rows is None else bias.float() / rows.to(bias.device)
    quantized = quantize(weight, config, calibration)
    packed = quantized.pack(spec, bias).to(home)
    difference = quantized.dequantize().sub_(weight)
    if factors is not None:
        difference, weight = difference.div_(factors), weight.div_(factors)
    change = Change(float(difference.norm()) ** 2, float(weight.float().norm()) ** 2)
    return LowbitLinear.from_packed(packed), change


def _factors(weight: Tensor, columns: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Returns what a weight is multiplied by before it is rounded, in a shape that fits it; None: nothing."""
    factors = None if columns is None else columns.to(weight.device)
    if rows is not None:
        divided = 1 / rows.to(weight.device)[:, None]
        factors = divided if factors is None else divided * factors
    return factors
