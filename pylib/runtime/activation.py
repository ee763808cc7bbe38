"""Activations of 8 bits: what they are, in torch, and a value that several matmuls can share.

`quantize_rows` is the definition: on a GPU, in the emulator and on a CPU the numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.formats.byte_codes import (
    COMPUTE,
    LARGEST,
    LEAST_PEAK,
    MOST_COLUMNS,
    SUM_COLUMNS,
    Compute,
    byte_order,
    reciprocal_of_largest,
)
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.tensor_checks import check_storage

Quantized = tuple[Tensor, Tensor, Tensor]
"""values [.., k], scales [..] and sums [.., k / 32]"""
VALUES: dict[Compute, torch.dtype] = {"f8e4m3": TORCH["e4m3"], "i8": TORCH["i8"]}


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """An activation of 8 bits, for any number of matmuls with the same `compute` and k. Made by `quantize_activation`.

    values   [..., k] in torch.float8_e4m3fn or torch.int8; the columns of every 16 are in the kernels' order
    scales   [...] in f32: x is about values * scales
    sums     [..., k / 32] in f32: of every 32 values, which kernels need for zero points and signed codes
    compute  the type in which matmuls multiply it: "f8e4m3" or "i8"
    """

    values: Tensor
    scales: Tensor
    sums: Tensor
    compute: Compute

    @property
    def shape(self) -> torch.Size:
        """Shape of x."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.values.device

    @property
    def tensors(self) -> Quantized:
        """Values, scales and sums, as operators take them."""
        return self.values, self.scales, self.sums

    def dequantize(self) -> Tensor:
        """Returns the values times their scales, in f32 and in the order of the columns of x."""
        return in_column_order(self.values).float() * self.scales.unsqueeze(-1)


def from_values(x: Tensor, scales: Tensor | None, compute: Compute) -> QuantizedActivation:
    """Returns an activation that comes in 8 bits. Raises SpecError where its type or its scales do not fit."""
    check_rows(x)
    check_storage("x", x, SpecError)
    expected = VALUES[compute]
    if x.dtype is not expected:
        raise SpecError(f"x is {x.dtype}, but compute={compute!r} takes values in {expected}; quantize it anew")
    if scales is None:
        shape = list(x.shape[:-1])
        raise SpecError(f"x is {x.dtype} and needs its scales, one per row: x_scale= must be f32 {shape}")
    if not isinstance(scales, Tensor) or scales.dtype is not torch.float32 or scales.shape != x.shape[:-1]:
        given = f"{scales.dtype} {list(scales.shape)}" if isinstance(scales, Tensor) else type(scales).__name__
        raise SpecError(f"the scales of x must be torch.float32 {list(x.shape[:-1])}, one per row, not {given}")
    if scales.device != x.device:
        raise TargetError(f"x is on {x.device}, but its scales are on {scales.device}; move one of them")
    return QuantizedActivation(*arranged(x, scales), compute)


def check_rows(x: Tensor) -> None:
    """Raises SpecError unless x has rows that can be quantized."""
    if not isinstance(x, Tensor):
        raise SpecError(f"x must be a torch tensor, not {type(x).__name__}; use torch.as_tensor(x)")
    k = x.shape[-1] if x.ndim else 0
    if not k or k % SUM_COLUMNS or k > MOST_COLUMNS:
        rule = f"k a multiple of {SUM_COLUMNS} up to {MOST_COLUMNS}"
        raise SpecError(f"x must be [..., k] with {rule}, not {list(x.shape)}")


def compute_of(given: object) -> Compute:
    """Returns the type that is meant. Raises SpecError for one that is none."""
    for name in COMPUTE:
        if given == name:
            return name
    raise SpecError(f"compute={given!r} must be one of {', '.join(map(repr, COMPUTE))}")


# -- the definition


def quantize_rows(x: Tensor, compute: Compute) -> tuple[Tensor, Tensor]:
    """Returns values [..., k], in the order of the columns, and scales [...]: the definition of both."""
    wide = x.float()
    peak = wide.abs().amax(-1)
    scales = torch.where(peak < LEAST_PEAK, LEAST_PEAK, peak) * reciprocal_of_largest(compute)  # NaN stays NaN
    scaled = wide * scales.reciprocal().unsqueeze(-1)
    largest = LARGEST[compute]
    if compute == "i8":
        scaled = scaled.nan_to_num(0.0).round()
    return scaled.clamp(-largest, largest).to(VALUES[compute]), scales


def arranged(values: Tensor, scales: Tensor) -> Quantized:
    """Returns the three tensors that kernels read, of values in the order of the columns."""
    numbers = values.float().view(*values.shape[:-1], values.shape[-1] // SUM_COLUMNS, SUM_COLUMNS)
    return _reordered(values, byte_order().tolist()), scales.contiguous(), numbers.sum(-1)


def in_column_order(values: Tensor) -> Tensor:
    """Returns values that are in the kernels' order in the order of the columns."""
    return _reordered(values, byte_order().argsort().tolist())


def quantize_in_torch(x: Tensor, compute: Compute) -> Quantized:
    """Returns the three tensors that the quantize kernel makes."""
    return arranged(*quantize_rows(x, compute))


def _reordered(values: Tensor, order: Sequence[int]) -> Tensor:
    """Returns values whose every 16 columns are those of `order`."""
    as_bytes = values.contiguous().view(torch.uint8)
    pieces = as_bytes.view(*values.shape[:-1], values.shape[-1] // BLOCK_K, BLOCK_K)
    return pieces[..., order].view(values.shape).view(values.dtype)
