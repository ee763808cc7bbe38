"""The types of numbers in torch."""

from __future__ import annotations

from collections.abc import Iterable

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


_BYTES = (torch.uint8, torch.int8)
_SEEN_AS: dict[str, tuple[torch.dtype, ...]] = {
    "f16": (torch.float16,),
    "bf16": (torch.bfloat16,),
    "f32": (torch.float32,),
    "i32": (torch.int32, torch.uint32),
    "i16": (torch.int16, torch.uint16),
    "i8": (*_BYTES, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    "ui8": (torch.uint8,),
    "f8E4M3FN": (torch.float8_e4m3fn, *_BYTES),
    "vector<4xi32>": (torch.int32, torch.uint32, *_BYTES),  # packed codes
}


def types_of_views(elements: Iterable[object]) -> tuple[torch.dtype, ...]:
    """Returns the types of tensors that a program may see as these elements, as the IR has them: those of any."""
    return tuple(dict.fromkeys(dtype for element in elements for dtype in _SEEN_AS[str(element)]))
