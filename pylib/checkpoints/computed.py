"""Buffers that a model computes when it is built and that no file has, such as the angles of rotations and positions.

A model that was built on the meta device has no values of them. transformers knows how to compute them for its own
models; others have to be built with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.names import is_of_transformers


def check_computed(model: nn.Module) -> None:
    """Raise CheckpointError if a model that is none of transformers' has buffers without values that no file has."""
    if (lost := _lost(model)) and not is_of_transformers(model):
        names = ", ".join(list(lost)[:3])
        raise CheckpointError(
            f"{names}: on the meta device, and in no file, as a model computes such buffers when it is built; build "
            "the model on the CPU, or compute them before loading"
        )


def compute_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Let transformers compute the buffers of its model that are on meta, on this device; all else has its values."""
    lost = _lost(model)
    if not lost:
        return
    for t in (*model.parameters(), *model.buffers()):
        t._is_hf_initialized = True  # type: ignore[attr-defined]
    for name, t in lost.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.empty_like(t, device=device))
    of_transformers: Any = model
    of_transformers.initialize_weights()


def _lost(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers on meta that are no part of a model's state."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                found[f"{path}.{name}".lstrip(".")] = buffer
    return found
