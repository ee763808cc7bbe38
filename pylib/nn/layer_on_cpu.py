"""Decoder layers of transformers that decode in two native calls on a CPU (`pylib.layer.on_cpu`): a part of
`lowbit.fuse_`.

A layer's modules are looked at in every call, and the addresses of their tensors are asked for. Only the programs are
kept, apart from the layer, with the specs that they were made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import TargetError
from lowbit.pylib.layer.on_cpu import CpuLayer, LayerShape, Tokens, Weights
from lowbit.pylib.nn.decoder_forms import are_norms_as_fused, cache_of, eps_of, has_hooks, head_norms, is_of_its_file
from lowbit.pylib.nn.gated_linear import GatedLinear
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.operator.tracing import is_observed
from lowbit.pylib.runtime.batch_invariant import MODE

KNOWN = (
    "transformers.models.gemma3.modeling_gemma3.Gemma3DecoderLayer",
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer",
)
"""Decoder layers that have programs: norm, attention, sum, norm, gated network, sum; in Gemma 3 with norms behind
attention and network."""

ATTENTION = ("sdpa", "lowbit_grouped")
"""Names of attention whose masks say for each place whether it may be looked at: the latter is that of
`lowbit bench-model`."""
APART = ("q_proj", "k_proj", "v_proj")


class _Kept:
    """The programs of a layer, or none, and the specs of its matmuls and its numbers when they were made."""

    def __init__(self, specs: tuple[Any, ...], numbers: tuple[float, ...], programs: CpuLayer | None) -> None:
        self.specs, self.numbers, self.programs = specs, numbers, programs


_KEPT: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()


def knows(kind: type) -> bool:
    """Tells whether a class of decoder layers has programs."""
    return f"{kind.__module__}.{kind.__qualname__}" in KNOWN


def takes_apart(layer: nn.Module) -> bool:
    """Tells whether a layer on a CPU, or one that is to be filled, has programs although its projections are several
    layers."""
    attention = cast(nn.Module, layer._modules["self_attn"])._modules
    projections = [attention.get(name) for name in APART]
    apart = all(type(each) is LowbitLinear and _codes(each).device.type in ("cpu", "meta") for each in projections)
    return apart and knows(type(layer))


def decoded(layer: Any, x: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    """Returns the output of a layer, and appends to its cache; None, before anything is done, for a call that its
    programs are not for.

    given   what a model calls its layers with, by name
    """
    cache, turn = cache_of(given), given.get("position_embeddings")
    if x.device.type != "cpu" or cache is None or turn is None or layer.training or torch.is_grad_enabled():
        return None
    if is_observed() or MODE.on or type(x) is not Tensor or x.ndim != 3:
        return None
    found, mask = programs_of(layer, x), given.get("attention_mask")
    if found is None or not _fits(found[0], x, turn, mask):
        return None
    programs, weights = found
    index = layer._modules["self_attn"].layer_idx

    def update(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return cache.update(keys, values, index)

    cos, sin = turn
    return programs.decode(x, weights, Tokens(cos, sin, update, mask))


def programs_of(layer: Any, like: Tensor) -> tuple[CpuLayer, Weights] | None:
    """Returns the programs of a layer and its tensors, by what its modules are now; None where there are none.

    like   has the type, the device and the last dim of x
    """
    modules = matmuls_of(layer)
    if modules is None or not _is_as_fused(layer, modules, like):
        return None
    norms = _norms_of(layer)
    programs = _programs(layer, modules, norms)
    if programs is None:
        return None
    weights = Weights([module.packed.tensors for module in modules], [norm._parameters["weight"] for norm in norms])
    return programs, weights


def matmuls_of(layer: nn.Module) -> list[LowbitLinear] | None:
    """Returns the matmuls of a layer in the order in which they run; None where they are not those of a CPU's
    programs."""
    attention, network = (cast(nn.Module, layer._modules[name])._modules for name in ("self_attn", "mlp"))
    together = attention.get("q_k_v_proj")
    projections = [together] if together is not None else [attention.get(name) for name in APART]
    found = [*projections, attention.get("o_proj"), network.get("gate_up_proj"), network.get("down_proj")]
    kinds = [LowbitLinear] * (len(projections) + 1) + [GatedLinear, LowbitLinear]
    return cast(Any, found) if all(type(each) is kind for each, kind in zip(found, kinds)) else None


def _norms_of(layer: Any) -> list[Any]:
    """Returns the norms of a layer in the order of `Weights.gains`."""
    form, modules = layer.facts.form, layer._modules
    before, after = ([modules[name] for name in names if name] for names in (form.before, form.after))
    return [*before, *head_norms(modules["self_attn"]), *after]


def _is_as_fused(layer: Any, modules: list[LowbitLinear], like: Tensor) -> bool:
    """Tells whether the modules of a layer are of the kinds that were fused, have no hooks, and are of one type and on
    the CPU."""
    attention, network = layer._modules["self_attn"], layer._modules["mlp"]
    return (
        attention.config._attn_implementation in ATTENTION
        and is_of_its_file(attention, layer)
        and is_of_its_file(network, layer)
        and not any(map(has_hooks, (*modules, attention, network)))
        and all(module._act is like.dtype and _codes(module).device.type == "cpu" for module in modules)
        and are_norms_as_fused(layer, like)
    )


def _codes(module: LowbitLinear) -> Tensor:
    return cast(Tensor, module._buffers["codes"])


def _fits(programs: CpuLayer, x: Tensor, turn: tuple[Tensor, Tensor], mask: Any) -> bool:
    """Tells whether the tensors of a call are as the programs read them."""
    (b, t, hidden), shape = x.shape, programs.shape
    return (
        0 < b * t <= programs.most_tokens
        and hidden == shape.hidden
        and all(each.dtype is x.dtype and each.shape[1:] == (t, shape.columns) for each in turn)
        and all(each.device == x.device for each in turn)
        and (t == 1 if mask is None else _is_mask(mask, b, t) and mask.device == x.device)
    )


def _is_mask(mask: Any, b: int, t: int) -> bool:
    return (
        isinstance(mask, Tensor)
        and mask.dtype is torch.bool
        and mask.shape[:3] in ((b, 1, t), (1, 1, t))
        and mask.stride(3) == 1
    )


def _programs(layer: nn.Module, modules: list[LowbitLinear], norms: list[Any]) -> CpuLayer | None:
    """Returns the programs of a layer; None where there are none."""
    attention: Any = layer._modules["self_attn"]
    kept, numbers = _KEPT.get(layer), (*map(eps_of, norms), attention.scaling)
    same = kept is not None and len(kept.specs) == len(modules) and kept.numbers == numbers
    if not (kept and same and all(module.spec is spec for module, spec in zip(modules, kept.specs))):
        shape = _shape(layer, modules, norms)
        programs = _programs_of(shape) if shape is not None else None
        kept = _KEPT[layer] = _Kept(tuple(module.spec for module in modules), numbers, programs)
    return kept.programs


def _shape(layer: Any, modules: list[LowbitLinear], norms: list[Any]) -> LayerShape | None:
    """Returns what decides the programs of a layer; None where norms differ, or heads have no size that is known."""
    attention, eps = layer.self_attn, {float(eps_of(norm)) for norm in norms}
    columns = getattr(attention, "head_dim", None)
    if len(eps) != 1 or not isinstance(columns, int):
        return None
    *projections, out, gate_up, down = (module.spec for module in modules)
    queries, rows = out.k // columns, sum(spec.n for spec in projections)
    keys = (rows // columns - queries) // 2
    heads, behind = bool(head_norms(attention)), any(layer.facts.form.after)
    return LayerShape(
        tuple(projections),
        *(out, gate_up, down, queries, keys, columns, float(attention.scaling)),
        *(eps.pop(), layer.facts.shift, heads, behind),
    )


@lru_cache(maxsize=64)
def _programs_of(shape: LayerShape) -> CpuLayer | None:
    try:
        return None if shape.why_not() else CpuLayer(shape)
    except TargetError:  # the CPU target has its reasons, which a call of any layer says
        return None
