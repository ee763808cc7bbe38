"""Models whose checkpoint says itself what is low-bit: lowbit's own, saved by any way, and those of other libraries.

    AutoModelForCausalLM.from_pretrained(name, quantization_config=lowbit.LowbitConfig(from_checkpoint=True))

Where config.json names another library, transformers would take that library's quantizer and refuse a second one. So
`AutoHfQuantizer.merge_quantization_configs` is wrapped: asked for both, it returns ours. It is asked for what names no
library, too, as MLX's files do not; transformers' own answer to that is an error in either place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AutoHfQuantizer

from lowbit.dialect.errors import CheckpointError, SpecError
from lowbit.dialect.spec import Act, MatmulSpec
from lowbit.pylib.checkpoints.checkpoint import Checkpoint, check_dense
from lowbit.pylib.checkpoints.expert_places import Place
from lowbit.pylib.checkpoints.expert_scales import ExpertScales, scales_of_experts
from lowbit.pylib.checkpoints.layers import layer_of
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.checkpoints.placement import Placement, check_rotations, placed, wanted_layers
from lowbit.pylib.checkpoints.registry import import_between, import_experts, rows_between, without_zero_bias
from lowbit.pylib.checkpoints.transforms import Rotations
from lowbit.pylib.integrations.config import QUANT_METHOD, LowbitConfig
from lowbit.pylib.integrations.on_load import keep_values
from lowbit.pylib.integrations.saved import place_empty, tie
from lowbit.pylib.nn.dense_experts import LISTS, MATRICES, dense_bias, dense_weight
from lowbit.pylib.nn.embedding import LowbitEmbedding, tied_linears, with_tied
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import as_linear
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.rotated import INPUTS, Rotation
from lowbit.pylib.torch_types import TORCH
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


@dataclass
class Foreign:
    """The quantized layers of another library's checkpoint, while they are loaded.

    targets   for each of their tensors, by the name that transformers gives it, the key of the layer's codes in the
              model, and the tensor's name in the layer. Where a layer is made of several parts, its part comes first
    layers    what the checkpoint calls the layers and embeddings of the model
    rotations what rotates inputs and outputs of linear layers, by the names in the model
    experts   what is done to inputs of experts, by the names in the model
    """

    targets: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    layers: dict[str, str] = field(default_factory=dict[str, str])
    rotations: dict[str, Rotations] = field(default_factory=dict[str, Rotations])
    experts: dict[str, ExpertScales] = field(default_factory=dict[str, ExpertScales])


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
    with naming(folder):
        scales = {o: scales_of_experts(checkpoint, places, modules[o]) for o, places in placement.experts.items()}
    sizes = _sizes(placement, modules)
    place_empty(model, placement, sizes)
    single = placement.linears | placement.embeddings
    parts = {layer: (f"{here}.codes", "") for here, layer in single.items()}
    for places in placement.experts.values():
        parts |= {layer: _target(place) for place, layer in places.items()}
    shorts = {layer: checkpoint.names_of(layer).items() for layer in parts}
    targets = {
        names.renamed(full): (target, part + short)
        for layer, (target, part) in parts.items()
        for short, full in shorts[layer]
    }
    return Foreign(targets, single, _rotations(model, checkpoint, placement, sizes), scales)


def _rotations(
    model: Any, checkpoint: Checkpoint, placement: Placement, sizes: Mapping[str, MatmulSpec]
) -> dict[str, Rotations]:
    """Returns the rotations of linear layers, read here: several share a tensor, which transformers shall leave out."""
    if not (checkpoint.rotations or checkpoint.transforms):
        return {}
    names, ignored = Names(model), model._keys_to_ignore_on_load_unexpected or ()
    read = (re.escape(names.renamed(name)) + "$" for name in checkpoint.rotations)
    model._keys_to_ignore_on_load_unexpected = {*ignored, *read}
    return {
        here: checkpoint.rotations_of(layer, sizes[layer].n, sizes[layer].k)
        for here, layer in placement.linears.items()
    }


def _target(place: Place) -> tuple[str, str]:
    """Returns the key of an expert's codes, of the first for a stack of all, and what part of its matrix a layer is."""
    part = "" if place.expert is None else f"{place.part}."
    return f"{place.owner}.{LISTS[place.matrix]}.{place.expert or 0}.codes", part


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


@dataclass(frozen=True)
class Importer:
    """Puts layers of another library's checkpoint into a model.

    source      the quantization_config
    act         type of the inputs
    rotations   those of `Foreign`
    experts     likewise
    """

    model: nn.Module
    source: Mapping[str, Any]
    act: Act
    rotations: Mapping[str, Rotations] = field(default_factory=dict[str, Rotations])
    experts: Mapping[str, ExpertScales] = field(default_factory=dict[str, ExpertScales])

    def take(self, name: str, layer: str, tensors: dict[str, Tensor]) -> set[str]:
        """Put a layer, an embedding, or a matrix of one expert or of all into the model; returns the keys that the
        model has got by it.

        name    in the model
        layer   what the checkpoint calls it
        """
        parent, _, leaf = name.rpartition(".")
        if isinstance(self.model.get_submodule(parent.rpartition(".")[0]), LowbitExperts):
            return self._experts(parent, leaf, tensors)
        empty = cast(LowbitLinear | LowbitEmbedding, self.model.get_submodule(name))
        size = empty.spec.n, empty.spec.k
        return self._put(name, import_between(self.source, tensors, self.act, size, layer))

    def _experts(self, parent: str, leaf: str, tensors: dict[str, Tensor]) -> set[str]:
        if parts := _parts(tensors):
            owner, _, matrix = parent.rpartition(".")
            scales = self.experts.get(owner, ExpertScales())
            factors = scales.rows.get(int(leaf)) if matrix == LISTS[MATRICES[0]] else None
            packed = rows_between(self.source, parts, self.act, factors)
            self._turn_inputs(owner, [scaling.to(packed.device) for scaling in scales.inputs])
            return self._put(f"{parent}.{leaf}", packed)
        each, count = import_experts(self.source, tensors, self.act), len(self.model.get_submodule(parent))  # type: ignore[arg-type]
        if len(each) != count:
            raise CheckpointError(f"the checkpoint has {len(each)} experts, and the model {count}")
        return {key for i, packed in enumerate(each) for key in self._put(f"{parent}.{i}", packed)}

    def _turn_inputs(self, owner: str, inputs: Sequence[Rotation]) -> None:
        """Let experts scale tokens, once."""
        experts = cast(LowbitExperts, self.model.get_submodule(owner))
        if inputs and INPUTS not in experts._modules:
            experts.turn_inputs(inputs)
            for scaling in inputs:
                keep_values(scaling)

    def _put(self, name: str, packed: PackedWeight) -> set[str]:
        empty = cast(LowbitLinear | LowbitEmbedding, self.model.get_submodule(name))
        packed = packed if empty.spec.bias else without_zero_bias(packed)
        _check_fits(empty.spec, packed)
        keys = {f"{name}.{key}" for key in empty.state_dict()}
        layers: Mapping[str, nn.Module]
        if isinstance(empty, LowbitEmbedding):
            table = LowbitEmbedding.from_packed(packed).in_place_of(empty)
            layers = with_tied([name], table, tied_linears(self.model.named_modules(), empty))
        else:
            types = TORCH[packed.spec.act], TORCH[packed.spec.out_dtype]
            rotations = self.rotations.get(name, Rotations()).to(packed.device, *types)
            layers = {name: layer_of(packed, rotations).train(empty.training)}
        for module in layers[name].modules():
            keep_values(module)
        for here, layer in layers.items():
            self.model.set_submodule(here, layer)
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


def forget_parts(config: Any) -> None:
    """Remove what a configuration says of the quantization of its parts: it is as the model's own says now."""
    for part in (config if isinstance(config, dict) else vars(config)).values():
        if isinstance(part, dict | PreTrainedConfig):
            (part if isinstance(part, dict) else vars(part)).pop("quantization_config", None)
            forget_parts(part)
