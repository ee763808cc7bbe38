"""The types of the dialect in torch."""

from __future__ import annotations

import torch

from lowbit.dialect.weight import Storage

TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
    "u8": torch.uint8,
    "i32": torch.int32,
}


def stored_type(storage: Storage) -> torch.dtype:
    """Returns the type of a packed tensor. Numbers of 8 bits are kept as bytes, which `Module.half()` leaves alone."""
    return torch.uint8 if storage in ("e8m0", "e4m3") else TORCH[storage]
