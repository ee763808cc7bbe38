"""The operations that transformers applies to tensors of a checkpoint while it loads them.

Both hand the tensors over, and leave transformers with nothing to put anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter


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
    """Hands over the tensors of a layer as another library writes it.

    take      is given the model, the name of a layer, and its tensors; returns the keys that the model has got by them
    targets   for each tensor of the checkpoint the key of its layer's codes in the model, and its name in the layer
    """

    hf_quantizer = True  # tells transformers to leave the types of these tensors alone

    def __init__(
        self, take: Callable[[Any, str, dict[str, Tensor]], set[str]], targets: Mapping[str, tuple[str, str]]
    ) -> None:
        self.take = take
        self.targets = targets

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
        found = {name: v[0] if isinstance(v, list) else v for name, v in input_dict.items()}
        keys = self.take(model, full_layer_name.removesuffix(".codes"), found)
        if missing_keys is not None:
            missing_keys -= keys
        return {}


class ImportConverter(WeightConverter):
    """Tells transformers to collect the tensors of a layer. It knows them by their whole names: patterns of their ends,
    as transformers' own converters have, would match dense layers too where codes are called weights."""

    def __init__(self, operation: Import) -> None:
        names = sorted({name for _, name in operation.targets.values()})
        super().__init__(names, "codes", [operation])

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Returns the key of the layer's codes and what the tensor is called in the layer; None for other tensors."""
        (operation,) = cast(list[Import], self.operations)
        target, name = operation.targets.get(source_key, (source_key, None))
        self._was_used |= name is not None
        return target, name


def without_imports(conversions: list[Any]) -> list[Any]:
    """Returns the conversions that a model is saved with: what was imported is saved as it is."""
    return [c for c in conversions if not any(isinstance(op, Import) for op in getattr(c, "operations", ()))]
