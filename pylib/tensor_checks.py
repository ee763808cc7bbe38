"""Whether a tensor is what a slot of a weight asks for, and whether a kernel can read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.dialect.errors import PackError
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.torch_types import stored_type

ALIGNMENT = 16  # bytes; what cp.async and 16-byte loads ask of a base address


def check_slot(slot: TensorSlot, t: Tensor) -> None:
    """Raises PackError unless a tensor has the shape, type and strides of a slot."""
    expected = stored_type(slot.storage)
    if not slot.takes(t.shape) or t.dtype is not expected:
        why = "use pack()"
        if slot.takes(t.shape) and t.is_floating_point():
            why = "it is for another act or out, or Module.half(), .bfloat16() or .float() converted it: load it again"
        raise PackError(f"packed {slot.name} must be {expected} {slot.shape}, not {t.dtype} {tuple(t.shape)}; {why}")
    if t.layout is not torch.strided:
        raise PackError(f"packed {slot.name} is {t.layout}; use .to_dense()")


def check_memory(slot: TensorSlot, t: Tensor) -> None:
    """Raises PackError unless a kernel can read a plain tensor as it lies in memory."""
    if not has_memory(t):
        raise PackError(f"packed {slot.name} has no memory that a kernel could read; clone it")
    if t.data_ptr() % ALIGNMENT or t.is_neg() or not t.is_contiguous():
        raise PackError(f"packed {slot.name} must be contiguous and {ALIGNMENT}-byte aligned; clone it")


def fits(stored: Sequence[tuple[tuple[int, ...], torch.dtype]], weight: Sequence[Tensor], device: int) -> bool:
    """Tells whether tensors have these shapes and types, and lie on a device as kernels read them.

    Every call of the operator asks this, so it is quick; torch's dispatcher has seen to it that they are plain tensors.
    """
    if len(weight) != len(stored):
        return False
    for (shape, dtype), t in zip(stored, weight):
        address = t.data_ptr()
        if t.dtype is not dtype or t.get_device() != device or not t.is_contiguous():
            return False
        if t.shape != shape and (shape[0] >= 0 or t.shape[1:] != shape[1:]):  # of a free length: pack saw to it
            return False
        if address % ALIGNMENT or not address:
            return False
    return True


def has_memory(t: Tensor) -> bool:
    """Tells whether a tensor has memory, and as much as its size says: a copy of it takes no more."""
    if not is_plain(t) or t.layout is not torch.strided or t.is_meta or t.is_quantized:
        return False
    try:
        return t.numel() == 0 or (t.data_ptr() != 0 and t.untyped_storage().nbytes() >= t.nbytes)
    except RuntimeError:  # a tensor of torch.func, or one without a storage
        return False


def address_of(x: Tensor) -> int:
    """Returns where x lies in memory. Raises RuntimeError, as torch does, where that is nowhere: at address 0 are
    wrappers of torch.func.functionalize."""
    address = x.data_ptr()
    if not address:
        raise RuntimeError("x has no memory")
    return address


def is_plain(t: Tensor) -> bool:
    """Tells whether a tensor has a type of its own memory, unlike those that torch traces with."""
    return type(t) is Tensor or type(t) is torch.nn.Parameter
