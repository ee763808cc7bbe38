"""`LowbitExperts`: the experts of a mixture of experts, each of two low-bit linear layers.

transformers 5 keeps all experts of a layer in one module with two parameters of three dimensions, `gate_up_proj` and
`down_proj`. Here each expert has a `LowbitLinear` for either, so that it is saved, moved and checked like any other.

Which experts have tokens is known on the device alone. So a call asks for the numbers of tokens, waits for them, and
runs the experts that have any. While a CUDA graph is recorded or torch.compile traces, nothing can be waited for, and
every expert runs on every token: right, with static shapes, and slower the more experts there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lowbit.dialect.errors import QuantizeError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.nn.dense_weight import NoDense
from lowbit.pylib.nn.fuse import concatenated
from lowbit.pylib.nn.linear import LowbitLinear, act_of
from lowbit.pylib.quantization.config import QuantConfig

MATRICES = ("gate_up_proj", "down_proj")
"""The parameters of a dense module: [experts, rows, columns], or with columns first if it is transposed."""
LISTS = {"gate_up_proj": "gate_up", "down_proj": "down"}
"""Where `LowbitExperts` keeps the layers that are made of a parameter of dense experts."""


class LowbitExperts(NoDense):
    """The experts of one layer, with packed weights. Made by `empty_like`, or by `quantize_` and `from_pretrained`.

    gate_up, down   the two matrices of each expert
    """

    _dense = MATRICES

    def __init__(self, dense: nn.Module, gate_up: Sequence[LowbitLinear], down: Sequence[LowbitLinear]) -> None:
        super().__init__()
        self._dense_class = type(dense)
        plain = {name: value for name, value in vars(dense).items() if not name.startswith("_")}
        vars(self).update(plain)  # sizes and numbers that the gate reads, such as a limit
        for name, child in dense.named_children():
            self.add_module(name, child)  # the activation function
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self._group: Any = None  # the processes that have the parts of these experts
        self.train(dense.training)

    @classmethod
    def empty_like(
        cls,
        dense: nn.Module,
        specs: Sequence[MatmulSpec | Mapping[int, MatmulSpec]],
        device: torch.device | str | None = None,
    ) -> LowbitExperts:
        """Returns experts of zeros with these specs of gate_up and down, to load a state dictionary into.

        specs   one of all experts, or one by the number of each
        """
        experts = range(count_of(dense))
        each = (spec if isinstance(spec, Mapping) else dict.fromkeys(experts, spec) for spec in specs)
        return cls(dense, *([LowbitLinear.empty(of[expert], device) for expert in experts] for of in each))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Returns the sum of each token's experts, by their weights: [tokens, hidden].

        hidden_states   [tokens, hidden]
        top_k_index     [tokens, k]: experts of a token; the number of experts stands for none
        top_k_weights   [tokens, k]
        """
        result = self._sum(hidden_states, top_k_index, top_k_weights)
        if self._group is not None:
            if result.requires_grad:
                raise QuantizeError("experts in parts can't be trained beside; call them in torch.no_grad()")
            torch.distributed.all_reduce(result, group=self._group)
        return result

    def _sum(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        if is_compiling() or (hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()):
            for expert in range(len(self.gate_up)):
                weight = torch.where(top_k_index == expert, top_k_weights, 0).sum(-1, keepdim=True)
                term = self.expert(expert, hidden_states) * weight
                result += torch.where(weight == 0, 0, term).to(result.dtype)  # an unwanted term may be inf
            return result
        for expert, tokens, places in _tokens_of_experts(top_k_index, len(self.gate_up)):
            term = self.expert(expert, hidden_states[tokens]) * top_k_weights[tokens, places, None]
            result.index_add_(0, tokens, term.to(result.dtype))
        return result

    def split_(self, index: int, count: int, group: Any) -> None:
        """Keep one of several parts of every expert, for tensor parallelism.

        group   the processes that have the parts; a call adds up what they give. No gradients go through it
        """
        blocks = 2 if getattr(self, "is_concatenated", True) else 1  # rows of the gate stand above the others
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down)):
            packed = cast(LowbitLinear, gate_up).packed
            parts = [packed.shard(0, block * count + index, blocks * count) for block in range(blocks)]
            self.gate_up[expert] = concatenated([LowbitLinear.from_packed(part) for part in parts])
            cast(LowbitLinear, down).split_(1, index, count)
        self._group = group

    def expert(self, expert: int, x: Tensor) -> Tensor:
        """Returns what one expert makes of tokens [..., hidden]."""
        dense: Any = self._dense_class
        return self.down[expert](dense._apply_gate(self, self.gate_up[expert](x)))

    def extra_repr(self) -> str:
        inside = ([getattr(layer, "base_layer", layer) for layer in layers] for layers in (self.gate_up, self.down))
        kinds = (" or ".join({str(layer.spec): None for layer in layers}) for layers in inside)  # in a LoRA, too
        return f"{len(self.gate_up)} experts of " + " and ".join(kinds)


def _tokens_of_experts(top_k_index: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields each expert that has tokens, with these, and with the places that it has among each token's experts."""
    flat, order = top_k_index.flatten().sort(stable=True)
    counts = torch.bincount(flat, minlength=experts)[:experts].tolist()
    first = 0
    for expert, count in enumerate(counts):
        if count:
            places = order[first : first + count]
            yield expert, places // top_k_index.shape[1], places % top_k_index.shape[1]
        first += count


# -- dense experts


def is_experts(module: nn.Module) -> bool:
    """Tells whether a module keeps experts as transformers 5 does, and says how it applies their gate."""
    return (
        all(isinstance(getattr(module, name, None), Tensor) and getattr(module, name).ndim == 3 for name in MATRICES)
        and hasattr(type(module), "_apply_gate")
        and getattr(module, "has_gate", True)
        and not getattr(module, "has_post_expert_norm", False)
    )


def count_of(dense: nn.Module) -> int:
    """Returns how many experts a module has."""
    return len(cast(Tensor, dense.gate_up_proj))


def dense_weight(dense: nn.Module, name: str, stacked: Tensor | None = None) -> Tensor:
    """Returns a matrix of all experts as [experts, n, k].

    stacked   the values of the parameter; None: those that it has
    """
    stacked = cast(Tensor, getattr(dense, name)) if stacked is None else stacked
    return stacked.transpose(1, 2) if getattr(dense, "is_transposed", False) else stacked


def dense_bias(dense: nn.Module, name: str) -> Tensor | None:
    """Returns the biases [experts, n] of a matrix, if it has any."""
    return cast("Tensor | None", getattr(dense, f"{name}_bias", None))


def specs_of_experts(dense: nn.Module, config: QuantConfig, act: Act | None) -> tuple[MatmulSpec, MatmulSpec]:
    """Returns the specs of gate_up and down after they are quantized. Raises SpecError if there are none."""
    gate_up, down = (_spec(dense, name, config, act) for name in MATRICES)
    return gate_up, down


def _spec(dense: nn.Module, name: str, config: QuantConfig, act: Act | None) -> MatmulSpec:
    weight = dense_weight(dense, name)
    try:
        spec = config.spec(*weight.shape[1:], act=act or act_of(weight))
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error
    return replace(spec, bias=dense_bias(dense, name) is not None)
