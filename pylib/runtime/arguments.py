"""The memory from which the driver reads a kernel's arguments, laid out once and overwritten at every launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lowbit.dialect.signature import TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES, WORKSPACE, ParamKind
from lowbit.passes.launch import Launch

# Codes of `struct`, and sizes in bytes, to which each kind but the tensor map is aligned.
_CODES: dict[ParamKind, tuple[str, int]] = {
    "pointer": ("Q", 8),
    "i32": ("i", 4),
    "f32": ("f", 4),
    "tensor_map": (f"{TENSOR_MAP_BYTES}s", TENSOR_MAP_BYTES),
}


@dataclass(frozen=True)
class StructLayout:
    """Where values of some kinds lie one after the other, each at a multiple of its alignment.

    format    for `struct`, padding included
    offsets   of the values, in bytes
    size      of the whole, in bytes
    """

    format: str
    offsets: tuple[int, ...]
    size: int


def struct_layout(kinds: Sequence[ParamKind]) -> StructLayout:
    """Lays out values of these kinds in this order."""
    codes, offsets, end = ["<"], list[int](), 0
    for kind in kinds:
        code, size = _CODES[kind]
        padding = -end % min(size, TENSOR_MAP_ALIGN)
        codes.append(f"{padding}x{code}" if padding else code)
        offsets.append(end + padding)
        end += padding + size
    return StructLayout("".join(codes), tuple(offsets), end)


class ArgumentBuffer:
    """A buffer for the arguments of one kernel.

    set(*values)   writes the values: in the order of the call, and then the workspace's address if there is one
    places         the addresses of the values, in that order
    addresses      an array of their addresses in the order of the kernel's signature, as the driver takes it
    order          names in the order of the call

    `order` may name pointers that this kernel does not take: the caller of several kernels always passes the same
    values, and each kernel gets its own. Raises SpecError if it leaves out what the kernel takes.
    """

    def __init__(self, launch: Launch, order: Sequence[str]) -> None:
        known: dict[str, ParamKind] = {p.name: p.kind for p in launch.arguments}
        launch.check_names(name for name in order if name in known)
        kinds: dict[str, ParamKind] = {name: known.get(name, "pointer") for name in order}
        if launch.workspace_bytes:
            kinds[WORKSPACE] = "pointer"
        layout = struct_layout(list(kinds.values()))
        self._memory = ctypes.create_string_buffer(layout.size + TENSOR_MAP_ALIGN)
        base = -ctypes.addressof(self._memory) % TENSOR_MAP_ALIGN
        self.set = partial(struct.Struct(layout.format).pack_into, self._memory, base)
        start = ctypes.addressof(self._memory) + base
        self.places = [start + offset for offset in layout.offsets]
        at = {name: start + offset for name, offset in zip(kinds, layout.offsets)}
        self.addresses = (ctypes.c_void_p * len(launch.params))(*(at[p.name] for p in launch.params))
