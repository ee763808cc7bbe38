"""What the kernels between the matmuls of a layer compute, in operations of torch: for a CPU, and for what no kernel
has."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lowbit.pylib.runtime.batch_invariant import MODE


def rms_norm(x: Tensor, gain: Tensor, eps: float, shift: float) -> Tensor:
    """Returns x / sqrt(mean of x^2 + eps) * (gain + shift) in x's type, over the last dim."""
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor * (gain.float() + shift)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [b, t, heads, columns] that are rotated by cos and sin [b, t, columns], in f32."""
    a, b = x.float().chunk(2, -1)
    return x.float() * cos.float()[:, :, None] + torch.cat([-b, a], -1) * sin.float()[:, :, None]


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


def attention(
    q: Tensor, keys: Tensor, values: Tensor, held: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Returns what each query [b, t, queries, columns] makes of the values of the places up to its own
    [b, t, queries, columns]; within `lowbit.batch_invariant` token by token."""
    if MODE.on and q.shape[0] * q.shape[1] > 1:
        return _by_token(q, keys, values, held, mask, scale)
    if not held.is_cuda:  # else it would have to be waited for
        end = min(int(held) + q.shape[1], keys.shape[2])
        keys, values, mask = keys[:, :, :end], values[:, :, :end], None if mask is None else mask[..., :end]
    places = torch.arange(keys.shape[2], device=q.device)
    own = held.reshape(1, 1) + torch.arange(q.shape[1], device=q.device)[:, None]
    seen = places[None] <= own
    if mask is not None:
        seen = seen & mask
    each = (tensor.float() for tensor in (q.transpose(1, 2), keys, values))
    y = scaled_dot_product_attention(*each, attn_mask=seen, scale=scale, enable_gqa=True)
    return y.transpose(1, 2).to(q.dtype)


def _by_token(
    q: Tensor, keys: Tensor, values: Tensor, held: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Returns `attention`, called for each token alone."""
    y = torch.empty_like(q)
    for b in range(q.shape[0]):
        one = slice(b, b + 1)
        of_batch = None if mask is None else mask[one] if mask.shape[0] > 1 else mask
        for t in range(q.shape[1]):
            of_token = None if of_batch is None else of_batch[:, :, t : t + 1]
            y[one, t : t + 1] = attention(q[one, t : t + 1], keys[one], values[one], held + t, of_token, scale)
    return y
