"""A model of transformers with random weights, made where it is to run: no dense weight is made for a low-bit layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from lowbit.dialect.errors import SpecError
from lowbit.pylib.nn.dense_experts import is_experts, specs_of_experts
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.fuse import fuse_
from lowbit.pylib.nn.linear import LowbitLinear, spec_of
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.runtime.devices import available_memory
from lowbit.pylib.tune.timing import random_tensor

STANDARD_DEVIATION = 0.02  # of dense weights
MakeLayer = Callable[[nn.Linear], nn.Module]


@torch.no_grad()
def random_model(
    config: Any,
    quantization: QuantConfig | None,
    device: torch.device | str,
    *,
    fuse: bool = True,
    lm_head: bool = False,
    make: MakeLayer | None = None,
) -> nn.Module:
    """Returns a causal language model in bf16, with low-bit linear layers and experts unless `quantization` is None.

    fuse      make one layer of low-bit layers that share their input
    lm_head   the output layer is low-bit, too
    make      make(layer) returns the layer, of another library say, that takes the place of a linear layer on meta

    Raises SpecError where groups divide the k of no layer, and on a CPU without room for the model, where the system
    would end the process.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if quantization is not None:
        _put_low_bit_layers(model, quantization, lm_head)
        if fuse:
            fuse_(model)
    others = _taken_out(model, lm_head) if make else {}
    if torch.device(device).type == "cpu":
        check_memory(model, available_memory())
    model.to_empty(device=device)
    if not lm_head:  # a low-bit output layer has a weight of its own
        model.tie_weights()
    for module in model.modules():
        _fill(model, module, torch.device(device))
    for name, layer in others.items():  # one after the other, so that no dense model is in memory
        model.set_submodule(name, cast(MakeLayer, make)(layer), strict=True)
    return model.requires_grad_(False)


def check_memory(model: nn.Module, available: int) -> None:
    """Raise SpecError for a model on meta that would take more than the available bytes."""
    needed = sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    if needed > available:
        sizes = f"the model takes {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB of memory are free"
        raise SpecError(f"{sizes}; keep fewer layers of it (--layers), or leave bf16 out")


def _taken_out(model: nn.Module, lm_head: bool) -> dict[str, nn.Linear]:
    """Returns the linear layers of a model on meta by name, and leaves empty modules in their places."""
    found = _dense_layers(model, lm_head)
    for name in found:
        model.set_submodule(name, nn.Identity())
    return found


def _dense_layers(model: nn.Module, lm_head: bool) -> dict[str, nn.Linear]:
    """Returns the linear layers that are not low-bit, by name; the output layer only if it should be."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and (lm_head or name != "lm_head")
    }


def _dense_experts(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if is_experts(module)}


def count_dense(model: nn.Module, lm_head: bool) -> int:
    """Returns how many linear layers and modules of experts are not low-bit, of those that should be."""
    return len(_dense_layers(model, lm_head)) + len(_dense_experts(model))


def _put_low_bit_layers(model: nn.Module, quantization: QuantConfig, lm_head: bool) -> None:
    """Replace linear layers and experts of a model on meta by empty low-bit ones; those whose k no group divides stay.

    Raises SpecError where all would stay.
    """
    layers = _dense_layers(model, lm_head) | _dense_experts(model)
    refused: list[SpecError] = []
    for name, module in layers.items():
        try:
            with naming(name):
                model.set_submodule(name, _empty(module, quantization))
        except SpecError as error:
            refused.append(error)
    if refused and len(refused) == len(layers):
        raise refused[0]


def _empty(module: nn.Module, quantization: QuantConfig) -> nn.Module:
    """Returns a low-bit module without memory for a linear layer or for experts."""
    if is_experts(module):
        return LowbitExperts.empty_like(module, specs_of_experts(module, quantization, "bf16"), "meta")
    return LowbitLinear.empty(spec_of(cast(nn.Linear, module), quantization, "bf16"), "meta")


def _fill(model: nn.Module, module: nn.Module, device: torch.device) -> None:
    """Give the tensors of a module values; buffers, such as the tables of rotary embeddings, get those they have."""
    if isinstance(module, LowbitLinear):
        for slot in module.spec.tensors:
            setattr(module, slot.name, random_tensor(module.spec, slot, device))
    else:
        if list(module.buffers(recurse=False)):
            model._init_weights(module)  # type: ignore[operator]
        for parameter in module.parameters(recurse=False):
            parameter.normal_(0, STANDARD_DEVIATION) if parameter.ndim > 1 else parameter.fill_(1)
