"""A transformer layer for few tokens, in eight launches:

    norm, projection to queries, keys and values, rotation and cache, attention, output projection plus residual,
    norm, gate and up projection with its activation, down projection plus residual

All of them let the next one start early, so that every matmul's weights are on their way while what is in front of it
is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.pylib.nn.gated_linear import GatedLinear
from lowbit.pylib.nn.linear import LowbitLinear
from lowbit.pylib.operator import layer_schema as layer_schema  # which declares the operators


@dataclass
class Norm:
    """A root-mean-square norm: gain [hidden], and what is added to it."""

    gain: Tensor
    eps: float
    shift: float = 0.0


@dataclass
class Attention:
    """A layer of attention.

    qkv     projects x to queries, keys and values
    norms   of queries and keys, alike but for their gains
    """

    qkv: LowbitLinear
    out: LowbitLinear
    scale: float
    norms: tuple[Norm, Norm] | None = None


@dataclass
class Places:
    """Where tokens are.

    cos, sin       [b, t, columns]: their rotations
    keys, values   [b, heads, length, columns]: the cache
    held           int64 [] or [1]: how many tokens it holds before these
    mask           bool [b or 1, 1, t, length]: places that may be looked at, of those up to a token's own
    """

    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    held: Tensor
    mask: Tensor | None = None


def attend(x: Tensor, norm: Norm, attention: Attention, at: Places) -> Tensor:
    """Returns x + attention(norm(x)) [b, t, hidden], and appends keys and values to the cache."""
    ops, norms = torch.ops.lowbit, attention.norms
    gains = (norms[0].gain, norms[1].gain, norms[0].eps, norms[0].shift) if norms else (None, None, 0.0, 0.0)
    h = attention.qkv(ops.rms_norm(x, norm.gain, norm.eps, norm.shift, ""))
    q = ops.rope(h, at.cos, at.sin, *gains[:2], at.keys, at.values, at.held, *gains[2:], "")
    y = ops.decode_attention(q, at.keys, at.values, at.held, at.mask, attention.scale, "")
    return attention.out.plus(y, x)


def normed_after(x: Tensor, norm: Norm, held: Tensor, count: int) -> Tensor:
    """Returns norm(x) of what `attend` has made, and adds the tokens that it has appended to those that are held."""
    return torch.ops.lowbit.rms_norm_counting(x, norm.gain, held, count, norm.eps, norm.shift, "")


def feed_forward(x: Tensor, h: Tensor, gate_up: GatedLinear, down: LowbitLinear) -> Tensor:
    """Returns x + down(activation(gate) * up) of h, which is x with its norm."""
    return down.plus(gate_up.gated(h), x)
