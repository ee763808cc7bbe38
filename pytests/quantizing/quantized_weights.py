"""Weights and inputs for quantizers, and how far an output is off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lowbit

CONFIG: Any = lowbit.QuantConfig


def weight_of(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def inputs_of(tokens: int, k: int, seed: int = 1) -> Tensor:
    """Inputs as layers have them: columns depend on each other, and some are much larger."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, k, generator=generator) @ torch.randn(k, k, generator=generator) / k**0.5
    return mixed * torch.rand(k, generator=generator).pow(4).mul(5).add(0.1)


def output_error(weight: Tensor, other: Tensor, x: Tensor) -> float:
    return float(((weight - other).double() @ x.double().T).square().sum())


def same(a: lowbit.QuantizedWeight, b: lowbit.QuantizedWeight) -> bool:
    tensors = [(getattr(a, name), getattr(b, name)) for name in ("codes", "scales", "zeros", "column_scales")]
    return all((s is None and t is None) or torch.equal(s.float(), t.float()) for s, t in tensors)
