"""Attention for decoding, in plain operations of torch: queries that share a key are the rows of one matmul.

transformers repeats keys and values for every query head before it calls torch's attention with a mask, which then
takes longer than all linear layers at batch 16. Dense and low-bit models are timed with the same attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "lowbit_grouped"
"""What transformers calls it: `config._attn_implementation`."""


def register() -> str:
    """Makes the attention known to transformers, and returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, grouped_attention)  # type: ignore[arg-type]
    AttentionMaskInterface.register(NAME, sdpa_mask)  # type: ignore[arg-type]
    return NAME


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns what attention gives [batch, tokens, heads, size], as transformers calls it.

    query            [batch, heads, tokens, size]
    key, value       [batch, heads / groups, length, size]
    attention_mask   [batch, 1, tokens, length]: True, or 0, where a token may look; None: everywhere
    """
    batch, heads, tokens, size = query.shape
    sharing = key.shape[1]
    rows = query.reshape(batch, sharing, -1, size)
    scores = (rows @ key.transpose(-1, -2)).float() * (size**-0.5 if scaling is None else scaling)
    scores = scores.view(batch, sharing, heads // sharing, tokens, -1)
    if attention_mask is not None:
        mask = attention_mask[:, :, None]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    weights = scores.softmax(-1).to(query.dtype).view(batch, sharing, -1, key.shape[2])
    return (weights @ value).view(batch, heads, tokens, size).transpose(1, 2), None
