"""The operations that transformers applies to tensors of a checkpoint while it loads them.

Both take over from there, and leave transformers with nothing to put anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from lowbit.pylib.integrations.foreign import LEFT_ALONE

FIRST = "lowbit_first"  # what transformers calls the tensors that it shall read of the layers of others


class Quantize(ConversionOps):
    """Hands over dense tensors.

    take   is given the name of a tensor and its value; returns the keys that the model has got by it
    """

    def __init__(self, take: Callable[[str, Tensor], set[str]]) -> None:
        self.take = take

    def convert(self, input_dict: dict[str, Any], missing_keys: set[str] | None = None, **_: Any) -> dict[str, Tensor]:
        for name, values in input_dict.items():
            keys = self.take(name, values[0] if isinstance(values, list) else values)
            if missing_keys is not None:
                missing_keys -= keys
        return {}


class Import(ConversionOps):
    """Says that a tensor of a layer has come which another library wrote, and where it is.

    take   is given the model, the key of the codes of the layer, and a device; returns the keys that the model has got
    """

    hf_quantizer = True  # tells transformers to leave the types of these tensors alone

    def __init__(self, take: Callable[[Any, str, torch.device], set[str]]) -> None:
        self.take = take

    def __deepcopy__(self, memo: object) -> Import:
        """Returns itself: transformers copies operations for every layer, and with them all that they refer to."""
        return self

    def convert(
        self,
        input_dict: dict[str, Any],
        full_layer_name: str = "",
        model: Any = None,
        missing_keys: set[str] | None = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        (values,) = input_dict.values()
        (tensor,) = values if isinstance(values, list) else (values,)
        keys = self.take(model, full_layer_name, tensor.device)
        if missing_keys is not None:
            missing_keys -= keys
        return {}


class ImportConverter(WeightConverter):
    """Tells transformers which tensors to read of layers that another library wrote: the first of each. It knows them
    by their whole names: patterns of their ends, as transformers' own converters have, would match dense layers too
    where codes are called weights.

    first    the tensors that are read, each with the key of the codes of its layer
    others   those that are not
    """

    def __init__(self, operation: Import, first: Mapping[str, str], others: Collection[str]) -> None:
        super().__init__([FIRST], "codes", [operation])
        self.first, self.others = first, others

    def __deepcopy__(self, memo: object) -> ImportConverter:
        """Returns another for one layer, without copying what is said of all."""
        return ImportConverter(cast(Import, self.operations[0]), self.first, self.others)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Returns the key of the layer's codes for a tensor that is read, a key that no model has for one that is not,
        and the name of another."""
        if source_key in self.others:
            return LEFT_ALONE, None
        target = self.first.get(source_key)
        self._was_used |= target is not None
        return (source_key, None) if target is None else (target, FIRST)


def without_imports(conversions: list[Any]) -> list[Any]:
    """Returns the conversions that a model is saved with: what was imported is saved as it is."""
    return [c for c in conversions if not any(isinstance(op, Import) for op in getattr(c, "operations", ()))]
