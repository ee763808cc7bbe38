"""Modules that compute what `nn.Linear` does under a name of their own.

They are known by their classes' full names, so that no library has to be imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

LINEARS: Mapping[str, bool] = {
    "torch.nn.modules.linear.Linear": False,
    "transformers.pytorch_utils.Conv1D": True,  # GPT-2
    "transformers.models.falcon.modeling_falcon.FalconLinear": False,
}
"""Classes, and whether their weight is [k, n]. A subclass may compute something else, and does not count."""


def is_linear(module: nn.Module) -> bool:
    """Tells whether a module is known to compute what nn.Linear does."""
    return full_name(module) in LINEARS


def may_be_low_bit(module: nn.Module | None) -> bool:
    """Tells whether a low-bit layer of a checkpoint can take the place of a module: it says that it was one."""
    return isinstance(module, nn.Linear) or (module is not None and is_linear(module))


def is_transposed(module: nn.Module) -> bool:
    """Tells whether a linear module has its weight as [k, n]."""
    return LINEARS.get(full_name(module), False)


def as_linear(module: nn.Module) -> nn.Linear:
    """Returns a linear module, or an nn.Linear that has its tensors and the weight as [n, k]."""
    if not is_transposed(module):
        return cast(nn.Linear, module)
    dense = cast(Any, module)
    weight = dense.weight.detach().T
    linear = nn.Linear(weight.shape[1], weight.shape[0], dense.bias is not None, "meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = dense.bias
    return linear.train(dense.training)


def full_name(module: object) -> str:
    """Returns the name of a module's class with that of its file."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
