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
from lowbit.pylib.checkpoints.checkpoint import Checkpoint, open_checkpoint
from lowbit.pylib.checkpoints.formats import gpt_oss
from lowbit.pylib.checkpoints.registry import import_experts, import_weight
from lowbit.pylib.integrations.config import QUANT_METHOD, LowbitConfig
from lowbit.pylib.integrations.saved import PARTS, renaming
from lowbit.pylib.nn.experts import MATRICES, LowbitExperts, dense_bias, dense_weight, is_experts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import as_linear, may_be_low_bit
from lowbit.pylib.packed import PackedWeight


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


def place_foreign(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put placeholders where another library's checkpoint has quantized layers: they have the sizes alone."""
    modules = dict(model.named_modules())
    renamed = renaming(model, checkpoint.modules)
    for name in map(renamed, checkpoint.modules):
        parent, _, matrix = name.rpartition(".")
        dense = modules.get(name)
        if dense is not None and may_be_low_bit(dense):
            dense = as_linear(dense)
            spec = MatmulSpec(dense.out_features, dense.in_features, "u8", bias=dense.bias is not None)
            model.set_submodule(name, LowbitLinear.empty(spec, "meta"))
        elif (
            checkpoint.format is gpt_oss.FORMAT and matrix in MATRICES and is_experts(modules.get(parent, nn.Module()))
        ):
            model.set_submodule(parent, LowbitExperts.empty_like(modules[parent], _sizes(modules[parent]), "meta"))
        else:
            raise CheckpointError(f"{name} is quantized in the checkpoint, and no linear layer of the model")


def _sizes(dense: nn.Module) -> list[MatmulSpec]:
    shapes = {name: dense_weight(dense, name).shape for name in MATRICES}
    return [MatmulSpec(n, k, "u8", bias=dense_bias(dense, name) is not None) for name, (_, n, k) in shapes.items()]


def suffixes_of(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Returns the ends of the names of a layer's tensors, and what the tensors are called in it.

    They are given by what takes their place in the name of the codes.
    """
    if checkpoint.format is None:
        return {}
    names = sorted(checkpoint.format.tensors, key=len, reverse=True)  # "weight.absmax" before "weight"
    if checkpoint.format is gpt_oss.FORMAT:
        return {
            f".{part}.0.codes": {f".{matrix}{name}": name.removeprefix("_") for name in names}
            for matrix, part in PARTS.items()
        }
    return {".codes": {name: name.removeprefix(".") for name in names}}


# -- loading


def import_into(
    model: nn.Module, name: str, tensors: dict[str, Tensor], source: Mapping[str, Any], act: Act
) -> set[str]:
    """Put a layer of another library's checkpoint, or one matrix of all experts, into the model; returns its keys."""
    parent, _, first = name.rpartition(".")
    if first == "0" and isinstance(found := model.get_submodule(parent), nn.ModuleList):
        keys = {f"{parent}.{key}" for key in found.state_dict()}
        for expert, packed in enumerate(import_experts(source, tensors, act)):
            _check_fits(cast(LowbitLinear, found[expert]).spec, packed)
            found[expert] = LowbitLinear.from_packed(packed)
        return keys
    empty = cast(LowbitLinear, model.get_submodule(name))
    if not empty.spec.bias and "bias" in tensors and not bool(tensors["bias"].any()):
        del tensors["bias"]  # AutoGPTQ writes zeros for layers without a bias
    packed = import_weight(source, tensors, act, (empty.spec.n, empty.spec.k))
    _check_fits(empty.spec, packed)
    keys = {f"{name}.{key}" for key in empty.state_dict()}
    model.set_submodule(name, LowbitLinear.from_packed(packed).train(empty.training))
    return keys


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
