"""A transformer layer for few tokens, in eight launches:

    norm, projection to queries, keys and values, rotation and cache, attention, output projection plus residual,
    norm, gate and up projection with its activation, down projection plus residual

All of them let the next one start early, so that every matmul's weights are on their way while what is in front of it
is computed. Where a part's result has a norm or a scale before it is added, a launch more does that (`Joint`): the
first one computes the norm behind it, too. A cache of a sliding window that is full takes another one, to make room.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.pylib.layer.reference import Norm as Norm
from lowbit.pylib.nn.gated_linear import GatedLinear
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.operator import layer_schema as layer_schema  # which declares the operators


@dataclass
class Attention:
    """A layer of attention.

    qkv        projects x to queries, keys and values
    norms      of queries and keys, alike but for their gains
    sinks      [queries]: a product of each query with a place of which there is no value
    cap        a product s becomes cap * tanh(s / cap); 0: none
    rotated    whether queries and keys are
    repeated   whether both halves of cos and sin are given, which are equal
    beside     whether columns that are rotated together are neighbours, and not in halves
    """

    qkv: LowbitLinear
    out: LowbitLinear
    scale: float
    norms: tuple[Norm, Norm] | None = None
    sinks: Tensor | None = None
    cap: float = 0.0
    rotated: bool = True
    repeated: bool = True
    beside: bool = False


@dataclass
class Joint:
    """How a part's result y is added to its input: x + scale * norm(y). norm: None: of y as it is."""

    norm: Norm | None = None
    scale: float = 1.0


@dataclass
class Places:
    """Where tokens are.

    cos, sin       [b, t, columns that are rotated, or half of them]: their rotations
    keys, values   [b, heads, length, columns]: the cache
    held           int64 [] or [1]: how many tokens it holds before these
    mask           bool [b or 1, 1, t, length]: places that may be looked at, of those up to a token's own; or numbers
                   that are added to products
    is_full        whether a place is to be made for the token, of which there is only one then
    """

    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    held: Tensor
    mask: Tensor | None = None
    is_full: bool = False


def attend(x: Tensor, norm: Norm, attention: Attention, at: Places) -> Tensor:
    """Returns x + attention(norm(x)) [b, t, hidden], and appends keys and values to the cache."""
    return attention.out.plus(heads_of(x, norm, attention, at), x)


def heads_of(x: Tensor, norm: Norm, attention: Attention, at: Places) -> Tensor:
    """Returns what goes to the output projection [b, t, queries * columns], and appends keys and values to the
    cache."""
    ops, norms, cache = torch.ops.lowbit, attention.norms, (at.keys, at.values, at.held)
    gains = (norms[0].gain, norms[1].gain, norms[0].eps, norms[0].shift) if norms else (None, None, 0.0, 0.0)
    turn = (at.cos, at.sin) if attention.rotated else (None, None)
    h = attention.qkv(ops.rms_norm(x, norm.gain, norm.eps, norm.shift, ""))
    if at.is_full:
        ops.drop_first(*cache, "")
    q = ops.rope(h, *turn, *gains[:2], *cache, *gains[2:], "", attention.repeated, attention.beside)
    return ops.decode_attention(q, *cache, at.mask, attention.scale, "", attention.sinks, attention.cap)


def normed_after(x: Tensor, norm: Norm, held: Tensor, count: int) -> Tensor:
    """Returns norm(x) of what `attend` has made, and adds the tokens that it has appended to those that are held."""
    return torch.ops.lowbit.rms_norm_counting(x, norm.gain, held, count, norm.eps, norm.shift, "")


def joined_after(y: Tensor, x: Tensor, joint: Joint, norm: Norm, held: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns x with the attention y joined to it, and its norm, and counts tokens as `normed_after` does."""
    gain, eps, shift = _fields(joint.norm)
    numbers = joint.scale, eps, shift, norm.eps, norm.shift, ""
    return torch.ops.lowbit.join_counting(y, x, gain, norm.gain, held, count, *numbers)


def joined(y: Tensor, x: Tensor, joint: Joint) -> Tensor:
    """Returns x with y joined to it."""
    gain, eps, shift = _fields(joint.norm)
    return torch.ops.lowbit.join(y, x, gain, joint.scale, eps, shift, "")


def _fields(norm: Norm | None) -> tuple[Tensor | None, float, float]:
    return (norm.gain, norm.eps, norm.shift) if norm else (None, 0.0, 0.0)


def feed_forward(x: Tensor, h: Tensor, gate_up: GatedLinear, down: LowbitLinear) -> Tensor:
    """Returns x + down(activation(gate) * up) of h, which is x with its norm."""
    return down.plus(gate_up.gated(h), x)
