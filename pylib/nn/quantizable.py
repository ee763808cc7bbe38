"""The matrices of a module that can be quantized: one of a linear layer, two of each expert.

A matrix knows its weight, and how its inputs follow from a call of the module, which calibration looks at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lowbit.pylib.nn.dense_experts import (
    MATRICES,
    apply_gate,
    count_of,
    dense_bias,
    dense_weight,
    is_experts,
    sorted_routing,
)
from lowbit.pylib.nn.linear_like import as_linear


@dataclass(frozen=True)
class Matrix:
    """A matrix of a dense module.

    module      the linear layer, or the experts
    name        of the layer, or of an expert's matrix: "mlp.experts.down_proj[3]"
    parameter   of experts, one of `experts.MATRICES`; "" for a linear layer
    expert      which of the experts
    of_all      whether inputs are those that it would have if the tokens of all experts went to it
    """

    module: nn.Module
    name: str
    parameter: str = ""
    expert: int = 0
    of_all: bool = False

    @property
    def weight(self) -> Tensor:
        """A view [n, k] of the module's parameter."""
        if not self.parameter:
            return as_linear(self.module).weight.detach()
        return dense_weight(self.module, self.parameter)[self.expert].detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias [n], or None."""
        if not self.parameter:
            return as_linear(self.module).bias
        biases = dense_bias(self.module, self.parameter)
        return None if biases is None else biases[self.expert]

    def inputs(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the inputs [..., k] of the matrix for the arguments of a call of the module."""
        if not self.parameter:
            return args[0] if args else kwargs["input"]
        tokens = self._tokens(*args, **kwargs)
        if self.parameter == MATRICES[0]:
            return tokens
        gate_up, dense = replace(self, parameter=MATRICES[0]), self.module
        return apply_gate(dense, nn.functional.linear(tokens, gate_up.weight, gate_up.bias))

    def _tokens(self, hidden_states: Tensor, top_k_index: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        """Returns the tokens [tokens, hidden] that the expert gets in a call of experts, or all experts together."""
        experts = count_of(self.module)
        if top_k_index is None:
            top_k_index = sorted_routing(hidden_states, experts)[0]
        here = (top_k_index >= 0) & (top_k_index < experts) if self.of_all else top_k_index == self.expert
        return hidden_states[here.any(-1)]


def matrices_of(name: str, module: nn.Module) -> list[Matrix]:
    """Returns the matrix of a linear layer of this name, or those of experts: gate_up of each, then down of each."""
    if not is_experts(module):
        return [Matrix(module, name)]
    return [
        Matrix(module, f"{name}.{parameter}[{expert}]", parameter, expert)
        for parameter in MATRICES
        for expert in range(count_of(module))
    ]


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
