"""Declares what stands between the matmuls of a layer to torch, so that torch.compile can trace it:
`torch.ops.lowbit.rms_norm`, `join`, `rope`, `drop_first`, `decode_attention` and `router`. Each is one launch on a GPU
(`pylib.layer.by_kernel` and `router`).

`target` says where they run: the target of a device, or "" for that of the tensors. There are no gradients.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lowbit.pylib.layer import by_kernel
from lowbit.pylib.layer.reference import Norm
from lowbit.pylib.layer.router import Router, Rule, route_tokens
from lowbit.pylib.runtime.devices import target_at

_LIBRARY = torch.library.Library("lowbit", "FRAGMENT")


def rms_norm(x: Tensor, gain: Tensor, eps: float, shift: float, target: str) -> Tensor:
    """Returns x [..., hidden] / sqrt(mean of x^2 + eps) * (gain + shift), for a gain [hidden]."""
    return by_kernel.rms_norm(x, gain, eps, shift, _target(target, x))


def rms_norm_counting(
    x: Tensor, gain: Tensor, counter: Tensor, count: int, eps: float, shift: float, target: str
) -> Tensor:
    """Returns the same, and adds `count` to an integer in memory: the tokens that a cache holds."""
    return by_kernel.rms_norm(x, gain, eps, shift, _target(target, x), counter, count)


def rope(
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    eps: float,
    shift: float,
    target: str,
    repeated: bool = True,
    beside: bool = False,
) -> Tensor:
    """Returns the queries [b, t, queries * columns] of x [b, t, heads * columns], normalized and rotated, and appends
    keys and values to a cache [b, heads, length, columns] behind the `held` tokens in it."""
    gains = None if query_gain is None or key_gain is None else (query_gain, key_gain)
    return by_kernel.rope(x, cos, sin, gains, keys, values, held, eps, shift, _target(target, x), repeated, beside)


def drop_first(keys: Tensor, values: Tensor, held: Tensor, target: str) -> None:
    """Moves the tokens of a full cache [b, heads, length, columns] up by one place, and makes `held` length - 1."""
    by_kernel.drop_first(keys, values, held, _target(target, keys))


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    mask: Tensor | None,
    scale: float,
    target: str,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Returns what tokens make of the values in a cache [b, t, queries * columns]."""
    return by_kernel.attention(q, keys, values, held, mask, scale, _target(target, q), sinks, cap)


def join(
    x: Tensor, residual: Tensor, gain: Tensor | None, scale: float, eps: float, shift: float, target: str
) -> Tensor:
    """Returns residual + scale * norm(x) [..., hidden]; without a gain [hidden], of x as it is."""
    norm = None if gain is None else Norm(gain, eps, shift)
    return by_kernel.join(x, residual, scale, norm, _target(target, x))[0]


def join_counting(
    x: Tensor,
    residual: Tensor,
    gain: Tensor | None,
    following: Tensor,
    counter: Tensor,
    count: int,
    scale: float,
    eps: float,
    shift: float,
    following_eps: float,
    following_shift: float,
    target: str,
) -> tuple[Tensor, Tensor]:
    """Returns the same and the norm of it, whose gain is `following`, and adds `count` to an integer in memory."""
    norms = None if gain is None else Norm(gain, eps, shift), Norm(following, following_eps, following_shift)
    y, h = by_kernel.join(x, residual, scale, norms[0], _target(target, x), norms[1], counter, count)
    return y, cast(Tensor, h)


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction: Tensor | None,
    top_k: int,
    softmax: bool,
    renormalized: bool,
    scale: float,
    logits: torch.dtype,
    scores: torch.dtype,
    target: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits [tokens, experts] of x [tokens, hidden], the weights of a token's experts [tokens, top_k], in
    the order in which they are chosen, and which they are, int64 [tokens, top_k]; as `pylib.layer.router` has it."""
    given = Router(weight, bias, correction, top_k, Rule(softmax, renormalized, scale), logits, scores)
    return route_tokens(x, given, _target(target, x))


def _target(given: str, tensor: Tensor) -> str:
    return given or target_at(tensor.get_device())


def _fake_norm(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_joined(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _fake_norm(x), _fake_norm(x)


def _fake_drop(*_: object) -> None:
    return None


def _fake_rope(x: Tensor, cos: object, sin: object, a: object, b: object, keys: Tensor, *_: object) -> Tensor:
    columns = x.shape[-1] - 2 * keys.shape[1] * keys.shape[3]
    return x.new_empty((*x.shape[:-1], columns))


def _fake_router(
    x: Tensor,
    weight: Tensor,
    bias: object,
    correction: object,
    top_k: int,
    softmax: bool,
    renormalized: bool,
    scale: float,
    logits: torch.dtype,
    scores: torch.dtype,
    target: str,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, chosen = x.shape[0], (x.shape[0], top_k)
    return (
        x.new_empty((tokens, weight.shape[0]), dtype=logits),
        x.new_empty(chosen, dtype=scores),
        x.new_empty(chosen, dtype=torch.int64),
    )


_GAINS = "Tensor? query_gain, Tensor? key_gain"
_READ = "Tensor keys, Tensor values, Tensor held"
_CACHE = "Tensor(a!) keys, Tensor(b!) values, Tensor held"
_NORM = "float eps, float shift, str target"
_NORMS = "float eps, float shift, float following_eps, float following_shift, str target"
_JOINED = "Tensor x, Tensor residual, Tensor? gain, Tensor following, Tensor(a!) counter, int count"
_TURN = "bool repeated=True, bool beside=False"
_SINKS = "Tensor? sinks=None, float cap=0.0"
_ROUTER = "Tensor x, Tensor weight, Tensor? bias, Tensor? correction, int top_k"
_RULE = "bool softmax, bool renormalized, float scale, ScalarType logits, ScalarType scores, str target"
for _schema, _function, _fake in (
    (f"rms_norm(Tensor x, Tensor gain, {_NORM}) -> Tensor", rms_norm, _fake_norm),
    (
        f"rms_norm_counting(Tensor x, Tensor gain, Tensor(a!) counter, int count, {_NORM}) -> Tensor",
        rms_norm_counting,
        _fake_norm,
    ),
    (
        f"rope(Tensor x, Tensor? cos, Tensor? sin, {_GAINS}, {_CACHE}, {_NORM}, {_TURN}) -> Tensor",
        rope,
        _fake_rope,
    ),
    (
        f"decode_attention(Tensor q, {_READ}, Tensor? mask, float scale, str target, {_SINKS}) -> Tensor",
        decode_attention,
        _fake_norm,
    ),
    ("drop_first(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) held, str target) -> ()", drop_first, _fake_drop),
    (f"join(Tensor x, Tensor residual, Tensor? gain, float scale, {_NORM}) -> Tensor", join, _fake_norm),
    (f"join_counting({_JOINED}, float scale, {_NORMS}) -> (Tensor, Tensor)", join_counting, _fake_joined),
    (f"router({_ROUTER}, {_RULE}) -> (Tensor, Tensor, Tensor)", router, _fake_router),
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"lowbit::{_function.__name__}", _fake, lib=_LIBRARY)
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_function.__name__, _function, _device)
