"""Decoder layers whose launches follow each other without a gap when they decode: a part of `lowbit.fuse_`.

A decoder layer of transformers gets a class of its own. Its forward runs `pylib.layer.decode` where that computes the
same: for few tokens, without gradients, with a static cache and a mask of bools. Everything else, prompts above all,
goes the way of the class before. What decides is looked at in every call, so an adapter, a hook or another kind of
cache that comes later takes the layer back to that way. Nothing is kept between calls but the layer's own modules.

The gated network's rows are stored so that its kernel applies the activation (`GatedLinear`), whichever way it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.epilogue import Epilogue
from lowbit.dialect.errors import PackError, SpecError
from lowbit.pylib.layer.by_kernel import MOST_ROWS
from lowbit.pylib.layer.decode import Attention, Norm, Places, attend, feed_forward, normed_after
from lowbit.pylib.nn.gated_linear import Gate, GatedLinear, change_order, gate_of, store_like
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import EXTRA_STATE

KNOWN = (
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer",
)
"""Decoder layers whose forward is norm, attention, sum, norm, feed-forward network, sum."""

ATTENTION = ("sdpa", "lowbit_grouped")
"""Names of attention whose masks say for each place whether it may be looked at: the latter is that of
`lowbit bench-model`."""
QKV, GATE_UP = "q_k_v_proj", "gate_up_proj"
CHILDREN = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_CACHE = "transformers.cache_utils.StaticLayer"


class ChainedLayer:
    """Marks decoder layers whose class `fuse_` has made; isinstance with the class of before stays true."""


class GatedNetwork:
    """The same for gated feed-forward networks."""


def may_chain(module: nn.Module) -> bool:
    """Tells whether a module is a decoder layer whose projections have become one layer."""
    children = module._modules
    return all(children.get(name) is not None for name in CHILDREN) and type(qkv_of(module)) is LowbitLinear


def qkv_of(layer: nn.Module) -> nn.Module | None:
    """Returns the layer that projects to queries, keys and values, if there is one."""
    return cast(nn.Module, layer._modules["self_attn"])._modules.get(QKV)


def chain_(layer: nn.Module, gate: bool = True) -> str:
    """Gives a decoder layer its class; returns why it can't have one, or "".

    gate   also store its gated network for an activation in the kernel
    """
    if reason := _why_not(layer):
        return reason
    if gate:
        _gate(layer.get_submodule("mlp"))
    layer.__class__ = _chained_class(type(layer))
    return ""


def unchain_(layer: nn.Module) -> None:
    """Gives a decoder layer the class that it had, and its gated network the order of rows."""
    layer.__class__ = type(layer).__mro__[1]
    network = layer.get_submodule("mlp")
    if isinstance(network, GatedNetwork):
        if type(gate_up := network._modules[GATE_UP]) is GatedLinear:
            change_order(gate_up, Gate(cast(Epilogue, gate_up.spec.epilogue), gate_up.pairs))
        network.__class__ = type(network).__mro__[1]


def _why_not(layer: nn.Module) -> str:
    """Returns why a decoder layer can't have a chain of launches, or ""."""
    kind = type(layer)
    if f"{kind.__module__}.{kind.__qualname__}" not in KNOWN:
        names = ", ".join(name.rpartition(".")[2] for name in KNOWN)
        return f"how a {kind.__name__} decodes is not known; that of {names} is"
    if "forward" in vars(layer):
        return f"the forward of this {kind.__name__} was replaced by another"
    if type(out := _attention(layer)._modules.get("o_proj")) is not LowbitLinear:
        return f"self_attn.o_proj is a {type(out).__name__}, not a LowbitLinear"
    qkv = cast(LowbitLinear, qkv_of(layer))
    if any(spec.out_dtype != qkv.spec.act or spec.act != qkv.spec.act for spec in (qkv.spec, out.spec)):
        return f"its layers differ in types: {qkv.spec}; {out.spec}"
    devices = {str(tensor.device) for tensor in (*layer.parameters(), *layer.buffers())}
    return f"its tensors are on {', '.join(sorted(devices))}" if len(devices) > 1 else ""


def _attention(layer: nn.Module) -> nn.Module:
    return cast(nn.Module, layer._modules["self_attn"])


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


def gate_of_network(network: nn.Module) -> Gate | None:
    """Returns what a network does to what gate_up_proj gives, where a kernel can do it."""
    activation: Any = getattr(network, "act_fn", None)

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
def _chained_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns a class whose forward is a chain of launches where that computes what the forward of before does."""

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if args or (at := _places(self, hidden_states, attention_mask, kwargs)) is None:
            return cls.forward(self, hidden_states, attention_mask, *args, **kwargs)
        return _decode(self, hidden_states, at)

    return subclass(cls, ChainedLayer, {"forward": forward}, _chained_class)


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
    attention, network = layer.self_attn, cast(Any, layer.mlp)
    norms = (_norm(attention.q_norm), _norm(attention.k_norm)) if hasattr(attention, "q_norm") else None
    parts = Attention(attention.q_k_v_proj, attention.o_proj, attention.scaling, norms)
    x = attend(x, _norm(layer.input_layernorm), parts, at)
    h = normed_after(x, _norm(layer.post_attention_layernorm), at.held, x.shape[1])
    gate_up, down = (network._modules.get(name) for name in (GATE_UP, "down_proj"))
    if issubclass(type(network), GatedNetwork) and _is_plain(gate_up, GatedLinear) and _is_plain(down, LowbitLinear):
        return feed_forward(x, h, gate_up, down)
    return x + network(h)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _places(layer: Any, x: Tensor, mask: Any, given: Mapping[str, Any]) -> Places | None:
    """Returns where the tokens of a call are; None for a call that a chain of launches is not for."""
    cache, turn = given.get("cache", given.get("past_key_values")), given.get("position_embeddings")
    few = x.ndim == 3 and x.shape[0] * x.shape[1] <= MOST_ROWS
    if layer.training or torch.is_grad_enabled() or not few or cache is None or turn is None:
        return None
    held = _static_layer(cache, layer.self_attn.layer_idx)
    if held is None or not _is_as_fused(layer, x) or not _fits(layer, x, held, turn, mask):
        return None
    cos, sin = turn
    return Places(cos, sin, held.keys, held.values, held.cumulative_length, mask)


def _static_layer(cache: Any, index: int) -> Any:
    """Returns the part of a static cache for a layer; None for another kind of cache, and before its first tokens."""
    layers = getattr(cache, "layers", None)
    if getattr(cache, "offloading", False) or layers is None or len(layers) <= index:
        return None
    found = layers[index]
    kind = type(found)
    is_static = f"{kind.__module__}.{kind.__qualname__}" == _CACHE
    counted = isinstance(getattr(found, "cumulative_length", None), Tensor)
    return found if is_static and counted and found.is_initialized else None


def _fits(layer: Any, x: Tensor, held: Any, turn: tuple[Tensor, Tensor], mask: Any) -> bool:
    """Tells whether the tensors of a call are as the kernels read them."""
    keys, values = held.keys, held.values
    (b, t, _), (batch, heads, length, columns) = x.shape, keys.shape
    inputs = layer.self_attn.q_k_v_proj.in_features, layer.self_attn.q_k_v_proj.out_features
    queries = layer.self_attn.o_proj.in_features
    return (
        (batch, x.shape[2]) == (b, inputs[0])
        and queries + 2 * heads * columns == inputs[1]
        and values.shape == keys.shape
        and all(each.dtype is x.dtype and each.device == x.device for each in (keys, values, *turn))
        and keys.is_contiguous()
        and values.is_contiguous()
        and turn[0].shape[1:] == (t, columns)
        and isinstance(mask, Tensor)
        and mask.dtype is torch.bool
        and mask.shape in ((b, 1, t, length), (1, 1, t, length))
    )


def _is_as_fused(layer: Any, x: Tensor) -> bool:
    """Tells whether the modules of a layer are those that were fused, without hooks or adapters."""
    attention = layer.self_attn
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    return (
        all(_is_plain(each, LowbitLinear) for each in (attention.q_k_v_proj, attention.o_proj))
        and all(not _has_hooks(each) and each.weight.dtype is x.dtype for each in norms)
        and not _has_hooks(attention)
        and not _has_hooks(layer.mlp)
        and all(each._act is x.dtype for each in (attention.q_k_v_proj, attention.o_proj))
        and layer.self_attn.config._attn_implementation in ATTENTION
    )


def _is_plain(module: Any, kind: type) -> bool:
    """Tells whether a module is a low-bit layer as it was made, without hooks."""
    return type(module) is kind and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
