"""Attention for models with a static cache, in operations of torch. Dense and low-bit models are timed with the same.

transformers repeats keys and values for every query head and calls torch's attention with a mask. When decoding at
batch 16 that takes longer than all linear layers: here queries that share a key are the rows of one matmul. In a prompt
of 8192 tokens it takes four times as long as attention that knows that it is causal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

GROUPED, CAUSAL = "lowbit_grouped", "lowbit_causal"
"""Names of the two kinds of attention for transformers (`config._attn_implementation`)."""


def attention_for(config: Any, tokens: int, context: int, sinks: bool = False) -> str:
    """Returns the name, known to transformers, of the attention of a model for `tokens` after `context` of them.

    sinks   whether heads have a sink, which torch's attention does not know
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(GROUPED, grouped_attention)  # type: ignore[arg-type]
    AttentionMaskInterface.register(GROUPED, sdpa_mask)  # type: ignore[arg-type]
    AttentionInterface.register(CAUSAL, causal_attention)  # type: ignore[arg-type]
    AttentionMaskInterface.register(CAUSAL, _no_mask)  # type: ignore[arg-type]
    if tokens == 1 or sinks or getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return GROUPED
    return CAUSAL if context == 0 and _attends_to_all(config) else "sdpa"


def _attends_to_all(config: Any) -> bool:
    """Tells whether every layer attends to all earlier tokens, without a window."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    windows = ("sliding_window", "attention_chunk_size")
    return set(kinds) == {"full_attention"} if kinds else not any(getattr(text, name, None) for name in windows)


def _no_mask(*_: Any, **__: Any) -> None:
    """Returns None in place of the mask that transformers would make."""


def causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: None, scaling: float | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Returns what attention gives [batch, tokens, heads, size] for a prompt that begins the cache.

    query        [batch, heads, tokens, size]
    key, value   [batch, heads / groups, length, size], of which the first `tokens` are in use
    """
    tokens, grouped = query.shape[2], query.shape[1] != key.shape[1]
    key, value = key[:, :, :tokens], value[:, :, :tokens]
    found = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return found.transpose(1, 2), None


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns what attention gives [batch, tokens, heads, size], as transformers calls it.

    module           may have `sinks` [heads], as in gpt-oss: scores of a token whose value is 0
    query            [batch, heads, tokens, size]
    key, value       [batch, heads / groups, length, size]
    attention_mask   [batch, 1, tokens, length]: True, or 0, where a token may look; None: everywhere
    softcap          scores are kept below it by a tanh, as in Gemma 2
    """
    batch, heads, tokens, size = query.shape
    sharing = key.shape[1]
    rows = query.reshape(batch, sharing, -1, size)
    scores = (rows @ key.transpose(-1, -2)).float() * (size**-0.5 if scaling is None else scaling)
    scores = scores.view(batch, sharing, heads // sharing, tokens, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if attention_mask is not None:
        mask = attention_mask[:, :, None]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    sinks = getattr(module, "sinks", None)
    if isinstance(sinks, Tensor):
        column = sinks.float().view(sharing, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(query.dtype).reshape(batch, sharing, -1, key.shape[2])
    return (weights @ value).view(batch, heads, tokens, size).transpose(1, 2), None
