"""What the kernels between the matmuls of a layer compute, in operations of torch: for a CPU, and for what no kernel
has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lowbit.pylib.runtime.batch_invariant import MODE


@dataclass
class Norm:
    """A root-mean-square norm: gain [hidden], and what is added to it."""

    gain: Tensor
    eps: float
    shift: float = 0.0


def rms_norm(x: Tensor, gain: Tensor, eps: float, shift: float) -> Tensor:
    """Returns x / sqrt(mean of x^2 + eps) * (gain + shift) in x's type, over the last dim."""
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor * (gain.float() + shift)).to(x.dtype)


def join(
    x: Tensor, residual: Tensor, scale: float, norm: Norm | None, following: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """Returns y = residual + scale * norm(x) in x's type, and the following norm of y, if there is one."""
    wide = rms_norm(x.float(), norm.gain, norm.eps, norm.shift) if norm else x.float()
    y = (residual.float() + scale * wide).to(x.dtype)
    return y, rms_norm(y, following.gain, following.eps, following.shift) if following else None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, beside: bool = False) -> Tensor:
    """Returns heads [b, t, heads, columns] whose first columns are rotated by cos and sin [b, t, columns or fewer],
    whose halves are equal, in f32. beside: as `by_kernel.rope` has it."""
    turned, rest = x.float().tensor_split([cos.shape[-1]], -1)
    if beside:
        cos, sin = (each.chunk(2, -1)[0].repeat_interleave(2, -1) for each in (cos, sin))
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        other = torch.cat([-b, a], -1)
    return torch.cat([turned * cos.float()[:, :, None] + other * sin.float()[:, :, None], rest], -1)


def appended(cache: Tensor, new: Tensor, held: Tensor) -> None:
    """Writes heads [b, t, heads, columns] into a cache [b, heads, length, columns] behind the tokens that it holds.

    Tokens that find no room are left out.
    """
    places = held.reshape(1) + torch.arange(new.shape[1], device=new.device)
    room = cache.shape[2]
    kept = (places < room)[None, None, :, None]
    inside = places % room  # each another, so that none is written twice
    values = torch.where(kept, new.transpose(1, 2).to(cache.dtype), cache[:, :, inside])
    cache[:, :, inside] = values


def drop_first(keys: Tensor, values: Tensor, held: Tensor) -> None:
    """Moves the tokens of a full cache [b, heads, length, columns] up by one place, and makes `held` length - 1."""
    for cache in (keys, values):
        cache[:, :, :-1] = cache[:, :, 1:].clone()
    held.fill_(keys.shape[2] - 1)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Returns what each query [b, t, queries, columns] makes of the values of the places up to its own
    [b, t, queries, columns]; within `lowbit.batch_invariant` token by token."""
    if MODE.on and q.shape[0] * q.shape[1] > 1:
        return _by_token(q, keys, values, held, mask, scale, sinks, cap)
    if not held.is_cuda:  # else it would have to be waited for
        end = min(int(held) + q.shape[1], keys.shape[2])
        keys, values, mask = keys[:, :, :end], values[:, :, :end], None if mask is None else mask[..., :end]
    places = torch.arange(keys.shape[2], device=q.device)
    own = held.reshape(1, 1) + torch.arange(q.shape[1], device=q.device)[:, None]
    seen = places[None] <= own
    if mask is not None:
        seen = seen & mask if mask.dtype is torch.bool else mask.float().masked_fill(~seen, -torch.inf)
    queries, keys, values = q.transpose(1, 2).float(), keys.float(), values.float()
    if sinks is None and not cap:
        y = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=True)
    else:
        y = _with_sinks(queries, keys, values, seen, scale, sinks, cap)
    return y.transpose(1, 2).to(q.dtype)


def _with_sinks(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, sinks: Tensor | None, cap: float
) -> Tensor:
    """Returns attention of queries [b, queries, t, columns] whose products have a cap, and which have sinks."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    products = scale * q @ keys.transpose(2, 3)
    products = cap * torch.tanh(products / cap) if cap else products
    products = products.masked_fill(~seen, -torch.inf) if seen.dtype is torch.bool else products + seen
    if sinks is not None:
        rest = sinks.float().reshape(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat([products, rest], -1)
    return products.softmax(-1)[..., : keys.shape[2]] @ values


def _by_token(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    held: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    cap: float,
) -> Tensor:
    """Returns `attention`, called for each token alone."""
    y = torch.empty_like(q)
    for b in range(q.shape[0]):
        one = slice(b, b + 1)
        of_batch = None if mask is None else mask[one] if mask.shape[0] > 1 else mask
        for t in range(q.shape[1]):
            of_token = None if of_batch is None else of_batch[:, :, t : t + 1]
            given = q[one, t : t + 1], keys[one], values[one], held + t, of_token
            y[one, t : t + 1] = attention(*given, scale, sinks, cap)
    return y
