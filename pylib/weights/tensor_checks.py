"""Checks that a tensor is what a slot of a weight asks for, and that a kernel can read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from weakref import ref

import torch
from torch import Tensor

from lowbit.dialect.errors import LowbitError, PackError
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.operator.tracing import is_observed
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
        with suppress(RuntimeError):  # a tensor of torch.func
            if t.data_ptr():
                check_storage(f"packed {slot.name}", t, PackError)
        raise PackError(f"packed {slot.name} has no memory that a kernel could read; clone it")
    if t.data_ptr() % ALIGNMENT or t.is_neg() or not t.is_contiguous():
        raise PackError(f"packed {slot.name} must be contiguous and {ALIGNMENT}-byte aligned; clone it")


class SeenTensors:
    """Lists of tensors that have passed a check and still are the same objects with the same memory and values.

    The operator asks for it in every call, where to look at shapes and types again would take twice as long.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[tuple[ref[Tensor], int, int]]] = {}

    def has(self, tensors: Sequence[Tensor]) -> bool:
        """Tells whether these tensors, in this order, have been added."""
        known = self._lists.get(id(tensors[0]), ()) if tensors else ()
        if len(known) != len(tensors):
            return False
        for (seen, address, version), t in zip(known, tensors):
            if seen() is not t or t.data_ptr() != address or t._version != version:
                return False
        return bool(known)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Remembers a list of tensors until its first tensor is freed. Tensors made in inference mode have no version
        counter, so they are not remembered."""
        if any(t.is_inference() for t in tensors):
            return
        lists, key = self._lists, id(tensors[0])
        first = ref(tensors[0], lambda _: lists.pop(key, None))
        lists[key] = [(first if t is tensors[0] else ref(t), t.data_ptr(), t._version) for t in tensors]


def state_of(tensors: Iterable[Tensor]) -> tuple[tuple[int, int | None], ...]:
    """Returns a state that changes with the memory of tensors and with their values (not for those of inference
    mode)."""
    return tuple((t.data_ptr(), None if t.is_inference() else t._version) for t in tensors)


def has_memory(t: Tensor) -> bool:
    """Tells whether a tensor has memory, and as much as its size says: a copy of it takes no more."""
    if not is_plain(t) or t.layout is not torch.strided or t.is_meta or t.is_quantized:
        return False
    try:
        needed = max(t.nbytes, bytes_needed(t))
        return t.numel() == 0 or (t.data_ptr() != 0 and t.untyped_storage().nbytes() >= needed)
    except RuntimeError:  # a tensor of torch.func, or one without a storage
        return False


def check_storage(what: str, t: Tensor, error: type[LowbitError]) -> None:
    """Raises `error` where a tensor's storage ends before its last element: `untyped_storage().resize_` has shrunk it
    under the tensor, and a kernel or a copy would read what lies behind it. Tensors that torch traces are not
    checked."""
    if is_plain(t) and not is_observed() and not t.is_meta and is_shrunk(t):
        raise error(shrinkage(what, t))


def is_shrunk(t: Tensor) -> bool:
    """Tells whether a tensor's storage ends before its last element, in 0.5 us. Raises RuntimeError, as torch does, for
    a tensor without a storage."""
    return t.untyped_storage().nbytes() < bytes_needed(t)


def shrinkage(what: str, t: Tensor) -> str:
    """Returns the message for a tensor that `is_shrunk`."""
    sizes = f"a storage of {t.untyped_storage().nbytes()} bytes, but its shape and strides need {bytes_needed(t)}"
    return f"{what} has {sizes}; it was shrunk (untyped_storage().resize_): load or compute it anew"


def bytes_needed(t: Tensor) -> int:
    """Returns the bytes from the start of a strided tensor's storage to the end of its last element; 0 without any."""
    elements = t.numel()
    if elements and not t.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return (int(t.storage_offset()) + elements) * t.itemsize if elements else 0


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
