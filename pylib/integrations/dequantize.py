"""Makes a low-bit model of transformers dense again."""

from __future__ import annotations

import torch
from torch import nn

from lowbit.dialect.errors import SpecError
from lowbit.pylib.integrations.saved import low_bit_layers
from lowbit.pylib.nn.embedding import LowbitEmbedding, TiedLinear
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.rotated import RotatedLinear


def dequantize_model(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Puts dense layers in the places of low-bit ones. Raises SpecError for a model with experts."""
    for name, layer in list(low_bit_layers(model)):
        if isinstance(model.get_submodule(".".join(name.split(".")[:-2])), LowbitExperts):
            raise SpecError(f"{name}: experts can't be dequantized; load the dense checkpoint")
        if isinstance(layer, LowbitLinear | RotatedLinear):
            model.set_submodule(name, layer.to_linear(dtype))
        elif isinstance(layer, LowbitEmbedding):
            _dequantize_embedding(model, name, layer, dtype)


def _dequantize_embedding(model: nn.Module, name: str, table: LowbitEmbedding, dtype: torch.dtype | None) -> None:
    """Put a dense embedding in the place of a low-bit one, and dense layers that share its table."""
    dense = table.to_embedding(dtype)
    model.set_submodule(name, dense)
    for head, layer in list(model.named_modules()):
        if isinstance(layer, TiedLinear) and layer.embedding is table:
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
            linear.weight = dense.weight
            linear.register_parameter("bias", layer.bias)
            model.set_submodule(head, linear)
