"""Models whose checkpoint says itself what is low-bit: lowbit's own, saved by any way, and those of other libraries.

    AutoModelForCausalLM.from_pretrained(name, quantization_config=lowbit.LowbitConfig(from_checkpoint=True))

Where config.json names another library, transformers would take that library's quantizer and refuse a second one. So
`AutoHfQuantizer.merge_quantization_configs` is wrapped: asked for both, it returns ours. It is asked for what names no
library, too, as MLX's files do not; transformers' own answer to that is an error in either place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from lowbit.dialect.errors import CheckpointError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.checkpoints.checkpoint import Checkpoint, check_dense
from lowbit.pylib.checkpoints.layers import Loader
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.checkpoints.placement import Placement, check_rotations, placed, wanted_layers
from lowbit.pylib.integrations.config import QUANT_METHOD, LowbitConfig
from lowbit.pylib.integrations.on_load import keep_values
from lowbit.pylib.integrations.saved import low_bit_layers, place_empty, tie
from lowbit.pylib.nn.dense_experts import LISTS, MATRICES, dense_bias, dense_weight
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import as_linear

LEFT_ALONE = "lowbit_left_alone"
"""What tensors are called that transformers shall not read."""


def prefer_lowbit() -> None:
    """Let a LowbitConfig that is passed to `from_pretrained` count more than another library's in config.json."""
    merge = AutoHfQuantizer.merge_quantization_configs

    @wraps(merge)
    def merge_or_prefer(cls: type, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        given, wanted = quantization_config, quantization_config_from_args
        written = given if isinstance(given, dict) else given.to_dict()
        if isinstance(wanted, LowbitConfig) and written.get("quant_method") != QUANT_METHOD:
            return wanted.importing(written)
        return merge(given, wanted)

    AutoHfQuantizer.merge_quantization_configs = classmethod(merge_or_prefer)  # type: ignore[assignment]
    supports = AutoHfQuantizer.supports_quant_method

    @wraps(supports)
    def supports_or_unnamed(quantization_config_dict: Any) -> bool:
        given = quantization_config_dict
        return (isinstance(given, dict) and not given.get("quant_method")) or supports(given)

    AutoHfQuantizer.supports_quant_method = staticmethod(supports_or_unnamed)


# -- before loading


def opened(files: Sequence[str] | None) -> Checkpoint:
    """Returns the checkpoint that the files belong to, with the tensors of these files."""
    if not files:
        raise SpecError("from_checkpoint=True needs the files of a checkpoint; state_dict= is none")
    return Checkpoint(Path(files[0]).parent, [Path(file).name for file in files])


@dataclass(frozen=True)
class Foreign:
    """The quantized layers of another library's checkpoint, while transformers loads what is dense.

    When transformers has read one small tensor of a module, all of the module is loaded, to where this tensor is. So
    memory holds the tensors of one module at a time, and each way to load a model reads files by the same code.

    first     these tensors, by the names that transformers gives them, each with the key of the module's codes
    modules   the names of the modules, by these keys
    others    all other tensors of their layers, which transformers leaves alone
    loader    what makes the modules; None: there are none
    """

    first: Mapping[str, str] = field(default_factory=dict[str, str])
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    others: Collection[str] = ()
    loader: Loader | None = None


def place_foreign(model: nn.Module, checkpoint: Checkpoint) -> Foreign:
    """Put placeholders where another library's checkpoint has quantized layers: they have the sizes alone."""
    folder, modules, names = str(checkpoint.tensors.folder), dict(model.named_modules()), Names(model)
    if not checkpoint.modules:
        method = checkpoint.quantization_config["quant_method"]
        raise CheckpointError(f"{folder}: config.json says {method!r}, but no layer is quantized so")
    check_dense(checkpoint, (name for name in checkpoint.dense if not names.is_ignored(name)))
    placement = placed(wanted_layers(checkpoint, names, modules), modules, folder)
    check_rotations(checkpoint, names, modules, placement)
    if placement.embeddings:
        tie(model)
    place_empty(model, placement, _sizes(placement, modules))
    _ask_for_codes_alone(model)
    keys = {name: f"{name}.codes" for name in placement.names}
    keys |= {name: f"{name}.{LISTS[MATRICES[0]]}.0.codes" for name in placement.experts}
    first, others = dict[str, str](), {names.renamed(tensor) for tensor in checkpoint.rotations}
    for name, key in keys.items():
        layers = placement.layers_of(name)
        tensors = [tensor for layer in layers for tensor in checkpoint.names_of(layer).values()]
        first[names.renamed(min(tensors, key=lambda t: math.prod(checkpoint.tensors.shape(t))))] = key
        others |= {names.renamed(tensor) for tensor in tensors}
    ignored = cast(Any, model)._keys_to_ignore_on_load_unexpected or ()
    cast(Any, model)._keys_to_ignore_on_load_unexpected = {*ignored, LEFT_ALONE}
    loader = Loader(modules, placement, checkpoint, act_of_model(model), None, progress=False)
    return Foreign(first, {key: name for name, key in keys.items()}, others - first.keys(), loader)


def _ask_for_codes_alone(model: nn.Module) -> None:
    """Let placeholders have codes alone in a state dictionary: transformers would take tensors of the files that are
    called as other buffers are for these."""
    for _, module in low_bit_layers(model):
        module._non_persistent_buffers_set |= module._buffers.keys() - {"codes"}


def _sizes(placement: Placement, modules: Mapping[str, nn.Module]) -> dict[str, MatmulSpec]:
    """Returns the sizes of all layers, by the checkpoint's names, as specs that say no more."""
    found: dict[str, MatmulSpec] = {}
    for here, layer in placement.linears.items():
        dense = as_linear(modules[here])
        found[layer] = MatmulSpec(dense.out_features, dense.in_features, "u8", bias=dense.bias is not None)
    for here, layer in placement.embeddings.items():
        table = cast(nn.Embedding, modules[here])
        found[layer] = MatmulSpec(table.num_embeddings, table.embedding_dim, "u8")
    for owner, places in placement.experts.items():
        for place, layer in places.items():
            n, k = dense_weight(modules[owner], place.matrix).shape[1:]
            found[layer] = MatmulSpec(n, k, "u8", bias=dense_bias(modules[owner], place.matrix) is not None)
    return found


# -- loading


def load_into(model: nn.Module, foreign: Foreign, key: str, device: torch.device) -> set[str]:
    """Put a layer, an embedding, or all experts of a layer into a model, in place of a placeholder; returns the keys
    that the model has got by it.

    key   one of `Foreign.modules`
    """
    name, loader = foreign.modules[key], cast(Loader, foreign.loader)
    keys = {f"{name}.{key}" for key in model.get_submodule(name).state_dict()}
    for here, module in replace(loader, device=device).load(name).items():
        _fill(model, here, module)
        for part in model.get_submodule(here).modules():
            keep_values(part)
    return keys


def _fill(model: nn.Module, name: str, module: nn.Module) -> None:
    """Give what a placeholder stands for to a model. Linear layers and experts stay the modules that they are:
    transformers has wrapped what they do where it splits a model over several devices."""
    empty = model.get_submodule(name)
    if isinstance(empty, LowbitExperts) and isinstance(module, LowbitExperts):
        for old, new in zip((*empty.gate_up, *empty.down), (*module.gate_up, *module.down)):
            cast(LowbitLinear, old).hold(cast(LowbitLinear, new).packed)
        empty.turn_inputs(module.inputs)
    elif isinstance(empty, LowbitLinear) and isinstance(module, LowbitLinear):
        empty.hold(module.packed)
    else:
        model.set_submodule(name, module)


def act_of_model(model: Any) -> Act:
    """Returns the type of a model's activations."""
    return "f16" if model.dtype is torch.float16 else "bf16"


def forget_parts(config: Any) -> None:
    """Remove what a configuration says of the quantization of its parts: it is as the model's own says now."""
    for part in (config if isinstance(config, dict) else vars(config)).values():
        if isinstance(part, dict | PreTrainedConfig):
            (part if isinstance(part, dict) else vars(part)).pop("quantization_config", None)
            forget_parts(part)
