"""Lowbit's own checkpoints in transformers: what the files say of each layer, and where it belongs in the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lowbit.dialect.errors import CheckpointError, PackError
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.checkpoints.checkpoint import EXTRA_STATE
from lowbit.pylib.checkpoints.expert_places import place_of
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.checkpoints.tensor_files import FLOATS
from lowbit.pylib.nn.dense_experts import LISTS, MATRICES, count_of
from lowbit.pylib.nn.embedding import LowbitEmbedding, TiedLinear, tied_linears, with_tied
from lowbit.pylib.nn.experts import LowbitExperts
from lowbit.pylib.nn.fuse import FusedModule, place_fused
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.linear_like import may_be_low_bit
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.plan import naming
from lowbit.pylib.weights.saved import check_same, read_spec, with_products_of


def saved_specs(model: nn.Module, files: Sequence[str]) -> dict[str, MatmulSpec]:
    """Returns what the weights in files say of themselves, by the names of their layers in the model.

    Raises PackError for a weight that lacks a tensor.
    """
    found: dict[str, MatmulSpec] = {}
    keys = set[str]()
    for path in files:
        if not str(path).endswith(".safetensors"):
            raise PackError(f"{path} is no safetensors file; save the model again with save_pretrained")
        with safe_open(path, framework="pt") as file:
            here: list[str] = file.keys()
            keys.update(here)
            for name in [key.removesuffix(EXTRA_STATE) for key in here if key.endswith(EXTRA_STATE)]:
                with naming(name):
                    found[name] = read_spec(file.get_tensor(name + EXTRA_STATE))
    for name, spec in found.items():
        _check_codes_are_joined(name, spec, keys)
        if missing := [slot.name for slot in spec.tensors if f"{name}.{slot.name}" not in keys]:
            raise PackError(f"{name}: the checkpoint has no {', '.join(missing)} of this low-bit weight")
    names = Names(model, list(found))
    return {names.module(name): spec for name, spec in found.items()}


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
    says what they were quantized for (`lowbit.set_compute_`)."""
    for name, layer in list(low_bit_layers(model)):
        if isinstance(layer, LowbitLinear) and name in saved:
            spec = with_products_of(saved[name], layer.spec)
            if spec != layer.spec:
                model.set_submodule(name, LowbitLinear.empty(spec, layer.codes.device))


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


def check_output_layer(model: Any, files: Sequence[str]) -> None:
    """Raise CheckpointError for an output layer that is not in the checkpoint, nor tied to an embedding that is:
    transformers would give it random values."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if not (name and files and model._tied_weights_keys) or f"{name}.weight" in model.all_tied_weights_keys:
        return
    leaf, names = name.rpartition(".")[2], Names(model, ())
    for path in files:
        with safe_open(path, framework="pt") as file:
            keys: list[str] = file.keys()
            if any(leaf in names.module(key.rpartition(".")[0]).split(".") for key in keys):
                return
    raise CheckpointError(
        f"{name}: the checkpoint has no such layer, and its config.json has tie_word_embeddings=False; with "
        "tie_word_embeddings=True the layer multiplies by the weight of the embedding"
    )


def check_dense(files: Sequence[str]) -> None:
    """Raise CheckpointError where weights that are to be quantized are codes already: transformers ignores config.json
    and the scales of a library that it does not know."""
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            for name in names:
                if name.endswith(".weight") and (kind := file.get_slice(name).get_dtype()) not in FLOATS:
                    raise CheckpointError(
                        f"{path}: {name} is {kind}: it is quantized already, and can't be by a LowbitConfig; name the "
                        f"dense model, with weights in {', '.join(FLOATS)}"
                    )


def place_saved(model: nn.Module, specs: Mapping[str, MatmulSpec]) -> None:
    """Put empty low-bit modules where a checkpoint of lowbit's own has weights of these specs."""
    experts: dict[str, dict[str, dict[int, MatmulSpec]]] = {}
    modules = dict(model.named_modules())
    if any(isinstance(modules.get(name), nn.Embedding) for name in specs):
        tie(model)
    place_fused(model, specs)
    placed = dict(low_bit_layers(model))
    for name, spec in specs.items():
        if name in placed:
            continue
        dense, place = modules.get(name), place_of(name, modules)
        if isinstance(dense, nn.Embedding):
            embedding = LowbitEmbedding.empty(spec, "meta").in_place_of(dense)
            for here, module in with_tied([name], embedding, tied_linears(modules.items(), dense)).items():
                model.set_submodule(here, module)
        elif may_be_low_bit(dense):
            model.set_submodule(name, LowbitLinear.empty(spec, "meta"))
        elif place is not None and place.expert is not None:
            experts.setdefault(place.owner, {}).setdefault(place.matrix, {})[place.expert] = spec
        else:
            raise CheckpointError(f"{name} is low-bit in the checkpoint, and no linear layer or embedding of the model")
    for name, found in experts.items():
        _check_complete(name, found, count_of(modules[name]))
        model.set_submodule(name, LowbitExperts.empty_like(modules[name], [found[m] for m in MATRICES], "meta"))


def _check_complete(name: str, found: Mapping[str, Mapping[int, MatmulSpec]], count: int) -> None:
    """Raise CheckpointError unless a checkpoint has both matrices of so many experts."""
    for matrix, short in LISTS.items():
        have = found.get(matrix, {})
        if wrong := have.keys() ^ set(range(count)):
            said = "has" if min(wrong) in have else "lacks"
            raise CheckpointError(f"the checkpoint {said} {name}.{short}.{min(wrong)}; the model has {count} experts")


def start_no_fused(model: nn.Module) -> None:
    """Let transformers give no random start to modules with fused layers, in which it would look for single ones."""
    for module in model.modules():
        if isinstance(module, FusedModule) and not (module._parameters or module._buffers):
            module._is_hf_initialized = True  # type: ignore[assignment]


def fit_lengths(model: nn.Module, files: Sequence[str]) -> None:
    """Give empty layers buffers as long as files have them, where the values decide the length: outliers."""
    layers = dict(low_bit_layers(model))
    free = {name: [slot.name for slot in layer.spec.tensors if min(slot.shape) < 0] for name, layer in layers.items()}
    for path in files if any(free.values()) else ():
        with safe_open(path, framework="pt") as file:
            keys: list[str] = file.keys()
            places = {key: key.rpartition(".") for key in keys}
            names = Names(model, [name for name, _, _ in places.values()])
            for key, (name, _, buffer) in places.items():
                if buffer in free.get(names.module(name), ()):
                    layer, shape = layers[names.module(name)], file.get_slice(key).get_shape()
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
