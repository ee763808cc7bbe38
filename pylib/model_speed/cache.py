"""Finds the name of the argument by which a model of transformers takes its cache of keys and values."""

from __future__ import annotations

import inspect

from torch import nn


def cache_argument(model: nn.Module) -> str:
    """Returns the name of the argument of `model.forward` that takes a cache of keys and values.

    It is `cache` from transformers 5.24 on, and `past_key_values` before, or in code that a model brings along.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
