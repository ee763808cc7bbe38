"""The tensors and the configuration of one module of a checkpoint, looked at before they are used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.torch_types import type_name

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LONGEST_JSON = 1 << 16  # bytes of JSON in a tensor


class ModuleTensors:
    """The tensors of a module, as a format's reader gets them. All methods raise CheckpointError.

    config    the quantization_config of the model
    tensors   the tensors of the module by their names in it: "qweight", "weight.absmax"
    shape     n and k of the module's weight where the model says them, for formats whose tensors do not; else None
    name      what the checkpoint calls the module, for configurations that say something of some modules; "" if unknown
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        shape: tuple[int, int] | None = None,
        name: str = "",
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.shape = shape
        self.name = name

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def take(
        self, name: str, dtypes: torch.dtype | Sequence[torch.dtype], ndim: int, may_be_empty: bool = False
    ) -> Tensor:
        """Returns a tensor, of one of these types and with so many dimensions."""
        self.check_has(name)
        t, allowed = self.tensors[name], (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        if t.dtype not in allowed or t.ndim != ndim:
            kinds = " or ".join(map(type_name, allowed))
            raise CheckpointError(f"{name} must be {kinds} with {ndim} dimensions, not {t.dtype} {list(t.shape)}")
        if not t.numel() and not may_be_empty:
            raise CheckpointError(f"{name} is empty: {list(t.shape)}")
        return t

    def check_has(self, name: str, because: str = "") -> None:
        """Raise CheckpointError for a tensor that is missing, and that the configuration says there is."""
        if name not in self:
            why = f", though {because}" if because else ""
            there = ", ".join(sorted(self.tensors)) or "no tensors"
            raise CheckpointError(f"{name} is missing{why}; there are {there}")

    def floats(self, name: str, ndim: int) -> Tensor:
        """Returns a tensor of f16, bf16 or f32."""
        return self.take(name, FLOATS, ndim)

    def packed(self, name: str) -> Tensor:
        """Returns the bytes of packed codes [rows, bytes], which some libraries keep in a tensor of any type: that in
        which a framework moves parameters."""
        return self.take(name, (*INTEGERS, *FLOATS, torch.float64), 2).contiguous().view(torch.uint8)

    def bias(self) -> Tensor | None:
        """Returns the bias [n], where the module has one."""
        return self.floats("bias", 1) if "bias" in self else None

    def number(self, name: str) -> int:
        """Returns an integer of the configuration."""
        value = self.config.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"the quantization_config has {name}={value!r}; it must be an integer")
        return value

    def choice(self, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """Returns an entry of the configuration, or the default if there is none."""
        value = self.config.get(name, default)
        if value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise CheckpointError(f"the quantization_config has {name}={value!r}; what can be read is {known}")
        return value

    def one_choice(self, names: Sequence[str], allowed: Sequence[Any], default: Any) -> Any:
        """Returns an entry that has several names, or the default if there is none. Texts may have any case.

        Raises CheckpointError for two that differ.
        """
        said = {name: self.config[name] for name in names if self.config.get(name) is not None}
        said = {name: value.lower() if isinstance(value, str) else value for name, value in said.items()}
        for name, value in said.items():
            if value not in allowed:
                self.choice(name, allowed)
            if value != next(iter(said.values())):
                both = " and ".join(f"{key}={self.config[key]!r}" for key in said)
                raise CheckpointError(f"the quantization_config has {both}; they must be the same")
        return next(iter(said.values()), default)

    def json(self, name: str) -> dict[str, Any]:
        """Returns the JSON dictionary that a tensor of bytes holds."""
        t = self.take(name, torch.uint8, 1)
        found: Any = None
        if len(t) <= LONGEST_JSON:
            with suppress(ValueError, RecursionError):
                found = json.loads(bytes(t.tolist()))
        if not isinstance(found, dict):
            raise CheckpointError(f"{name} must hold a JSON dictionary of at most {LONGEST_JSON} bytes")
        return cast(dict[str, Any], found)


def check_shape(name: str, t: Tensor, shape: Sequence[int], of: str) -> None:
    """Raises CheckpointError unless a tensor has the shape that others imply."""
    if list(t.shape) != list(shape):
        raise CheckpointError(f"{name} must be {list(shape)} beside {of}, not {list(t.shape)}")
