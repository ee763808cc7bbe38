"""Lowbit's own checkpoints in transformers: what the files say of each layer, and where it belongs in the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from lowbit.dialect.errors import CheckpointError, PackError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.checkpoints.checkpoint import EXTRA_STATE, Checkpoint
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.checkpoints.placement import Placement, placed
from lowbit.pylib.checkpoints.tensor_files import FLOATS
from lowbit.pylib.checkpoints.transforms import Rotations
from lowbit.pylib.nn.dense_experts import MATRICES, count_of
from lowbit.pylib.nn.embedding import LowbitEmbedding, TiedLinear, tied_linears, with_tied
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.fuse import FusedModule, chain_placed, place_fused
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import may_be_low_bit
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.nn.rotated import RotatedLinear
from lowbit.pylib.weights.saved import check_same, read_spec, with_products_of

NO_ROTATIONS: Mapping[str, Rotations] = {}


def saved_specs(model: nn.Module, checkpoint: Checkpoint) -> dict[str, MatmulSpec]:
    """Returns what the weights of lowbit's own checkpoint say of themselves, by the names of their layers in the model.

    Raises PackError for a weight that lacks a tensor.
    """
    found: dict[str, MatmulSpec] = {}
    keys, names = checkpoint.tensors.keys(), Names(model)
    about = (key for key in keys if key.endswith(EXTRA_STATE) and key not in checkpoint.rotations)
    for name in [key.removesuffix(EXTRA_STATE) for key in about]:
        with naming(name):
            spec = found[names.module(name)] = read_spec(checkpoint.tensors[name + EXTRA_STATE])
        _check_codes_are_joined(name, spec, keys)
        if missing := [slot.name for slot in spec.tensors if f"{name}.{slot.name}" not in keys]:
            raise PackError(f"{name}: the checkpoint has no {', '.join(missing)} of this low-bit weight")
    return found


def _check_codes_are_joined(name: str, spec: MatmulSpec, keys: Collection[str]) -> None:
    """Raises PackError for a weight whose codes have a tensor each, as earlier versions saved them: transformers would
    not put them together."""
    shared = [slot for slot in spec.given_tensors if slot.shared]
    if shared and all(f"{name}.{slot.name}" in keys for slot in shared):
        names = " and ".join(slot.name for slot in shared)
        raise PackError(
            f"{name}: an earlier version saved {names} apart; load the folder with lowbit.load_checkpoint, "
            "and save the model again"
        )


def multiply_as_saved(model: nn.Module, saved: Mapping[str, MatmulSpec]) -> None:
    """Makes the empty linear layers of a model multiply in the types that their weights were saved for, as config.json
    says what they were quantized for (`lowbit.set_compute_`), and those of experts gate as their weights do."""
    for name, layer in list(low_bit_layers(model)):
        if isinstance(layer, LowbitLinear) and name in saved:
            spec = with_products_of(saved[name], layer.spec)
            if spec != layer.spec:
                model.set_submodule(name, LowbitLinear.empty(spec, layer.codes.device))
    for name, experts in model.named_modules():
        if isinstance(experts, LowbitExperts):
            names = {expert: f"{name}.gate_up.{expert}" for expert in range(len(experts.gate_up))}
            experts.store_like({expert: saved[layer] for expert, layer in names.items() if layer in saved})


def compare(model: nn.Module, saved: Mapping[str, MatmulSpec]) -> None:
    """Raise PackError where a low-bit layer of a model differs from what the checkpoint has for it."""
    for name, layer in low_bit_layers(model):
        if name not in saved:
            raise PackError(f"{name}: config.json says that it is low-bit, and the checkpoint has no such weight")
        with naming(name):
            check_same(saved[name], layer.spec)
    modules = dict(model.named_modules())
    for name in saved:
        found = modules.get(name)
        dense = may_be_low_bit(found) and not isinstance(found, PackedModule)
        if dense or isinstance(found, nn.Embedding | TiedLinear):
            raise PackError(f"{name}: the checkpoint has a low-bit weight, and config.json says that it has none here")


def check_output_layer(model: Any, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for an output layer that is not in the checkpoint, nor tied to an embedding that is:
    transformers would give it random values."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if not (name and model._tied_weights_keys) or f"{name}.weight" in model.all_tied_weights_keys:
        return
    leaf, names = name.rpartition(".")[2], Names(model)
    if any(leaf in names.module(key.rpartition(".")[0]).split(".") for key in checkpoint.tensors):
        return
    raise CheckpointError(
        f"{name}: the checkpoint has no such layer, and its config.json has tie_word_embeddings=False; with "
        "tie_word_embeddings=True the layer multiplies by the weight of the embedding"
    )


def check_dense(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where weights that are to be quantized are codes already, and no description says so."""
    tensors = checkpoint.tensors
    for name in tensors:
        if name.endswith(".weight") and (kind := tensors.dtype(name)) not in FLOATS:
            raise CheckpointError(
                f"{tensors.path(name)}: {name} is {kind}: it is quantized already, and can't be by a LowbitConfig; "
                f"name the dense model, with weights in {', '.join(FLOATS)}"
            )


def saved_rotations(
    model: nn.Module, checkpoint: Checkpoint | None, specs: Mapping[str, MatmulSpec]
) -> dict[str, Rotations]:
    """Returns what rotates the inputs and outputs of layers of these specs, by their names in the model, if anything
    does."""
    if checkpoint is None or not checkpoint.rotations:
        return {}
    here = {Names(model).module(name): name for name in checkpoint.modules}
    found = {name: checkpoint.rotations_of(here[name], spec.outputs, spec.k) for name, spec in specs.items()}
    return {name: rotations for name, rotations in found.items() if rotations}


def place_saved(
    model: nn.Module, specs: Mapping[str, MatmulSpec], rotations: Mapping[str, Rotations] = NO_ROTATIONS
) -> None:
    """Put empty low-bit modules where a checkpoint of lowbit's own has weights of these specs, with rotations."""
    modules = dict(model.named_modules())
    if any(isinstance(modules.get(name), nn.Embedding) for name in specs):
        tie(model)
    place_fused(model, specs)
    fused = dict(low_bit_layers(model))
    placement = placed({name: name for name in specs if name not in fused}, modules, "the checkpoint")
    place_empty(model, placement, specs, rotations)
    chain_placed(model, specs)


def place_empty(
    model: nn.Module,
    placement: Placement,
    specs: Mapping[str, MatmulSpec],
    rotations: Mapping[str, Rotations] = NO_ROTATIONS,
) -> None:
    """Put empty low-bit modules into a model.

    specs       what they are, by the names that a placement has for layers
    rotations   those of layers that have some, by the same names
    """
    modules = dict(model.named_modules())
    for name, layer in placement.linears.items():
        empty: LowbitLinear | RotatedLinear = LowbitLinear.empty(specs[layer], "meta")
        if layer in rotations:
            turned = rotations[layer].to("meta")
            empty = RotatedLinear(empty.spec, dict(empty.named_buffers()), turned.inputs, turned.outputs)
        model.set_submodule(name, empty)
    for name, layer in placement.embeddings.items():
        dense = cast(nn.Embedding, modules[name])
        embedding = LowbitEmbedding.empty(specs[layer], "meta").in_place_of(dense)
        for here, module in with_tied([name], embedding, tied_linears(modules.items(), dense)).items():
            model.set_submodule(here, module)
    for name, places in placement.experts.items():
        found = {(place.matrix, place.expert): specs[layer] for place, layer in places.items()}
        each = [{i: _of_expert(found, matrix, i) for i in range(count_of(modules[name]))} for matrix in MATRICES]
        layer = next(layer for place, layer in places.items() if place.matrix == MATRICES[0])
        inputs = rotations[layer].to("meta").inputs if layer in rotations else ()
        model.set_submodule(name, LowbitExperts.empty_like(modules[name], each, "meta", inputs))


def _of_expert(found: Mapping[tuple[str, int | None], MatmulSpec], matrix: str, expert: int) -> MatmulSpec:
    """Returns the spec of a matrix of an expert, of which there may be one for all."""
    return found[matrix, expert if (matrix, expert) in found else None]


def start_no_fused(model: nn.Module) -> None:
    """Let transformers give no random start to modules with fused layers, in which it would look for single ones."""
    for module in model.modules():
        if isinstance(module, FusedModule) and not (module._parameters or module._buffers):
            module._is_hf_initialized = True  # type: ignore[assignment]


def fit_lengths(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Give empty layers buffers as long as files have them, where the values decide the length: outliers."""
    layers = dict(low_bit_layers(model))
    free = {name: [slot.name for slot in layer.spec.tensors if min(slot.shape) < 0] for name, layer in layers.items()}
    names = Names(model)
    for key in checkpoint.tensors if any(free.values()) else ():
        name, _, buffer = key.rpartition(".")
        if buffer in free.get(here := names.module(name), ()):
            layer, shape = layers[here], checkpoint.tensors.shape(key)
            setattr(layer, buffer, torch.empty(shape, dtype=getattr(layer, buffer).dtype, device="meta"))


def low_bit_layers(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Yields the low-bit layers of a model with their names, those of experts and embeddings too."""
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            yield name, module


def tie(model: Any) -> None:
    """Tie the weights of a model without memory, which transformers does only after loading."""
    for target, source in model.all_tied_weights_keys.items():
        parent, _, leaf = target.rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_parameter(source))


def untie(model: Any) -> None:
    """Let transformers not tie the weights of layers that share a low-bit table: there is no dense one."""
    names = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, LowbitEmbedding | TiedLinear)}
    if not names:
        return
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in names or source in names:
            del model.all_tied_weights_keys[target]
    for prefix, module in model.named_modules():  # from which transformers makes the former anew
        tied = getattr(module, "_tied_weights_keys", None)
        if isinstance(tied, Mapping):
            module._tied_weights_keys = {t: s for t, s in tied.items() if f"{prefix}.{s}".lstrip(".") not in names}
