"""The matrices of a module that can be quantized: one of a linear layer, two of each expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from lowbit.pylib.nn.experts import MATRICES, count_of, dense_bias, dense_weight, is_experts
from lowbit.pylib.nn.linear_like import as_linear


@dataclass(frozen=True)
class Matrix:
    """A matrix of a module.

    weight   [n, k], a view of the module's parameter
    bias     [n]; None without
    """

    weight: Tensor
    bias: Tensor | None


def matrices_of(module: nn.Module) -> list[Matrix]:
    """Returns the matrices of a linear layer or of experts, in the order of `sources_of`."""
    if not is_experts(module):
        linear = as_linear(module)
        return [Matrix(linear.weight.detach(), linear.bias)]
    found: list[Matrix] = []
    for name in MATRICES:
        weights, biases = dense_weight(module, name).detach(), dense_bias(module, name)
        experts = range(count_of(module))
        found += [Matrix(weights[e], None if biases is None else biases[e]) for e in experts]
    return found


@contextmanager
def replaced(matrices: Sequence[Matrix], values: Sequence[Tensor]) -> Iterator[None]:
    """Puts other values into matrices for a while."""
    own = [matrix.weight.clone() for matrix in matrices]
    try:
        for matrix, value in zip(matrices, values, strict=True):
            matrix.weight.copy_(value)
        yield
    finally:
        for matrix, value in zip(matrices, own):
            matrix.weight.copy_(value)
