"""All decoder layers of a model in one native call for a token on a CPU: a part of `lowbit.fuse_`.

A model of transformers whose layers decode in a CPU's programs (`layer_on_cpu`) gets a class of its own. Its forward
runs them all at once for one token of each sequence, with the caches of transformers that are tensors (`cache_room`).
What the modules are is looked at when they have changed (`snapshot`); what a call has is looked at in every call.
Every other call goes the way of the class before, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lowbit.pylib.layer.on_cpu import CpuStack
from lowbit.pylib.nn import cache_room
from lowbit.pylib.nn.chain import ChainedLayer, subclass
from lowbit.pylib.nn.decoder_forms import ATTENTION, cache_of, has_hooks, was_patched
from lowbit.pylib.nn.layer_on_cpu import programs_of
from lowbit.pylib.nn.snapshot import Snapshot
from lowbit.pylib.operator.tracing import is_observed
from lowbit.pylib.runtime.batch_invariant import MODE

KNOWN = (
    "transformers.models.gemma3.modeling_gemma3.Gemma3TextModel",
    "transformers.models.llama.modeling_llama.LlamaModel",
    "transformers.models.mistral.modeling_mistral.MistralModel",
    "transformers.models.qwen2.modeling_qwen2.Qwen2Model",
    "transformers.models.qwen3.modeling_qwen3.Qwen3Model",
)
"""Models whose forward is: embedding, rotations by position (in Gemma 3 by the type of layer, too), layers, norm."""
PARTS = ("layers",)
_CACHES = ("cache", "past_key_values")  # names of a cache, by this version of transformers and those before
_READ = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "use_cache", *_CACHES)
_MORE = ("output_hidden_states", "output_attentions", "use_bidirectional_attention")
"""Settings of a model with which a call does more than append to a cache."""


class StackedModel:
    """Marks models whose class `stack_` has made; isinstance with the class of before stays true."""


@dataclass(frozen=True)
class _Stack:
    """What is known of a model.

    addresses   of its tensors, as `CpuStack.addresses` gives them
    indices     of layers in a cache
    types       of layers, by which dictionaries of masks have them; None: all alike
    turned      types of layers that have rotations of their own; (): all have the same
    windows     the most places that a layer's token attends to; None: all
    """

    programs: CpuStack
    addresses: NDArray[np.int64]
    indices: tuple[int, ...]
    types: tuple[str, ...] | None
    turned: tuple[str, ...]
    windows: tuple[int | None, ...]


_KEPT: WeakKeyDictionary[nn.Module, tuple[Snapshot, _Stack | None]] = WeakKeyDictionary()


def may_stack(model: nn.Module) -> bool:
    """Tells whether a model is of a class that is known, on a CPU or to be filled, and has layers that decode in a
    CPU's programs."""
    kind = type(model)
    if f"{kind.__module__}.{kind.__qualname__}" not in KNOWN or isinstance(model, StackedModel) or was_patched(model):
        return False
    layers, places = [*model.get_submodule("layers").children()], {each.device.type for each in model.parameters()}
    return places <= {"cpu", "meta"} and bool(layers) and all(isinstance(layer, ChainedLayer) for layer in layers)


def stack_(model: nn.Module) -> None:
    """Gives a model its class."""
    model.__class__ = _stacked_class(type(model))


def unstack_(model: nn.Module) -> None:
    """Gives a model the class that it had."""
    model.__class__ = type(model).__mro__[1]
    _KEPT.pop(model, None)


@lru_cache(maxsize=None)
def _stacked_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns a class whose forward is one native call where that computes what the forward of before does."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and (y := decoded(self, kwargs)) is not None:
            from transformers.modeling_outputs import BaseModelOutputWithPast

            name = next(name for name in _CACHES if name in BaseModelOutputWithPast.__dataclass_fields__)
            return BaseModelOutputWithPast(y, **{name: cache_of(kwargs)})
        return cls.forward(self, *args, **kwargs)

    return subclass(cls, StackedModel, {"forward": forward}, _stacked_class)


def decoded(model: Any, given: Mapping[str, Any]) -> Tensor | None:
    """Returns the normed output of the last layer for one token of each sequence, and appends to the cache; None,
    before anything is done, for a call that the programs are not for.

    given   what the model is called with, by name
    """
    if is_observed() or MODE.on or torch.is_grad_enabled() or model.training or _has_any_global_hook():
        return None
    tokens, cache = _tokens_of(given, model.config), cache_of(given)
    if tokens is None or cache is None or (stack := _stack_of(model)) is None:
        return None
    held = cache_room.held_layers(cache, stack.indices)
    if held is None or not _have_room(stack, held, len(tokens)):
        return None
    masks = _masks(stack, given.get("attention_mask"), cache)
    if masks is None or not _fit(stack, masks, held):
        return None
    x = model.embed_tokens(tokens) if tokens.ndim == 2 else tokens
    turns = _turns(model, stack, x, given.get("position_ids"), cache)
    if not _are_rows(stack, x, turns):
        return None
    places = [cache_room.append(each, mask) for each, mask in zip(held, masks)]
    return model.norm(stack.programs.decode(x, stack.addresses, turns, places))


# -- what a call has


def _tokens_of(given: Mapping[str, Any], config: Any) -> Tensor | None:
    """Returns the numbers [b, 1] or the embeddings [b, 1, hidden] of a call's tokens; None for a call with others, or
    one that asks for more than that they are appended to a cache."""
    numbers, rows = given.get("input_ids"), given.get("inputs_embeds")
    found, dims = (numbers, 2) if rows is None else (rows, 3)
    use = given.get("use_cache")
    if (rows is not None and numbers is not None) or not (config.use_cache if use is None else use):
        return None
    if type(found) is not Tensor or found.ndim != dims or found.device.type != "cpu":
        return None
    simple = all(name in _READ or _asks_for_nothing(name, value) for name, value in given.items())
    return found if simple and len(found) and found.shape[1] == 1 else None


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Tells whether an argument has no effect."""
    return value is None or (value is False and name.startswith("output_")) or (value is True and name == "return_dict")


def _have_room(stack: _Stack, held: Sequence[Any], batch: int) -> bool:
    """Tells whether each part of a cache takes a token for every sequence."""
    return batch <= stack.programs.most_tokens and all(
        cache_room.has_room(each, layer.type, batch, layer.shape.keys, layer.shape.columns)
        for layer, each in zip(stack.programs.layers, held)
    )


def _masks(stack: _Stack, given: Any, cache: Any) -> list[Any] | None:
    """Returns the mask of each layer, which is None where all places are looked at; None for masks of other kinds."""
    if isinstance(given, dict):
        return [given.get(kind) for kind in stack.types] if stack.types else None
    if isinstance(given, Tensor) and given.ndim == 2:  # a number for every token, which is 0 for padding
        complete = given.shape[1] > int(cache.get_seq_length()) and bool(given.all())
        return [None] * len(stack.indices) if complete else None
    return [given] * len(stack.indices)


def _fit(stack: _Stack, masks: Sequence[Any], held: Sequence[Any]) -> bool:
    """Tells whether masks are as programs read them; without, whether windows have all places."""
    if all(mask is None for mask in masks):
        limited = [(window, each) for window, each in zip(stack.windows, held) if window is not None]
        return all(cache_room.places_seen(each) <= window for window, each in limited)
    return all(
        isinstance(mask, Tensor)
        and mask.dtype is torch.bool
        and mask.device.type == "cpu"
        and mask.shape in ((len(each.keys), 1, 1, size := cache_room.places_held(each)), (1, 1, 1, size))
        and mask.stride(3) == 1
        for mask, each in zip(masks, held)
    )


def _turns(model: Any, stack: _Stack, x: Tensor, places: Tensor | None, cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns cos and sin for all layers, or for each type."""
    if places is None:
        places = torch.arange(1)[None] + cache.get_seq_length()
    return [model.rotary_emb(x, places, kind) for kind in stack.turned] or [model.rotary_emb(x, places)]


def _are_rows(stack: _Stack, x: Tensor, turns: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Tells whether embeddings and rotations are as programs read them."""
    layer = stack.programs.layers[0]
    shapes, turned = [(b, 1, layer.shape.columns) for b in {1, len(x)}], [each for turn in turns for each in turn]
    return (
        type(x) is Tensor
        and x.shape[1:] == (1, layer.shape.hidden)
        and all(each.dtype is layer.type and each.device.type == "cpu" for each in (x, *turned))
        and all(each.shape in shapes for each in turned)
    )


# -- what a model is


def _stack_of(model: nn.Module) -> _Stack | None:
    """Returns what is known of a model as it is now; None where there are no programs for it."""
    kept = _KEPT.get(model)
    if kept is None or not kept[0].holds():
        layers = _layers_of(model)
        inside = [module for layer in layers for module in layer.modules()]
        settings = {id(each): each for module in (model, *inside) if (each := vars(module).get("config")) is not None}
        found = Snapshot([model, model.get_submodule(PARTS[0]), *inside], settings.values())
        kept = _KEPT[model] = found, _known(model, layers)
    return kept[1]


def _layers_of(model: Any) -> list[Any]:
    return [*model.layers._modules.values()][: model.config.num_hidden_layers]


def _known(model: Any, layers: Sequence[Any]) -> _Stack | None:
    """Returns what is known of a model; None where there are no programs for it."""
    config = model.config
    if not layers or any(map(has_hooks, layers)) or not all(isinstance(layer, ChainedLayer) for layer in layers):
        return None
    if any(getattr(config, name, None) for name in _MORE) or getattr(config, "is_causal", None) is False:
        return None
    like = layers[0]._modules[layers[0].facts.form.before[0]]._parameters.get("weight")
    if like is None or like.device.type != "cpu":
        return None
    found = [programs_of(layer, like) for layer in layers]
    complete = [each for each in found if each is not None]
    if len(complete) < len(layers) or len({(each.shape.columns, each.type) for each, _ in complete}) > 1:
        return None
    types = getattr(config, "layer_types", None)
    types = None if types is None else tuple(types[: len(layers)])
    turned = tuple(sorted(set(types or ()))) if "layer_type" in signature(model.rotary_emb.forward).parameters else ()
    rotations = [turned.index(kind) for kind in types] if turned and types else [0] * len(layers)
    programs = CpuStack([each for each, _ in complete], rotations)
    addresses = programs.addresses([weights for _, weights in complete])
    attention = [layer._modules[ATTENTION] for layer in layers]
    indices = tuple(each.layer_idx for each in attention)
    windows = tuple(_window_of(each, config) for each in attention)
    return _Stack(programs, addresses, indices, types, turned, windows) if len(set(indices)) == len(layers) else None


def _window_of(attention: Any, config: Any) -> int | None:
    """Returns the most places that a token attends to: the attention's own, or where it has none, the model's."""
    return vars(attention).get("sliding_window", getattr(config, "sliding_window", None))
