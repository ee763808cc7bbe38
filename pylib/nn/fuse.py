"""`lowbit.fuse_`: layers of a model that share their input become one layer, in place.

The projections to query, key and value have one x, and so have those of a gated feed-forward network. As one matmul
they read x once, start one kernel, and give it more rows to share among the multiprocessors. The module around them
gets a class of its own, whose forward is that of the old class with one call in place of several (`siblings.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import QuantizeError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib import outliers
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.siblings import Group, rewritten, siblings


@dataclass(frozen=True)
class FusedLayers:
    """What became of layers that share their input.

    module   the name of the module that holds them
    parts    their names in the module
    name     of the layer in their place; "" if they stayed apart
    reason   why they stayed apart; "" if they did not
    """

    module: str
    parts: tuple[str, ...]
    name: str = ""
    reason: str = ""

    def __str__(self) -> str:
        place, parts = f"{self.module}: " if self.module else "", ", ".join(self.parts)
        return f"{place}{parts} stay apart: {self.reason}" if self.reason else f"{place}{self.name} = {parts}"


@torch.no_grad()
def fuse_(model: nn.Module) -> tuple[FusedLayers, ...]:
    """Replace low-bit layers that share their input by one, in place, throughout a model; returns what became of them.

    `q_proj`, `k_proj` and `v_proj` become `q_k_v_proj`; `gate_proj` and `up_proj` become `gate_up_proj`. Codes and
    scales are put together, not made anew, so results differ by rounding at most. The state dictionary has the names
    and tensors of the new layers; fuse an empty model before you load it. The model can be copied, pickled, compiled
    and exported.

    The forward of the module around the layers is read to see what shares an input, so it works for modules of any
    origin. Layers stay apart where this is not certain, and where their formats or types differ: the result says why.
    """
    places = Counter(child for module in model.modules() for child in module._modules.values() if child is not None)
    return tuple(row for name, parent in list(model.named_modules()) for row in _fuse_children(name, parent, places))


def _fuse_children(name: str, parent: nn.Module, places: Counter[nn.Module]) -> Iterator[FusedLayers]:
    """Fuse what can be fused of the layers of a module."""
    layers = {key: child for key, child in parent._modules.items() if type(child) is LowbitLinear}
    if not _may_share(layers) or isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return
    linears = frozenset(key for key, child in parent._modules.items() if isinstance(child, nn.Linear))
    try:
        groups = _groups(parent, list(layers), linears)
    except QuantizeError as error:
        yield FusedLayers(name, tuple(layers), reason=str(error))
        return
    fused: list[Group] = []
    for names in groups:
        parts = [layers[key] for key in names]
        reason = _reason(parent, names, parts, places)
        group = Group(_fused_name(names), names, tuple(part.out_features for part in parts))
        if not reason:
            fused.append(group)
        yield FusedLayers(name, names, "" if reason else group.name, reason)
    if fused:
        _fuse(parent, tuple(fused), linears)


def _may_share(layers: dict[str, LowbitLinear]) -> bool:
    """Tells whether two layers take inputs of one length."""
    lengths = [layer.in_features for layer in layers.values()]
    return len(set(lengths)) < len(lengths)


def _groups(parent: nn.Module, layers: Sequence[str], linears: frozenset[str]) -> list[tuple[str, ...]]:
    """Returns names of layers that share their input. Raises QuantizeError where this can't be known."""
    if "forward" in vars(parent):
        raise QuantizeError(f"the forward of this {type(parent).__name__} was replaced by another")
    if isinstance(parent, FusedModule):
        return []
    return siblings(type(parent), layers, linears)


def _reason(parent: nn.Module, names: Sequence[str], parts: Sequence[LowbitLinear], places: Counter[nn.Module]) -> str:
    """Returns why layers that share their input can't be fused, or ""."""
    first, *others = parts
    for name, part in zip(names, parts):
        if places[part] > 1:
            return f"the model holds {name} in several places"
        if part._forward_pre_hooks or part._forward_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"{name} has hooks, which would be lost"
        if set(part._buffers) != {slot.name for slot in part.spec.tensors}:
            return f"{name} has tensors of its own: {', '.join(part._buffers)}"
    if any(replace(part.spec, n=first.spec.n) != first.spec for part in others):
        return f"their formats differ: {'; '.join(str(part.spec) for part in parts)}"
    if any(part.codes.device != first.codes.device for part in others):
        return f"they are on {', '.join(str(part.codes.device) for part in parts)}"
    if first.spec.permuted and not all(_same_order(part, first) for part in others):
        return "their columns are stored in different orders"
    if any(part.spec.n % ROWS for part in parts[:-1]):
        return f"rows are stored in blocks of {ROWS}, which {', '.join(str(p.spec.n) for p in parts)} cut"
    if hasattr(parent, _fused_name(names)):
        return f"the module has a {_fused_name(names)} already"
    return ""


def _same_order(a: LowbitLinear, b: LowbitLinear) -> bool:
    """Tells whether two permuted layers have the same permutation; on meta nobody knows."""
    columns = [layer.get_buffer("permutation") for layer in (a, b)]
    return not columns[0].is_meta and torch.equal(*columns)


def _fused_name(names: Sequence[str]) -> str:
    """Returns q_k_v_proj for q_proj, k_proj and v_proj: their stems and the word they end in."""
    stems, _, words = zip(*(name.rpartition("_") for name in names))
    return "_".join((*stems, words[0])) if all(stems) and len(set(words)) == 1 else "_".join(names)


def _fuse(parent: nn.Module, groups: tuple[Group, ...], linears: frozenset[str]) -> None:
    """Put the layers of each group together, and have the module call them so."""
    fused_class = _fused_class(type(parent), groups, linears)  # raises before anything is changed
    for group in groups:
        parts = [getattr(parent, name) for name in group.parts]
        layer = concatenated(parts)
        for name in group.parts:
            delattr(parent, name)
        setattr(parent, group.name, layer)
    parent.__class__ = fused_class


def concatenated(parts: Sequence[LowbitLinear]) -> LowbitLinear:
    """Returns a layer with the rows of several, one below the other."""
    spec = replace(parts[0].spec, n=sum(part.spec.n for part in parts))
    tensors = {slot.name: _below(slot, [getattr(part, slot.name) for part in parts], parts) for slot in spec.tensors}
    return LowbitLinear(spec, tensors).train(parts[0].training)


def _below(slot: TensorSlot, tensors: Sequence[Tensor], parts: Sequence[LowbitLinear]) -> Tensor:
    """Returns the tensors of one slot as that of all rows."""
    if slot.index == "sparse":
        return outliers.stack(tensors, [part.spec.n for part in parts])
    if slot.index == "column":
        return tensors[0].clone()
    return torch.cat(list(tensors))


# -- classes of modules with fused layers


class FusedModule:
    """Marks modules whose class `fuse_` has made; isinstance with the class of before stays true."""


@lru_cache(maxsize=None)
def _fused_class(cls: type[nn.Module], groups: tuple[Group, ...], linears: frozenset[str]) -> type[nn.Module]:
    """Returns a class whose forward calls fused layers; one for all modules alike. Raises QuantizeError."""

    def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        state = object.__reduce_ex__(self, 2)[2]
        return _fused_empty, (cls, groups, linears), state

    own = {"forward": rewritten(cls, groups, linears), "__reduce_ex__": reduce, "__module__": cls.__module__}
    return type(cls.__name__, (cls, FusedModule), own)


def _fused_empty(cls: type[nn.Module], groups: tuple[Group, ...], linears: frozenset[str]) -> nn.Module:
    """Returns a module without state, for copies and pickles to fill."""
    made = _fused_class(cls, groups, linears)
    return made.__new__(made)
