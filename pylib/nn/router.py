"""Routers of mixtures of experts whose tokens find their experts in one launch: a part of `lowbit.fuse_`.

A router of transformers is a module with a weight [experts, hidden] that returns logits, the weights of a token's
experts, and which they are. There are some sixty classes of them, of a few kinds, so no list of names says which is
which. What a router does is found by trying it: its class computes random tokens with random weights on a CPU, and a
`Rule` that gives the same numbers is its rule. One that has none, such as one whose experts are in groups, stays as it
is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.passes.kernels.router import MOST_TOKENS
from lowbit.pylib.layer.router import ELEMENTS, Router, Rule, by_torch
from lowbit.pylib.nn.chain import subclass
from lowbit.pylib.operator import layer_schema as layer_schema  # which declares the operator
from lowbit.pylib.runtime.batch_invariant import MODE

CORRECTION = "e_score_correction_bias"
_TENSORS = {"weight", "bias", CORRECTION}
_GROUPS = ("num_group", "n_group", "topk_group")  # names of settings of routers whose experts are in groups
_OF_MODULES = frozenset(vars(nn.Module()))
_TRIED = 512  # tokens
_FAR = 100.0  # times as large: so that limits of logits are seen


@dataclass(frozen=True)
class Routing:
    """What a router computes.

    types      those of logits and weights that it returns, for each type of x that it takes
    flat       whether it makes one list of the tokens of several sequences
    settings   its own, by name: what was tried holds while they are the same
    weight     the type of its weight then
    """

    rule: Rule
    top_k: int
    types: tuple[tuple[torch.dtype, tuple[torch.dtype, torch.dtype]], ...]
    flat: bool
    settings: tuple[tuple[str, Any], ...]
    weight: torch.dtype


class FusedRouter:
    """Marks routers whose class `fuse_` has made; isinstance with the class of before stays true."""


def route_together_(module: nn.Module) -> bool:
    """Gives a router a class that computes few tokens in one launch; returns False for what is none, or of no known
    rule."""
    if not _may_be_router(module) or (routing := _routing_of(module)) is None:
        return False
    module.__class__ = _routing_class(type(module), routing)
    return True


def route_apart_(module: nn.Module) -> None:
    """Gives a router the class that it had."""
    module.__class__ = type(module).__mro__[1]


def _may_be_router(module: nn.Module) -> bool:
    """Tells whether a module has the tensors and the argument of a router, and no groups of experts."""
    weight, top_k = module._parameters.get("weight"), getattr(module, "top_k", None)
    tensors = {*module._parameters, *module._buffers}
    if weight is None or weight.ndim != 2 or type(top_k) is not int or isinstance(module, FusedRouter):
        return False
    if not tensors <= _TENSORS or module._modules or "forward" in vars(module) or weight.dtype not in ELEMENTS:
        return False
    if len({value for name in _GROUPS if (value := getattr(module, name, None)) is not None}) > 1:
        return False  # fewer groups are chosen than there are
    return list(inspect.signature(module.forward).parameters) == ["hidden_states"] and 0 < top_k <= weight.shape[0]


# -- what a router computes

_KNOWN = dict[tuple[Any, ...], Routing | None]()


def _routing_of(router: nn.Module) -> Routing | None:
    """Returns what a router computes, if one launch can. Layers of a model that are alike are tried once."""
    own = {name: value for name, value in vars(router).items() if name not in _OF_MODULES}
    settings = tuple((name, value) for name, value in own.items() if isinstance(value, int | float | str))
    tensors = {**router._parameters, **router._buffers}
    shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items() if tensor is not None)
    if len(settings) < len(own):  # a function, say, or a configuration: it may be another in each layer
        return _tried(router, settings)
    key = type(router), settings, shapes
    if key not in _KNOWN:
        _KNOWN[key] = _tried(router, settings)
    return _KNOWN[key]


def _tried(router: nn.Module, settings: tuple[tuple[str, Any], ...]) -> Routing | None:
    """Tries a router."""
    weight, top_k = cast(Tensor, router.weight), cast(int, router.top_k)
    generator = torch.Generator("cpu").manual_seed(0)
    x = _random((_TRIED, weight.shape[1]), generator)
    try:
        with torch.inference_mode(), torch.device("cpu"):  # a model may be being built elsewhere
            trial = _trial(router, generator)
            rule = _rule_of(trial, x, top_k)
            types = [(dtype, _types(router, trial, x[:2].to(dtype))) for dtype in ELEMENTS]
            shapes = [tuple(each.shape[:-1]) for each in trial(x.unflatten(0, (2, -1)))]
    except Exception:  # of a module that is no router, it may be any
        return None
    taken = tuple((dtype, found) for dtype, found in types if found)
    flat = shapes == [(_TRIED,)] * 3
    return Routing(rule, top_k, taken, flat, settings, weight.dtype) if rule and taken else None


def _trial(router: nn.Module, generator: torch.Generator) -> nn.Module:
    """Returns a router like this with random numbers in f32, on a CPU."""
    trial = copy.copy(router)
    for kind in ("_parameters", "_buffers"):
        tensors = cast(Mapping[str, Tensor], getattr(router, kind))
        made = {
            name: _random(tuple(tensor.shape), generator) * (tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3)
            for name, tensor in tensors.items()
            if tensor is not None
        }
        trial.__dict__[kind] = made
    return trial.eval()


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _types(router: nn.Module, trial: nn.Module, x: Tensor) -> tuple[torch.dtype, torch.dtype] | None:
    """Returns the types of logits and scores for x, if a router takes it."""
    typed = copy.copy(trial)
    for kind in ("_parameters", "_buffers"):
        tensors, own = getattr(router, kind), getattr(trial, kind)
        typed.__dict__[kind] = {name: tensor.to(tensors[name].dtype) for name, tensor in own.items()}
    try:
        logits, scores, _ = typed(x)
    except RuntimeError:  # other types than those of the weight
        return None
    return (logits.dtype, scores.dtype) if {logits.dtype, scores.dtype} <= ELEMENTS.keys() else None


def _rule_of(trial: nn.Module, x: Tensor, top_k: int) -> Rule | None:
    """Returns the rule by which a router's outcome for x follows from its tensors."""
    outcome = trial(x)
    if not isinstance(outcome, tuple) or [getattr(each, "ndim", 0) for each in outcome] != [2, 2, 2]:
        return None
    logits, scores, ids = outcome
    weight, bias, correction = (getattr(trial, name, None) for name in ("weight", "bias", CORRECTION))
    given, wide = (cast(Tensor, weight), bias, correction, top_k), torch.float32
    for softmax, renormalized in product((True, False), repeat=2):
        if softmax and correction is not None:
            continue
        rule = Rule(softmax, renormalized)
        router = Router(*given, rule, wide, wide)
        products, unscaled, expected = by_torch(x, router)
        if not (scores.shape == unscaled.shape and torch.equal(ids.sort(-1)[0], expected.sort(-1)[0])):
            continue
        found, unscaled = scores.gather(1, ids.argsort(-1)), unscaled.gather(1, expected.argsort(-1))
        scale = round(float(found.sum() / unscaled.sum()), 6)
        far = by_torch(x * _FAR, router)[0]
        if _close(logits, products) and _close(found, unscaled * scale) and _close(trial(x * _FAR)[0], far):
            return Rule(softmax, renormalized, scale)
    return None


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * max(1.0, float(expected.abs().max())))


# -- the class


@lru_cache(maxsize=None)
def _routing_class(cls: type[nn.Module], routing: Routing) -> type[nn.Module]:
    """Returns a class whose forward is one launch for few tokens, without gradients."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        types = next((each for dtype, each in routing.types if dtype is hidden_states.dtype), None)
        if types is None or not _is_for(self, hidden_states, routing):
            return cls.forward(self, hidden_states)
        weight, rule = self.weight, routing.rule
        tensors = weight, getattr(self, "bias", None), getattr(self, CORRECTION, None)
        how = rule.softmax, rule.renormalized, rule.scale, *types
        return torch.ops.lowbit.router(hidden_states.reshape(-1, weight.shape[1]), *tensors, routing.top_k, *how, "")

    return subclass(cls, FusedRouter, {"forward": forward}, partial(_routing_class, routing=routing))


def _is_for(router: Any, x: Tensor, routing: Routing) -> bool:
    """Tells whether tokens are few enough, without gradients, and the router as it was when it was tried. Within
    `lowbit.batch_invariant` any number is."""
    weight = router.weight
    if router.training or torch.is_grad_enabled() or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        return False
    some = x.numel() > 0 and (MODE.on or x.numel() <= MOST_TOKENS * weight.shape[1])
    few = some and (routing.flat or x.ndim == 2)
    alike = weight.dtype is routing.weight and weight.device == x.device
    return few and alike and all(getattr(router, name, None) == value for name, value in routing.settings)
