"""Texts as inputs of a language model, for methods that look at the inputs of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.dialect.errors import QuantizeError

LENGTH = 2048
"""Tokens of an input, unless told otherwise: longer texts are cut."""


def tokenized(texts: Sequence[Any], model: Any, tokenizer: Any = None, length: int = LENGTH) -> list[Any]:
    """Returns inputs of a model in which each text is a tensor of tokens [1, tokens] on the model's device.

    texts       texts, and inputs of other kinds, which stay as they are
    tokenizer   of transformers; None: that of the folder or name that the model was loaded from
    length      tokens that are taken of each text

    Raises QuantizeError for a model without a tokenizer, and for a text without tokens.
    """
    if not any(isinstance(text, str) for text in texts):
        return list(texts)
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    return [_tokens(text, model, tokenizer, length) if isinstance(text, str) else text for text in texts]


def samples_of(text: str, model: Any, tokenizer: Any, samples: int, length: int) -> list[Tensor]:
    """Returns inputs [1, length] for a model: consecutive parts of a text, at most so many, spread over it evenly.

    A text with fewer than `length` tokens is one shorter input. Raises QuantizeError for a text without tokens.
    """
    (ids,) = _tokens(text, model, tokenizer, None)
    parts = ids.split(length)
    whole = [part for part in parts if len(part) == length] or [parts[0]]
    count = min(samples, len(whole))
    return [whole[i * len(whole) // count][None] for i in range(count)]


def tokenizer_of(model: Any) -> Any:
    """Returns the tokenizer of the folder or name that a model of transformers was loaded from."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise QuantizeError(
            f"calibration= has texts, and no tokenizer is found for {name or type(model).__name__!r}: pass tokenizer=, "
            f"such as AutoTokenizer.from_pretrained(name), or tensors of tokens ({error})"
        ) from error


def _tokens(text: str, model: Any, tokenizer: Any, length: int | None) -> Tensor:
    ids: Any = tokenizer(text)["input_ids"][:length]
    if not ids:
        raise QuantizeError(f"calibration= has a text without tokens: {text[:40]!r}; leave it out")
    return torch.tensor([ids], device=next(model.parameters()).device)
