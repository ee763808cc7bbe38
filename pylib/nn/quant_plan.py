"""`QuantPlan`: a configuration for each layer of a model, and the file that keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from lowbit.dialect.errors import SpecError
from lowbit.pylib.quantization.config import QuantConfig

VERSION = 1  # of `QuantPlan.to_dict`


class QuantPlan(Mapping[str, QuantConfig]):
    """A configuration for each linear layer, and for the experts of each layer, by its name: `lowbit.quantize_` takes
    it, and its file, as `config`.

    bits         per weight of these layers, with scales, zeros, outliers and padding
    bytes        of these layers
    divergence   the sum of what the layers are expected to add to the divergence of the model's output
    """

    def __init__(self, configs: Mapping[str, QuantConfig], bits: float, bytes: int, divergence: float) -> None:
        self.bits, self.bytes, self.divergence = bits, bytes, divergence
        self._configs = dict(configs)

    def __getitem__(self, name: str) -> QuantConfig:
        return self._configs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan in terms of JSON."""
        layers = {name: config.to_dict() for name, config in self.items()}
        sums = {"bits": self.bits, "bytes": self.bytes, "divergence": self.divergence}
        return {"version": VERSION, **sums, "layers": layers}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> QuantPlan:
        """Returns the plan that `to_dict` wrote. Raises SpecError for anything else."""
        known = isinstance(cast(object, written), Mapping) and written.get("version") == VERSION
        if not known or not isinstance(written.get("layers"), Mapping):
            raise SpecError(f"a plan must be what QuantPlan.to_dict() gave, in version {VERSION}")
        layers = {name: QuantConfig.from_dict(config) for name, config in written["layers"].items()}
        sums = [written.get(name, 0) for name in ("bits", "bytes", "divergence")]
        if not all(type(number) in (int, float) and abs(number) < 1 << 63 for number in sums):
            raise SpecError("bits, bytes and divergence of a plan must be numbers below 2^63")
        return cls(layers, *sums)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(file).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> QuantPlan:
        """Returns the plan in a file. Raises SpecError where there is none."""
        try:
            return cls.from_dict(json.loads(Path(file).read_text()))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SpecError(f"{os.fspath(file)} is no file with a plan: {reason}") from None

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        rows = [f"{name:{width}}  {_form(config)}" for name, config in self.items()]
        return "\n".join([*rows, f"{self.bits:.3f} bits per weight, {self.bytes / 1e6:.2f} MB"])


def _form(config: QuantConfig) -> str:
    group = "row" if config.group_size is None else str(config.group_size)
    return f"{config.weight} per {group}, {config.method}"
