"""What a layer of a server multiplies by, and how other weights take its place in memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.integrations.serving.names import BIAS
from lowbit.pylib.nn.packed_module import PackedModule
from lowbit.pylib.nn.rotated import ColumnScaling, Rotation

_HELD = "lowbit"  # what a layer multiplies by; no module of the server's model


def hold(layer: Any, made: nn.Module) -> nn.Module:
    """Give a layer what it multiplies by, `layer.lowbit`; or the values of that, in the memory of what it has, where
    captured CUDA graphs read them. Returns what it has now.

    Raises PackError for weights of another format, and leaves those that it has.
    """
    held = layer.__dict__.get(_HELD)
    if held is None:
        layer.__dict__[_HELD] = _with_parameters(made)
        return made
    pairs = list(zip(packed_modules(held), packed_modules(made), strict=True))
    turns = list(zip_longest(_rotations(held), _rotations(made)))
    for old, new in pairs:
        old.packed.check_update(new.packed)  # of all, before any changes
    for old, new in turns:
        _check_rotation(old, new)
    for old, new in pairs:
        old.packed.update_(new.packed)
    for old, new in turns:
        if isinstance(old, ColumnScaling) and isinstance(new, ColumnScaling):
            old.scale.copy_(new.scale)
    return held


def _rotations(held: nn.Module) -> list[Rotation]:
    return [module for module in held.modules() if isinstance(module, Rotation)]


def _check_rotation(old: Rotation | None, new: Rotation | None) -> None:
    """Raise CheckpointError for another rotation; scalings of columns have new numbers for each model."""
    if isinstance(old, ColumnScaling) and isinstance(new, ColumnScaling):
        alike = (old.size, old.scale.dtype) == (new.size, new.scale.dtype)
    else:
        alike = old is not None and new is not None and old.is_like(new)
    if not alike:
        raise CheckpointError(
            "its inputs or outputs are rotated in another way than when the model was made; start the server again"
        )


def packed_modules(held: nn.Module) -> list[PackedModule]:
    """Returns the parts that hold packed weights."""
    return [module for module in held.modules() if isinstance(module, PackedModule)]


def own_tensors(module: PackedModule) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the tensors of a module by name, but for a bias, which is the server's."""
    for slot in module.spec.tensors:
        if slot.name != BIAS:
            yield slot.name, getattr(module, slot.name)


def _with_parameters(made: nn.Module) -> nn.Module:
    """Returns what was made, whose tensors are parameters now, as loaders want them."""
    for module in packed_modules(made):
        for name, tensor in own_tensors(module):
            module.share(name, nn.Parameter(tensor, requires_grad=False))
    return made


def dequantized(held: nn.Module) -> Tensor:
    """Returns the weight [n, k] in the type of x."""
    return torch.cat([module.dequantize() for module in packed_modules(held)])


def check_like(loaded_weight: Tensor, like: Tensor, tensor: str) -> None:
    """Raise CheckpointError for a tensor of the checkpoint of another size or type than when the model was made."""
    if (like.shape, like.dtype) != (loaded_weight.shape, loaded_weight.dtype):
        given, wanted = (f"{t.dtype} {list(t.shape)}" for t in (loaded_weight, like))
        raise CheckpointError(
            f"{tensor}: it is {given}, and was {wanted} when the model was made; start the server again to serve a "
            "model of other formats"
        )


def none_came(missing: str) -> CheckpointError:
    """Returns the error for tensors that the server's loader has not passed."""
    return CheckpointError(
        f"the server's loader has passed no {missing}; the class of the model may load tensors in a way of its own: "
        "run the model with transformers"
    )
