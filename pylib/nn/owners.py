"""Modules that do more with a layer of theirs than call it, so that no low-bit layer can take its place.

Some read the weight, some cast the layer and its inputs, some write to the weight. Such modules are known by what they
hold, or by the full names of their classes, so that no library has to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lowbit.pylib.nn.linear_like import full_name

READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that take `weight` out of their linear layers instead of calling them."""


def why_needed(owner: nn.Module, name: str, layer: nn.Module) -> str:
    """Returns why a module needs a dense layer; "" if it does not. name: what the owner calls the layer."""
    if isinstance(owner, READ_WEIGHTS):
        return f"{type(owner).__name__} reads its weight itself"
    return why_changed(owner, name, layer)


def why_changed(owner: nn.Module, name: str, layer: nn.Module) -> str:
    """Returns how a module changes a layer of its own when it is called, which a low-bit one does not bear; "" if it
    does not. The arguments are those of `why_needed`."""
    return WRITERS.get((full_name(owner), name), _writes_nothing)(owner) or _casts(owner, layer)


def _casts(owner: nn.Module, layer: nn.Module) -> str:
    """Returns that an owner computes in f32 where the layer's weight has 16 bits: it has a `dtype` for that, as the
    routers of Switch Transformers and NLLB-MoE, and casts inputs and layer when it is called."""
    own, kinds = vars(owner).get("dtype"), {p.dtype for p in layer.parameters(recurse=False) if p.ndim > 1}
    if own is torch.float32 and kinds & {torch.float16, torch.bfloat16}:
        return f"{type(owner).__name__} computes in f32, and casts it"
    return ""


def _writes_nothing(_: Any) -> str:
    return ""


def _is_rescaled(owner: Any) -> str:
    if getattr(owner.config, "rescale_every", 0) > 0:
        return f"{type(owner).__name__} divides its weight in place; config.rescale_every = 0 quantizes it"
    return ""


_RWKV = "transformers.models.rwkv.modeling_rwkv"
WRITERS: Mapping[tuple[str, str], Callable[[Any], str]] = {
    (f"{_RWKV}.RwkvSelfAttention", "output"): _is_rescaled,
    (f"{_RWKV}.RwkvFeedForward", "value"): _is_rescaled,
}
"""Modules that write to the weight of a layer of theirs, by class and name of the layer, each with a function that
returns why, or "" where it does not."""
