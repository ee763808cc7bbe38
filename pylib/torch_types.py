"""The types of numbers in torch."""

from __future__ import annotations

import torch

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.weight import Storage

TORCH: dict[str, torch.dtype] = {name: getattr(torch, element.torch) for name, element in ELEMENTS.items()}


def type_name(dtype: torch.dtype) -> str:
    """Returns what torch calls a type, without "torch.": "float16"."""
    return str(dtype).removeprefix("torch.")


def stored_type(storage: Storage) -> torch.dtype:
    """Returns the type of a packed tensor. Numbers of 8 bits are kept as bytes, which `Module.half()` leaves alone."""
    return torch.uint8 if storage in ("e8m0", "e4m3") else TORCH[storage]
