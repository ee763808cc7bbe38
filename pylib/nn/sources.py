"""Where the inputs of a matrix can be seen while a model runs: at its linear layer, or at the experts that it is of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lowbit.pylib.nn.experts import MATRICES, count_of, dense_bias, dense_weight, is_experts
from lowbit.pylib.nn.linear_like import as_linear


@dataclass(frozen=True)
class Source:
    """Where the inputs of one matrix can be seen.

    name       of the layer, or of the matrix of an expert
    module     whose calls are looked at
    k          columns of the matrix
    inputs     returns the inputs of the matrix [..., k] for the arguments of a call of the module
    required   whether calibration without any input is an error; experts may have none
    """

    name: str
    module: nn.Module
    k: int
    inputs: Callable[..., Tensor]
    required: bool = True


def sources_of(name: str, module: nn.Module) -> list[Source]:
    """Returns where to see the inputs of a linear layer, or of the matrices of experts: gate_up of each, then down."""
    if not is_experts(module):
        return [Source(name, module, as_linear(module).in_features, _of_linear)]
    sizes = {matrix: dense_weight(module, matrix).shape[2] for matrix in MATRICES}
    return [
        Source(f"{name}.{matrix}[{expert}]", module, sizes[matrix], partial(inputs, module, expert), required=False)
        for matrix, inputs in zip(MATRICES, (_of_gate_up, _of_down))
        for expert in range(count_of(module))
    ]


def _of_linear(*args: Tensor, **kwargs: Tensor) -> Tensor:
    return args[0] if args else kwargs["input"]


def _of_gate_up(_: nn.Module, expert: int, hidden_states: Tensor, top_k_index: Tensor, *__: Any, **___: Any) -> Tensor:
    """Returns the tokens that an expert gets."""
    return hidden_states[(top_k_index == expert).any(-1)]


def _of_down(dense: Any, expert: int, *args: Any, **kwargs: Any) -> Tensor:
    """Returns what an expert makes of its tokens before the second matrix."""
    x, biases = _of_gate_up(dense, expert, *args, **kwargs), dense_bias(dense, "gate_up_proj")
    weight = dense_weight(dense, "gate_up_proj")[expert]
    return dense._apply_gate(nn.functional.linear(x, weight, None if biases is None else biases[expert]))
