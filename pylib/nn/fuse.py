"""`lowbit.fuse_`: layers of a model that share their input become one layer, in place; and decoder layers that it knows
decode in a chain of launches (`chain.py`). `lowbit.unfuse_` takes that back.

The projections to query, key and value have one x, and so have those of a gated feed-forward network. As one matmul
they read x once, start one kernel, and give it more rows to share among the multiprocessors. The module around them
gets a class of its own, whose forward is that of the old class with one call in place of several (`siblings.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, combinations, permutations
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.dialect.errors import PackError, QuantizeError
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.nn.chain import (
    GATE_UP,
    ChainedLayer,
    chain_,
    children_of,
    gate_network,
    gate_placed,
    may_chain,
    unchain_,
)
from lowbit.pylib.nn.gated_linear import GatedLinear
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.nn.packed_module import check_model
from lowbit.pylib.nn.router import FusedRouter, route_apart_, route_together_
from lowbit.pylib.nn.siblings import Group, rewritten, siblings
from lowbit.pylib.nn.stack_on_cpu import PARTS, StackedModel, may_stack, stack_, unstack_
from lowbit.pylib.weights import outliers
from lowbit.pylib.weights.saved import check_same, with_products_of
from lowbit.pylib.weights.sharding import Part


@dataclass(frozen=True)
class FusedLayers:
    """The outcome of fusing layers that share their input.

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
    and tensors of the new layers; fuse an empty model before you load it (`from_pretrained` does so by itself). The
    model can be copied, pickled, compiled and exported, and `unfuse_` takes everything back.

    Decoder layers of some twenty classes of transformers (Llama, Mistral, Qwen, Gemma, Phi-3, gpt-oss, Mixtral and
    others; docs/howto/fastest-decode.md) then decode in a chain of launches: up to 64 tokens in all, without gradients,
    with a `StaticCache` and sdpa or eager attention. Prompts, other caches and layers with hooks or adapters run as
    before. The rows of `gate_up_proj` are stored so that its kernel applies the activation. On a CPU layers of Llama,
    Mistral, Qwen2, Qwen3 and Gemma 3 decode in two native calls each, with any cache: up to 12 tokens in all, or 4
    where codes have 8 bits. For one token of each sequence all layers of these models are one call, with a
    `DynamicCache` or a `StaticCache`.

    Routers of mixtures of experts compute up to 64 tokens in one launch, without gradients: those whose weights are a
    softmax over experts, or sigmoids, whatever the name of their class.

    The forward of the module around the layers is read to see what shares an input, so it works for modules of any
    origin. Layers stay apart where this is not certain, and where their formats or types differ: the result says why.

    Raises SpecError for what is no nn.Module.
    """
    check_model(model)
    places = Counter(child for module in model.modules() for child in module._modules.values() if child is not None)
    siblings = [row for name, parent in list(model.named_modules()) for row in _fuse_children(name, parent, places)]
    return *siblings, *_chain(model), *_stack(model), *_routers(model)


def _chain(model: nn.Module, gate: bool = True) -> Iterator[FusedLayers]:
    """Makes decoder layers decode in a chain of launches. gate: as `chain_` has it."""
    for name, layer in list(model.named_modules()):
        if may_chain(layer) and not isinstance(layer, ChainedLayer) and (gate or _was_fused(layer)):
            children, reason = children_of(layer), chain_(layer, gate)
            yield FusedLayers(name, children, "" if reason else type(layer).__name__, reason)


def _stack(model: nn.Module) -> Iterator[FusedLayers]:
    """Makes models on a CPU run all decoder layers in one native call for a token."""
    for name, module in list(model.named_modules()):
        if may_stack(module):
            stack_(module)
            yield FusedLayers(name, PARTS, type(module).__name__)


def _was_fused(layer: nn.Module) -> bool:
    """Tells whether `fuse_` has changed a part of a layer."""
    return any(isinstance(module, FusedModule | GatedLinear) for module in layer.modules())


def _routers(model: nn.Module) -> Iterator[FusedLayers]:
    """Makes routers compute few tokens in one launch."""
    for name, module in list(model.named_modules()):
        if route_together_(module):
            parent, _, own = name.rpartition(".")
            yield FusedLayers(parent, (own,), type(module).__name__)


@torch.no_grad()
def unfuse_(model: nn.Module) -> tuple[str, ...]:
    """Take back what `fuse_` did to a model, in place; returns the names of the modules that are as they were.

    Codes and scales are cut apart again, so that layers have the tensors of before. Where a fused layer has been
    replaced by another since, such as one with an adapter, the module around it stays as it is.

    Raises SpecError for what is no nn.Module.
    """
    check_model(model)
    modules = list(model.named_modules())
    chained = [name for name, module in modules if issubclass(type(module), ChainedLayer)]
    for name in chained:
        unchain_(model.get_submodule(name))
    stacked = [name for name, module in modules if issubclass(type(module), StackedModel)]
    for name in stacked:
        unstack_(model.get_submodule(name))
    routers = [name for name, module in modules if issubclass(type(module), FusedRouter)]
    for name in routers:
        route_apart_(model.get_submodule(name))
    apart = [name for name, module in modules if issubclass(type(module), FusedModule) and _take_apart(module)]
    return *chained, *stacked, *routers, *apart


def _take_apart(parent: nn.Module) -> bool:
    """Gives a module the layers that it had. Returns False, and changes nothing, if one is not that of `fuse_`."""
    kind: Any = type(parent)
    layers = {group: parent._modules.get(group.name) for group in kind.fused_groups}
    if any(type(layer) is not LowbitLinear for layer in layers.values()):
        return False
    for group, layer in layers.items():
        parts = cut_apart(cast(LowbitLinear, layer), group.sizes)
        delattr(parent, group.name)
        for name, part in zip(group.parts, parts):
            setattr(parent, name, part)
    parent.__class__ = kind.__mro__[1]
    return True


def cut_apart(layer: LowbitLinear, sizes: Sequence[int]) -> list[LowbitLinear]:
    """Returns the layers of which `concatenated` has made one."""
    columns = 0, layer.spec.k
    rows = [(end - size, size) for size, end in zip(sizes, accumulate(sizes))]
    packed = [layer.packed.part(Part((each,), columns)) for each in rows]
    return [LowbitLinear(part.spec, part).train(layer.training) for part in packed]


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
        group = Group(fused_name(names), names, tuple(part.out_features for part in parts))
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
    for name, part in zip(names, parts):
        if places[part] > 1:
            return f"the model holds {name} in several places"
        if part._forward_pre_hooks or part._forward_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"{name} has hooks, which would be lost"
        if set(part._buffers) != {slot.name for slot in part.spec.tensors}:
            return f"{name} has tensors of its own: {', '.join(part._buffers)}"
    if hasattr(parent, fused_name(names)):
        return f"the module has a {fused_name(names)} already"
    return why_apart(parts)


def why_apart(parts: Sequence[LowbitLinear]) -> str:
    """Returns why the weights of layers can't be put together, or ""."""
    first, *others = parts
    if any(replace(part.spec, n=first.spec.n) != first.spec for part in others):
        return f"their formats differ: {'; '.join(str(part.spec) for part in parts)}"
    if any(part.codes.device != first.codes.device for part in others):
        return f"they are on {', '.join(str(part.codes.device) for part in parts)}"
    if first.spec.permuted and not all(_same_order(part, first) for part in others):
        return "their columns are stored in different orders"
    if any(part.spec.n % ROWS for part in parts[:-1]):
        return f"rows are stored in blocks of {ROWS}, which {', '.join(str(p.spec.n) for p in parts)} cut"
    return ""


def _same_order(a: LowbitLinear, b: LowbitLinear) -> bool:
    """Tells whether two permuted layers have the same permutation; on meta nobody knows."""
    columns = [layer.get_buffer("permutation") for layer in (a, b)]
    return not columns[0].is_meta and torch.equal(*columns)


def fused_name(names: Sequence[str]) -> str:
    """Returns q_k_v_proj for q_proj, k_proj and v_proj: their stems and the word they end in."""
    stems, _, words = zip(*(name.rpartition("_") for name in names))
    return "_".join((*stems, words[0])) if all(stems) and len(set(words)) == 1 else "_".join(names)


def _fuse(parent: nn.Module, groups: tuple[Group, ...], linears: frozenset[str]) -> None:
    """Put the layers of each group together, and have the module call them so."""
    fused_class = _fused_class(type(parent), groups, linears)  # raises before anything is changed
    fused = {group: concatenated([getattr(parent, name) for name in group.parts]) for group in groups}
    _put(parent, fused, fused_class)


def _put(parent: nn.Module, fused: Mapping[Group, LowbitLinear], fused_class: type[nn.Module]) -> None:
    """Put fused layers in the places of their parts."""
    for group, layer in fused.items():
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


# -- fused layers of a checkpoint


def place_fused(model: nn.Module, specs: Mapping[str, MatmulSpec]) -> None:
    """Put empty fused layers into a model on meta, where a checkpoint has layers with names that `fuse_` gives.

    specs   what each low-bit layer of the checkpoint is; names that are no layers in place of siblings are left alone

    Raises PackError for a layer that does not fit those in whose place it is.
    """
    modules = dict(model.named_modules())
    wanted: dict[str, dict[str, MatmulSpec]] = {}
    for name, spec in specs.items():
        parent, _, leaf = name.rpartition(".")
        if name not in modules and parent in modules:
            wanted.setdefault(parent, {})[leaf] = spec
    for name, layers in wanted.items():
        try:
            _place_in(modules[name], layers)
        except PackError as error:
            raise PackError(f"{name}: {', '.join(layers)}: {error}") from error


def chain_placed(model: nn.Module, specs: Mapping[str, MatmulSpec]) -> None:
    """Makes decoder layers decode, and routers compute, as `fuse_` does it, where a checkpoint has put empty fused
    layers in a model, or has weights that are stored for an activation in the kernel. specs: as `place_fused`."""
    for name, spec in specs.items():
        parent, _, leaf = name.rpartition(".")
        if leaf == GATE_UP and spec.is_gated:
            gate_placed(model.get_submodule(parent))
    list(_chain(model, gate=False))
    list(_stack(model))
    if any(isinstance(module, FusedModule) for module in model.modules()):
        list(_routers(model))


def _place_in(parent: nn.Module, layers: Mapping[str, MatmulSpec]) -> None:
    """Put empty fused layers into one module."""
    children = {key: child for key, child in parent._modules.items() if isinstance(child, nn.Linear)}
    linears, groups = frozenset(children), list[Group]()
    for name, spec in layers.items():
        if parts := _parts_of(name, type(parent), linears):
            _check_parts(spec, {part: children[part] for part in parts})
            groups.append(Group(name, parts, tuple(children[part].out_features for part in parts)))
    if groups:
        fused = {group: LowbitLinear.empty(layers[group.name], "meta") for group in groups}
        _put(parent, fused, _fused_class(type(parent), tuple(groups), linears))
        _gate_as_saved(parent, fused.values())


def _gate_as_saved(parent: nn.Module, layers: Iterable[LowbitLinear]) -> None:
    """Makes empty layers those of a gated network, whose weights are stored for an activation in the kernel."""
    for layer in layers:
        if layer.spec.is_gated:
            GatedLinear.of(layer, pairs=False)
            gate_network(parent)


def _parts_of(name: str, cls: type[nn.Module], linears: frozenset[str]) -> tuple[str, ...]:
    """Returns the layers of a class that `fuse_` would make one with this name of; () if there are none."""
    parts = parts_named(name, linears)
    with suppress(QuantizeError):
        return parts if parts and siblings(cls, parts, linears) == [parts] else ()
    return ()


def parts_named(name: str, names: Collection[str]) -> tuple[str, ...]:
    """Returns those of some names, in order, whose layers have this name when they are fused; () if there are none."""
    words = sorted(name.split("_"))
    for count in range(2, len(names) + 1):
        for some in combinations(sorted(names), count):
            if sorted(fused_name(some).split("_")) == words:
                return next((each for each in permutations(some) if fused_name(each) == name), ())
    return ()


def _check_parts(spec: MatmulSpec, parts: Mapping[str, nn.Linear]) -> None:
    """Raise PackError unless layers make one of this spec."""
    rows, sums = sum(part.out_features for part in parts.values()), replace(spec, epilogue=None)
    for name, part in parts.items():
        if isinstance(part, LowbitLinear):
            check_same(sums, with_products_of(sums, replace(part.spec, n=rows)))
        elif (spec.n, spec.k) != (rows, part.in_features):
            raise PackError(f"{name} is one of {len(parts)} layers that make {rows} x {part.in_features}, not {spec}")


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
    own["fused_groups"] = groups
    return type(cls.__name__, (cls, FusedModule), own)


def _fused_empty(cls: type[nn.Module], groups: tuple[Group, ...], linears: frozenset[str]) -> nn.Module:
    """Returns a module without state, for copies and pickles to fill."""
    made = _fused_class(cls, groups, linears)
    return made.__new__(made)
