"""The operation that transformers applies to tensors of a dense checkpoint while it loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps


class Quantize(ConversionOps):
    """Hands dense tensors to `take`, which returns the keys that the model has got by it. transformers is left with
    nothing to put anywhere."""

    def __init__(self, take: Callable[[str, Tensor], set[str]]) -> None:
        self.take = take

    def convert(self, input_dict: dict[str, Any], missing_keys: set[str] | None = None, **_: Any) -> dict[str, Tensor]:
        for name, values in input_dict.items():
            keys = self.take(name, values[0] if isinstance(values, list) else values)
            if missing_keys is not None:
                missing_keys -= keys
        return {}
