"""`lowbit.save_checkpoint` and `lowbit.load_checkpoint`: whole models in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.spec import Act
from lowbit.pylib.checkpoints.checkpoint import VERSION, VERSION_KEY, Checkpoint, matches
from lowbit.pylib.checkpoints.computed import check_computed, compute_buffers
from lowbit.pylib.checkpoints.dense import Dense
from lowbit.pylib.checkpoints.layers import Loader
from lowbit.pylib.checkpoints.names import Names
from lowbit.pylib.checkpoints.placement import check_rotations, placed, wanted_layers
from lowbit.pylib.checkpoints.tensor_files import INDEX, SINGLE
from lowbit.pylib.nn.embedding import TiedLinear
from lowbit.pylib.nn.packed_module import check_model
from lowbit.pylib.runtime.devices import check_torch_device

SHARD_BYTES = 5_000_000_000


def save_checkpoint(model: nn.Module, path: str | PathLike[str], max_shard_bytes: int = SHARD_BYTES) -> None:
    """Save a model to a folder, in safetensors files of at most so many bytes, or one tensor each.

    There is one file, model.safetensors, or several with an index, named as transformers names them. A tensor that the
    model holds by several names is saved once, by the first of them. Low-bit layers carry their specs.

    Raises CheckpointError for the path of a file, for a folder that has a checkpoint already, and for a state that is
    not made of tensors.
    """
    check_model(model)
    folder = Path(path)
    if old := [file.name for file in (folder / SINGLE, folder / INDEX) if file.exists()]:
        raise CheckpointError(f"{folder} has a {old[0]} already; remove it, or save to another folder")
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; name a folder")
    shards = list(_shards(_state(model), max_shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    folder.mkdir(parents=True, exist_ok=True)
    for name, shard in zip(names, shards):
        save_file({key: _alone(t) for key, t in shard.items()}, folder / name, {"format": "pt", VERSION_KEY: VERSION})
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for t in shard.values())
        files = {key: name for name, shard in zip(names, shards) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def _alone(t: Tensor) -> Tensor:
    """Returns a tensor on the CPU that shares its memory with no other."""
    dense = t.detach().cpu().contiguous()
    return dense if dense.untyped_storage().nbytes() == dense.nbytes else dense.clone()


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a model, each tensor once."""
    once = {name for name, _ in model.named_modules()}
    again = tuple(f"{name}." for name, _ in model.named_modules(remove_duplicate=False) if name not in once)
    seen: set[tuple[object, ...]] = set()
    state: dict[str, Tensor] = {}
    for name, t in model.state_dict().items():
        if not isinstance(t, Tensor) or t.is_meta or t.layout is not torch.strided:
            what = f"{t.layout} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            raise CheckpointError(f"{name} is {what}; only dense tensors with values can be saved")
        key = (t.data_ptr(), t.shape, t.stride(), t.dtype)
        if not name.startswith(again) and not (t.numel() and key in seen):
            state[name] = t
            seen.add(key)
    return state


def _shards(state: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """Yields parts of a state of at most so many bytes, or of one tensor."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, t in state.items():
        if shard and size + t.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = t
        size += t.nbytes
    yield shard


# -- loading


@torch.no_grad()
def load_checkpoint(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    act: Act | None = None,
    device: torch.device | str | None = None,
    ignore: Sequence[str] = (),
    progress: bool = True,
) -> Checkpoint:
    """Load a model from a folder, lowbit's own or another library's; returns the opened checkpoint.

    model    built as for float weights, on the meta device say: linear layers that are quantized in the files become
             `LowbitLinear`s, embeddings `LowbitEmbedding`s, experts of transformers `LowbitExperts`, and other tensors
             are assigned in the type that they have in the files. Layers and embeddings that are low-bit already are
             replaced, whatever their format
    act      type of the inputs of quantized layers; None: what they were saved for, or the dtype of config.json
    device   where to load; None: where the model's tensors are, or the CPU if they are on meta. Buffers that are in no
             file, as models compute for rotations and positions, stay where they are; on meta, those of transformers'
             models are computed as `from_pretrained` does it, and those of others are an error
    ignore   patterns of names of tensors in the files that the model does not need, such as "*.k_scale"; a quantized
             layer is left out as a whole, never a part of it
    progress show a bar with time and memory, if standard error is a terminal

    Raises CheckpointError for a tensor that is missing, left over, damaged, or of another shape than the model's; it
    names the file and the layer, and leaves the model as it was.
    """
    check_model(model)
    check_torch_device(device)
    if isinstance(ignore, str):
        raise CheckpointError(f"ignore={ignore!r} must be a list of patterns; use [{ignore!r}]")
    check_computed(model)
    checkpoint = Checkpoint(Path(path))
    modules = dict(model.named_modules(remove_duplicate=False))
    names = Names(model)
    layers = {
        name: here
        for name, here in wanted_layers(checkpoint, names, modules).items()
        if not all(matches(tensor, ignore) for tensor in checkpoint.names_of(name).values())
    }
    placement = placed(layers, modules, str(checkpoint.tensors.folder))
    check_rotations(checkpoint, names, modules, placement)
    loaded = Loader(modules, placement, checkpoint, act, device, progress).replacements()
    places = {place: new for name, new in loaded.items() for place, old in modules.items() if old is modules[name]}
    replaced = tuple(f"{place}.{'weight' if isinstance(new, TiedLinear) else ''}" for place, new in places.items())
    wanted = {name: t for name, t in model.state_dict(keep_vars=True).items() if not name.startswith(replaced)}
    dense = Dense(model, checkpoint, names, wanted, device).tensors(ignore)
    for place, new in places.items():
        model.set_submodule(place, new)
    model.load_state_dict(dense, strict=False, assign=True)
    compute_buffers(model, device or "cpu")
    return checkpoint

