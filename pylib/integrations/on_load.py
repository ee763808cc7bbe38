"""Dense parameters of low-bit modules, while a dense checkpoint is loaded into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError
from lowbit.pylib.nn.dense_experts import LISTS, dense_weight
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import is_transposed
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.plan import Planned, naming
from lowbit.pylib.quantization.api import quantize
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.torch_types import TORCH

_EXTRA_STATE = "_extra_state"  # torch's name for a module's own part of a state dictionary


@dataclass
class Target:
    """A dense parameter of a checkpoint, and the layers that take it in.

    holder      the module that has the parameter, without memory
    parameter   its name there
    layers      one layer, or that of each expert
    config      how to quantize
    keys        what the checkpoint does not have, and the model will have: codes, scales, zeros
    transposed  whether the checkpoint has the weight of a linear layer as [k, n]
    pending     whether the tensor has yet to come
    """

    holder: nn.Module
    parameter: str
    layers: Sequence[PackedModule]
    config: QuantConfig
    keys: set[str] = field(default_factory=set)
    transposed: bool = False
    pending: bool = True

    def forget(self) -> None:
        """Drop the dense parameter: accelerate would move it to the device of the layer."""
        del self.holder._buffers[self.parameter]
        if isinstance(self.holder, PackedModule):
            self.holder._parameters[self.parameter] = None


def attach_dense(entry: Planned, module: PackedModule | LowbitExperts) -> dict[str, Target]:
    """Give a low-bit module the dense parameters of the module that it stands for; returns them by name."""
    name, config, transposed = entry.names[0], cast(QuantConfig, entry.config), is_transposed(entry.module)
    targets: dict[str, Target] = {}
    for parameter, parts in _layers_of(module).items():
        layers, slots = list(parts.values()), next(iter(parts.values())).spec.tensors
        made = ["bias"] if parameter.endswith("_bias") else [*(s.name for s in slots if s.name != "bias"), _EXTRA_STATE]
        keys = {f"{name}.{part}{key}" for part in parts for key in made} | {f"{name}.{parameter}"}
        dense = getattr(entry.module, parameter).detach()
        module._parameters.pop(parameter, None)
        module._buffers[parameter] = dense  # no parameter, which tensor parallelism would cut
        targets[f"{name}.{parameter}"] = Target(module, parameter, layers, config, keys, transposed)
    return targets


def _layers_of(module: PackedModule | LowbitExperts) -> Mapping[str, Mapping[str, PackedModule]]:
    """Returns the layers that take in each dense parameter, by the beginnings of their tensors' names."""
    if isinstance(module, PackedModule):
        return {"weight": {"": module}}
    found: dict[str, dict[str, LowbitLinear]] = {}
    for parameter, name in LISTS.items():
        layers = cast(list[LowbitLinear], list(getattr(module, name)))
        found[parameter] = {f"{name}.{expert}.": layer for expert, layer in enumerate(layers)}
        if layers[0].spec.bias:
            found[f"{parameter}_bias"] = found[parameter]
    return found


def quantize_into(target: Target, value: Tensor) -> None:
    """Quantize a tensor of a checkpoint into the buffers of its layers. Raises QuantizeError and SpecError."""
    if isinstance(target.holder, PackedModule):
        _fill(target.layers[0], value.T if target.transposed else value, target.config)
    elif target.parameter.endswith("_bias"):
        for layer, bias in zip(target.layers, value):
            layer.register_buffer("bias", bias.to(TORCH[layer.spec.out_dtype]).clone())
    else:
        for expert, weight in enumerate(dense_weight(target.holder, target.parameter, value)):
            with naming(f"[{expert}]"):
                _fill(target.layers[expert], weight, target.config)
    for layer in target.layers:
        keep_values(layer)
    target.pending = False


def keep_values(layer: nn.Module) -> None:
    """Let transformers give no values to tensors that it has not loaded itself: it would make biases zeros."""
    for tensor in layer.buffers(recurse=False):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def _fill(layer: PackedModule, weight: Tensor, config: QuantConfig) -> None:
    """Put a dense weight into the buffers of a layer; its bias comes by itself."""
    spec = replace(layer.spec, bias=False)
    if tuple(weight.shape) != (spec.n, spec.k):
        raise QuantizeError(f"the checkpoint's weight is {list(weight.shape)}, not [{spec.n}, {spec.k}]")
    for name, tensor in quantize(weight, config).pack(spec).items():
        setattr(layer, name, tensor)
