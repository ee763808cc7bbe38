"""Models whose checkpoint says itself what is low-bit: lowbit's own, saved by any way, and those of other libraries.

    AutoModelForCausalLM.from_pretrained(name, quantization_config=lowbit.LowbitConfig(from_checkpoint=True))

Where config.json names another library, transformers would take that library's quantizer and refuse a second one. So
`AutoHfQuantizer.merge_quantization_configs` is wrapped: asked for both, it returns ours, with what config.json says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AutoHfQuantizer

from lowbit.dialect.errors import CheckpointError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.checkpoints.checkpoint import Checkpoint, check_dense, open_checkpoint
from lowbit.pylib.checkpoints.expert_places import Place, check_places, place_of
from lowbit.pylib.checkpoints.formats import gpt_oss
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.checkpoints.registry import import_experts, import_rows, import_weight, without_zero_bias
from lowbit.pylib.integrations.config import QUANT_METHOD, LowbitConfig
from lowbit.pylib.integrations.on_load import keep_values
from lowbit.pylib.nn.dense_experts import LISTS, MATRICES, dense_bias, dense_weight
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import as_linear, may_be_low_bit
from lowbit.pylib.weights.packed import PackedWeight


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


# -- before loading


def opened(files: Sequence[str] | None) -> Checkpoint:
    """Returns the checkpoint that the files belong to."""
    if not files:
        raise SpecError("from_checkpoint=True needs the files of a checkpoint; state_dict= is none")
    return open_checkpoint(Path(files[0]) if len(files) == 1 else Path(files[0]).parent)


Targets = dict[str, tuple[str, str]]
"""For each tensor of a quantized layer, by the name that transformers gives it, the key of the layer's codes in the
model, and the tensor's name in the layer. Where a layer is made of several parts, its part comes first."""


def place_foreign(model: nn.Module, checkpoint: Checkpoint) -> Targets:
    """Put placeholders where another library's checkpoint has quantized layers: they have the sizes alone."""
    modules, names = dict(model.named_modules()), Names(model, checkpoint.modules)
    experts: dict[str, list[Place]] = {}
    targets: Targets = {}
    if not checkpoint.modules:
        method = checkpoint.quantization_config["quant_method"]
        raise CheckpointError(f"{checkpoint.tensors.folder}: config.json says {method!r}, but no layer is quantized so")
    check_dense(checkpoint, (name for name in checkpoint.dense if not names.is_ignored(name)))
    for module in checkpoint.modules:
        name = names.module(module)
        dense, place = modules.get(name), place_of(name, modules)
        if dense is None and names.is_ignored(module):
            continue
        checkpoint.check_layer(module)
        target, part = f"{name}.codes", ""
        if dense is not None and may_be_low_bit(dense):
            dense = as_linear(dense)
            spec = MatmulSpec(dense.out_features, dense.in_features, "u8", bias=dense.bias is not None)
            model.set_submodule(name, LowbitLinear.empty(spec, "meta"))
        elif place is not None and (checkpoint.format is gpt_oss.FORMAT) == (place.expert is None):
            experts.setdefault(place.owner, []).append(place)
            target = f"{place.owner}.{LISTS[place.matrix]}.{place.expert or 0}.codes"
            part = "" if place.expert is None else f"{place.part}."
        else:
            raise CheckpointError(f"{name} is quantized in the checkpoint, and no linear layer of the model")
        for short, full in checkpoint.names_of(module).items():
            targets[names.renamed(full)] = target, part + short
    for name, places in experts.items():
        check_places(name, modules[name], places)
        model.set_submodule(name, LowbitExperts.empty_like(modules[name], _sizes(modules[name]), "meta"))
    return targets


def _sizes(dense: nn.Module) -> list[MatmulSpec]:
    shapes = {name: dense_weight(dense, name).shape for name in MATRICES}
    return [MatmulSpec(n, k, "u8", bias=dense_bias(dense, name) is not None) for name, (_, n, k) in shapes.items()]


# -- loading


def import_into(
    model: nn.Module, name: str, tensors: dict[str, Tensor], source: Mapping[str, Any], act: Act
) -> set[str]:
    """Put a layer of another library's checkpoint, or a matrix of one expert or of all, into the model; returns the
    keys that the model has got by it."""
    parent, _, expert = name.rpartition(".")
    if isinstance(model.get_submodule(parent.rpartition(".")[0]), LowbitExperts):
        layers = cast(nn.ModuleList, model.get_submodule(parent))
        parts = _parts(tensors)
        places = [expert] if parts else [str(number) for number in range(len(layers))]
        imported = [import_rows(source, parts, act)] if parts else import_experts(source, tensors, act)
    else:
        layers, places = model.get_submodule(parent), [expert]
        spec = cast(LowbitLinear, model.get_submodule(name)).spec
        imported = [import_weight(source, tensors, act, (spec.n, spec.k), name)]
    keys = set[str]()
    for place, packed in zip(places, imported, strict=True):
        empty = cast(LowbitLinear, layers.get_submodule(place))
        packed = packed if empty.spec.bias else without_zero_bias(packed)
        _check_fits(empty.spec, packed)
        keys |= {f"{parent}.{place}.{key}".lstrip(".") for key in empty.state_dict()}
        layer = LowbitLinear.from_packed(packed).train(empty.training)
        keep_values(layer)
        layers.set_submodule(place, layer)
    return keys


def _parts(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Returns the tensors of each part of an expert's matrix; nothing for a matrix of all experts."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, short = name.partition(".")
        if part.isdecimal():
            found.setdefault(part, {})[short] = tensor
    return [found[part] for part in sorted(found)]


def _check_fits(wanted: MatmulSpec, packed: PackedWeight) -> None:
    """Raise CheckpointError for a weight of another size than the model's."""
    spec, biases = packed.spec, {True: "a bias", False: "no bias"}
    if (spec.n, spec.k, spec.bias) != (wanted.n, wanted.k, wanted.bias):
        raise CheckpointError(
            f"it is {spec.n} x {spec.k} with {biases[spec.bias]} in the checkpoint, "
            f"but {wanted.n} x {wanted.k} with {biases[wanted.bias]} in the model"
        )


def act_of_model(model: Any) -> Act:
    """Returns the type of a model's activations."""
    return "f16" if model.dtype is torch.float16 else "bf16"
