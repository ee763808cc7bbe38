"""Decoder layers whose launches follow each other without a gap when they decode: a part of `lowbit.fuse_`.

A decoder layer of transformers gets a class of its own. Its forward runs `pylib.layer.decode` where that computes the
same: for few tokens, without gradients, with a static cache and a mask. On a CPU `layer_on_cpu` comes first, which has
programs for layers of some classes, and takes any cache. Everything else, prompts above all, goes the way of the class
before. What decides is looked at in every call, so an adapter, a hook or another kind of cache that comes later takes
the layer back to that way. Nothing is kept between calls but the layer's own modules.

The gated network's rows are stored so that its kernel applies the activation (`GatedLinear`), whichever way it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.epilogue import Epilogue
from lowbit.dialect.errors import PackError, QuantizeError, SpecError
from lowbit.pylib.layer.by_kernel import MOST_ROWS
from lowbit.pylib.layer.decode import (
    Attention,
    Joint,
    Norm,
    Places,
    feed_forward,
    heads_of,
    joined,
    joined_after,
    normed_after,
)  # fmt: skip
from lowbit.pylib.nn import layer_on_cpu
from lowbit.pylib.nn.decoder_forms import (
    ATTENTION,
    PLAIN,
    Facts,
    are_norms_as_fused,
    cache_of,
    eps_of,
    facts_of,
    form_of,
    has_hooks,
    head_norms,
    is_of_its_file,
    was_patched,
)  # fmt: skip
from lowbit.pylib.nn.gated_linear import Gate, GatedLinear, change_order, gate_of, store_like
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import EXTRA_STATE

BY = ("sdpa", "eager", "lowbit_grouped")
"""Names of attention whose masks say for each place whether it may be looked at, or what is added to its product: the
last is that of `lowbit bench-model`."""
QKV, GATE_UP = ("q_k_v_proj", "qkv_proj"), "gate_up_proj"
_CACHES = ("transformers.cache_utils.StaticLayer", "transformers.cache_utils.StaticSlidingWindowLayer")
_COUNT = "cumulative_length_int"  # of the latter


class ChainedLayer:
    """Marks decoder layers whose class `fuse_` has made; isinstance with the class of before stays true."""


class GatedNetwork:
    """The same for gated feed-forward networks."""


def may_chain(module: nn.Module) -> bool:
    """Tells whether a module is a decoder layer whose projections are one layer, or that has programs for a CPU, which
    take several."""
    is_layer = type(module).__name__.endswith("DecoderLayer") or all(module._modules.get(e) for e in PLAIN.children)
    if not is_layer or module._modules.get(ATTENTION) is None:
        return False
    return type(qkv_of(module)) is LowbitLinear or layer_on_cpu.takes_apart(module)


def children_of(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the modules of a decoder layer."""
    form = form_of(layer)
    return form.children if form else tuple(layer._modules)


def qkv_of(layer: nn.Module) -> nn.Module | None:
    """Returns the layer that projects to queries, keys and values, if there is one."""
    modules = _attention(layer)._modules
    return next((modules[name] for name in QKV if modules.get(name) is not None), None)


def chain_(layer: nn.Module, gate: bool = True) -> str:
    """Gives a decoder layer its class; returns why it can't have one, or "".

    gate   also store its gated network for an activation in the kernel
    """
    if reason := _why_not(layer):
        return reason
    try:
        facts = facts_of(layer)
    except QuantizeError as error:
        return str(error)
    network = layer.get_submodule(facts.form.network)
    if gate and is_of_its_file(network, layer) and not was_patched(network):
        _gate(network)
    layer.__class__ = _chained_class(type(layer), facts=facts)
    return ""


def unchain_(layer: nn.Module) -> None:
    """Gives a decoder layer the class that it had, and its gated network the order of rows."""
    network = layer.get_submodule(cast(Any, layer).facts.form.network)
    layer.__class__ = type(layer).__mro__[1]
    if isinstance(network, GatedNetwork):
        if type(gate_up := network._modules[GATE_UP]) is GatedLinear:
            change_order(gate_up, Gate(cast(Epilogue, gate_up.spec.epilogue), gate_up.pairs))
        network.__class__ = type(network).__mro__[1]


def _why_not(layer: nn.Module) -> str:
    """Returns why a decoder layer can't have a chain of launches, or ""."""
    kind = type(layer)
    if form_of(layer) is None:
        return f"how a {kind.__name__} decodes is not known; docs/howto/fastest-decode.md has the classes that are"
    if "forward" in vars(layer):
        return f"the forward of this {kind.__name__} was replaced by another"
    if not is_of_its_file(_attention(layer), layer):
        return f"its attention is a {type(_attention(layer)).__name__} of {type(_attention(layer)).__module__}"
    if patched := [type(each).__name__ for each in (layer, _attention(layer)) if was_patched(each)]:
        return f"the forward of {patched[0]} is not that of transformers"
    if type(out := _attention(layer)._modules.get("o_proj")) is not LowbitLinear:
        return f"self_attn.o_proj is a {type(out).__name__}, not a LowbitLinear"
    qkv = cast(LowbitLinear, qkv_of(layer) or _attention(layer)._modules["q_proj"])
    if any(spec.out_dtype != qkv.spec.act or spec.act != qkv.spec.act for spec in (qkv.spec, out.spec)):
        return f"its layers differ in types: {qkv.spec}; {out.spec}"
    devices = {str(tensor.device) for tensor in (*layer.parameters(), *layer.buffers())}
    return f"its tensors are on {', '.join(sorted(devices))}" if len(devices) > 1 else ""


def _attention(layer: nn.Module) -> nn.Module:
    return cast(nn.Module, layer._modules[ATTENTION])


# -- gated networks


def _gate(network: nn.Module) -> None:
    """Stores the rows of a gated network for an activation in the kernel, where there is one for it."""
    gate_up, gate = network._modules.get(GATE_UP), gate_of_network(network)
    if type(gate_up) is not LowbitLinear or type(network._modules.get("down_proj")) is not LowbitLinear or not gate:
        return
    if gate_up._forward_hooks or gate_up._forward_pre_hooks or "forward" in vars(network):
        return
    with suppress(SpecError, PackError):  # 16 rows share a second level, say
        change_order(gate_up, gate)
    gate_network(network)


def gate_network(network: nn.Module) -> None:
    """Gives a network with a layer gate_up_proj the class that applies the activation in the kernel."""
    network.__class__ = _gated_class(type(network))


def gate_placed(network: nn.Module) -> None:
    """Makes a layer gate_up_proj, which is empty, one whose weight is stored for an activation in the kernel, where a
    class has it itself (Phi-3)."""
    gate_up, gate = network._modules.get(GATE_UP), gate_of_network(network)
    if type(gate_up) is LowbitLinear and gate:
        if gate_up.spec.is_gated:
            GatedLinear.of(gate_up, gate.pairs)
        else:
            change_order(gate_up, gate)
        gate_network(network)


def gate_of_network(network: nn.Module) -> Gate | None:
    """Returns what a network does to what gate_up_proj gives, where a kernel can do it."""
    activation: Any = getattr(network, "act_fn", None) or getattr(network, "activation_fn", None)

    def apply(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return activation(gate) * up

    with torch.inference_mode():
        return gate_of(apply) if callable(activation) else None


@lru_cache(maxsize=None)
def _gated_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns a class whose forward has the kernel of gate_up_proj apply the activation, while it is a layer that
    can."""

    def forward(self: Any, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj, self.down_proj
        return down(gate_up.gated(x)) if _is_plain(gate_up, GatedLinear) else cls.forward(self, x)

    def load(self: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        about, gate = state_dict.get(f"{prefix}{GATE_UP}.{EXTRA_STATE}"), gate_of_network(self)
        if isinstance(self.gate_up_proj, LowbitLinear) and isinstance(about, Tensor) and gate:
            store_like(self.gate_up_proj, about, gate)
        cast(Any, cls)._load_from_state_dict(self, state_dict, prefix, *rest)

    return subclass(cls, GatedNetwork, {"forward": forward, "_load_from_state_dict": load}, _gated_class)


# -- decoder layers


@lru_cache(maxsize=None)
def _chained_class(cls: type[nn.Module], facts: Facts) -> type[nn.Module]:
    """Returns a class whose forward is a chain of launches, or of a CPU's programs, where that computes what the
    forward of before does."""
    has_programs = layer_on_cpu.knows(cls)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if has_programs and not args and (y := layer_on_cpu.decoded(self, hidden_states, kwargs)) is not None:
            return y
        cache = None if args or qkv_of(self) is None else _cache(self, hidden_states, kwargs)
        if cache is None:
            return cls.forward(self, hidden_states, *args, **kwargs)
        (cos, sin), mask = kwargs["position_embeddings"], kwargs["attention_mask"]
        at = Places(cos, sin, cache.keys, cache.values, cache.cumulative_length, mask, _is_full(cache))
        if hasattr(cache, _COUNT):
            setattr(cache, _COUNT, getattr(cache, _COUNT) + hidden_states.shape[1])
        return _decode(self, hidden_states, at)

    made_by = partial(_chained_class, facts=facts)
    return subclass(cls, ChainedLayer, {"forward": forward, "facts": facts}, made_by)


def subclass(cls: type[nn.Module], mark: type, own: Mapping[str, Any], made_by: Any) -> type[nn.Module]:
    """Returns a class of the same name, whose modules can be copied and pickled.

    made_by   makes it of `cls`, which may itself be a class that no module has
    """

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        state = object.__reduce_ex__(self, 2)[2]
        of_fused = "__reduce_ex__" in vars(cls)
        empty, given, *_ = cls.__reduce_ex__(self, protocol) if of_fused else (_new, (cls,))
        return _empty, (made_by, empty, given), state

    return type(cls.__name__, (cls, mark), {**own, "__reduce_ex__": reduce, "__module__": cls.__module__})


def _new(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _empty(made_by: Any, empty: Callable[..., nn.Module], given: tuple[Any, ...]) -> nn.Module:
    """Returns a module without state, for copies and pickles to fill."""
    module = empty(*given)
    module.__class__ = made_by(type(module))
    return module


def _decode(layer: Any, x: Tensor, at: Places) -> Tensor:
    """Returns the output of a layer, and appends to its cache."""
    facts: Facts = layer.facts
    form, network = facts.form, layer._modules[facts.form.network]
    before, after = ([_norm(layer, name) for name in names] for names in (form.before, form.after))
    heads, out = heads_of(x, cast(Norm, before[0]), _attention_parts(layer), at), layer.self_attn.o_proj
    counted = cast(Norm, before[1]), at.held, x.shape[1]
    if facts.joins:
        joints = [Joint(norm, getattr(layer, "residual_multiplier", 1.0)) for norm in after]
        x, h = joined_after(out(heads), x, joints[0], *counted)
        return joined(_first(network(h)), x, joints[1])
    x = out.plus(heads, x)
    h = normed_after(x, *counted)
    gate_up, down = (network._modules.get(name) for name in (GATE_UP, "down_proj"))
    if issubclass(type(network), GatedNetwork) and _is_plain(gate_up, GatedLinear) and _is_plain(down, LowbitLinear):
        return feed_forward(x, h, gate_up, down)
    return x + _first(network(h))


def _attention_parts(layer: Any) -> Attention:
    """Returns the attention of a layer, with its tensors and numbers as they are now."""
    facts, module = layer.facts, layer.self_attn
    norms = [Norm(norm.weight, eps_of(norm), facts.shift) for norm in cast(list[Any], head_norms(module))]
    return Attention(
        cast(LowbitLinear, qkv_of(layer)),
        module.o_proj,
        module.scaling,
        (norms[0], norms[1]) if norms else None,
        getattr(module, "sinks", None),
        getattr(module, "attn_logit_softcapping", None) or 0.0,
        bool(getattr(module, "use_rope", True)),
        facts.repeated,
        facts.beside,
    )


def _norm(layer: Any, name: str) -> Norm | None:
    """Returns a layer's norm of a name; None for none."""
    if not name:
        return None
    module = layer._modules[name]
    return Norm(module.weight, eps_of(module), layer.facts.shift)


def _first(given: Any) -> Tensor:
    """Returns what a network computes, of those that return more: what a router has chosen."""
    return given[0] if isinstance(given, tuple) else given


# -- which calls are for a chain


def _cache(layer: Any, x: Tensor, given: Mapping[str, Any]) -> Any:
    """Returns the part of a static cache that a call is to append to; None for a call that a chain of launches is not
    for."""
    cache, turn = cache_of(given), given.get("position_embeddings")
    few = x.ndim == 3 and x.shape[0] * x.shape[1] <= MOST_ROWS
    if layer.training or torch.is_grad_enabled() or not few or cache is None or turn is None:
        return None
    held = _static_layer(cache, layer.self_attn.layer_idx)
    if held is None or not _has_room(held, x.shape[1]):
        return None
    is_known = _is_as_fused(layer, x) and _fits(layer, x, held, turn, given.get("attention_mask"))
    return held if is_known else None


def _static_layer(cache: Any, index: int) -> Any:
    """Returns the part of a static cache for a layer; None for another kind of cache, and before its first tokens."""
    layers = getattr(cache, "layers", None)
    if getattr(cache, "offloading", False) or layers is None or len(layers) <= index:
        return None
    found = layers[index]
    kind = type(found)
    is_static = f"{kind.__module__}.{kind.__qualname__}" in _CACHES
    counted = isinstance(getattr(found, "cumulative_length", None), Tensor)
    return found if is_static and counted and found.is_initialized else None


def _has_room(held: Any, tokens: int) -> bool:
    """Tells whether a cache of a window, which counts on the host as well, takes so many tokens: those that fit, or
    one by one."""
    count = getattr(held, _COUNT, None)
    return count is None or count + tokens <= held.keys.shape[2] or (_is_full(held) and tokens == 1)


def _is_full(held: Any) -> bool:
    """Tells whether a cache of a window has all places in use, so that the next token takes that of the first."""
    return hasattr(held, _COUNT) and getattr(held, _COUNT) >= held.keys.shape[2]


def _fits(layer: Any, x: Tensor, held: Any, turn: tuple[Tensor, Tensor], mask: Any) -> bool:
    """Tells whether the tensors of a call are as the kernels read them."""
    keys, values, qkv = held.keys, held.values, cast(LowbitLinear, qkv_of(layer))
    (b, t, _), (batch, heads, length, columns) = x.shape, keys.shape
    sinks: Tensor | None = getattr(layer.self_attn, "sinks", None)
    queries, turned = layer.self_attn.o_proj.in_features, turn[0].shape[-1] * (1 if layer.facts.repeated else 2)
    return (
        (batch, x.shape[2]) == (b, qkv.in_features)
        and queries + 2 * heads * columns == qkv.out_features
        and values.shape == keys.shape
        and all(each.dtype is x.dtype and each.device == x.device for each in (keys, values, *turn))
        and keys.is_contiguous()
        and values.is_contiguous()
        and turn[0].shape == turn[1].shape
        and turn[0].ndim == 3
        and turn[0].shape[1] == t
        and turned <= columns
        and (sinks is None or sinks.numel() * columns == queries)
        and isinstance(mask, Tensor)
        and mask.dtype in (torch.bool, x.dtype)
        and mask.shape in ((b, 1, t, length), (1, 1, t, length))
    )


def _is_as_fused(layer: Any, x: Tensor) -> bool:
    """Tells whether the modules of a layer are those that were fused, without hooks or adapters."""
    attention = layer.self_attn
    linears: list[Any] = [qkv_of(layer), attention.o_proj]
    return (
        all(_is_plain(each, LowbitLinear) and each._act is x.dtype for each in linears)
        and is_of_its_file(attention, layer)
        and are_norms_as_fused(layer, x)
        and not any(has_hooks(each) for each in layer.children())
        and getattr(attention, "is_causal", True)
        and attention.config._attn_implementation in BY
    )


def _is_plain(module: Any, kind: type) -> bool:
    """Tells whether a module is a low-bit layer as it was made, without hooks."""
    return type(module) is kind and not has_hooks(module)
