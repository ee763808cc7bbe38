"""Tensor maps: what cp.async.bulk.tensor has to know of a tensor in device memory and of the boxes that it copies.

    TensorMap(x, "f16", shape=(m, k), box=(64, 64), swizzle=128)

A kernel takes one as a parameter `.param .align 64 .b8 name[128]`. In place of the address stands what holds the
tensor: a torch tensor for `lowbit.load`, a NumPy array for the emulator; a number is for a GPU alone. Dims are in
NumPy's order: the last is contiguous; the coordinates in PTX come in the opposite one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.fields import shown
from lowbit.dialect.signature import TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES

#: Bytes of an encoded tensor map, and its alignment.
SIZE, ALIGN = TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN
#: Bytes of an element, and the number of the type in CUtensorMapDataType.
ELEMENTS = {
    "u8": (1, 0),
    "u16": (2, 1),
    "u32": (4, 2),
    "s32": (4, 3),
    "u64": (8, 4),
    "s64": (8, 5),
    "f16": (2, 6),
    "f32": (4, 7),
    "f64": (8, 8),
    "bf16": (2, 9),
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CUtensorMapSwizzle
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes -> CUtensorMapL2promotion
_MAX_RANK, _MAX_BOX, _CHUNK = 5, 256, 16


@dataclass(frozen=True, eq=False)
class TensorMap:
    """address         of the tensor in device memory; or the tensor, or (for the emulator) the array, that holds it
    element         one of ELEMENTS
    shape, box      of the tensor, and of what one instruction copies; beyond the tensor it copies zeros
    strides_bytes   of all dims but the last, whose elements are neighbours; by default there are no gaps
    swizzle         0, 32, 64 or 128: rows of so many bytes in shared memory whose 16-byte chunks are exchanged, by
                    exclusive-or of the address bits from 4 on with those from 7 on
    l2_promotion    0, 64, 128 or 256: bytes that L2 fetches at least
    """

    address: Any
    element: str
    shape: tuple[int, ...]
    box: tuple[int, ...]
    strides_bytes: tuple[int, ...] | None = None
    swizzle: int = 0
    l2_promotion: int = 128

    def __post_init__(self) -> None:
        for name, allowed in (("element", ELEMENTS), ("swizzle", _SWIZZLES), ("l2_promotion", _PROMOTIONS)):
            if getattr(self, name) not in list(allowed):  # a list takes what can't be hashed, too
                given = shown(getattr(self, name))
                raise SpecError(f"{name}={given} is not one of {', '.join(map(str, allowed))}")
        self._check_sizes()
        self._check_row()
        self._check_strides()
        self._check_address()

    def _check_sizes(self) -> None:
        for name in ("shape", "box", "strides_bytes"):
            given = getattr(self, name)
            if not (_are_integers(given) or (given is None and name == "strides_bytes")):
                raise SpecError(f"{name}={shown(given)} must be a tuple of integers")
        shape, box, rank = shown(self.shape), shown(self.box), len(self.shape)
        if not 1 <= rank <= _MAX_RANK or len(self.box) != rank:
            raise SpecError(f"shape={shape} and box={box} must have the same 1 to {_MAX_RANK} dims")
        if any(not 1 <= n <= 2**32 for n in self.shape):
            raise SpecError(f"shape={shape}: every dim must be 1 to 2^32")
        if any(not 1 <= n <= _MAX_BOX for n in self.box):
            raise SpecError(f"box={box}: every dim must be 1 to {_MAX_BOX}; copy several boxes")

    def _check_row(self) -> None:
        row, what = self.row_bytes, f"box={self.box} of {self.element} has rows of {self.row_bytes} bytes"
        if row % _CHUNK:
            raise SpecError(f"{what}: they must be a multiple of {_CHUNK}; make the last dim longer")
        if self.swizzle and row != self.swizzle:
            fits = f"make the last dim {self.swizzle // self.itemsize}"
            raise SpecError(f"{what}, with swizzle={self.swizzle}: {fits}, or take the swizzle of the row's length")

    def _check_strides(self) -> None:
        strides = self.strides
        if len(strides) != len(self.shape):
            raise SpecError(f"strides_bytes={shown(self.strides_bytes)} must have one stride for each dim but the last")
        for stride in strides[:-1]:
            if stride % _CHUNK or not 0 < stride < 2**40:
                what = f"a stride of {shown(stride)} bytes"
                raise SpecError(f"{what} must be a multiple of {_CHUNK} below 2^40; pad the rows")

    def _check_address(self) -> None:
        memory = self.address
        if not (isinstance(memory, int) or hasattr(memory, "nbytes")):
            raise SpecError(f"address={shown(memory)} must be a tensor, an array, or the address of a tensor")
        address = self._number()
        if address is not None and (address % _CHUNK or not 0 < address < 2**64):
            what = f"{address:#x}" if abs(address) < 2**64 else shown(address)
            raise SpecError(f"address={what} must be a multiple of {_CHUNK} above 0 and below 2^64; copy the tensor")
        if not isinstance(memory, int) and self.extent > memory.nbytes:
            raise SpecError(f"shape={self.shape} needs {self.extent} bytes, and the array has {memory.nbytes}")

    def _number(self) -> int | None:
        """The address as a number; None for a NumPy array, which no GPU reads."""
        return self.address if isinstance(self.address, int) else getattr(self.address, "data_ptr", lambda: None)()

    @property
    def itemsize(self) -> int:
        return ELEMENTS[self.element][0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the box."""
        return self.box[-1] * self.itemsize

    @property
    def box_bytes(self) -> int:
        """Bytes that one instruction copies and counts at its mbarrier, zeros beyond the tensor included."""
        return prod(self.box) * self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of all dims, in bytes."""
        if self.strides_bytes is not None:
            return (*self.strides_bytes, self.itemsize)
        return tuple(prod(self.shape[dim + 1 :]) * self.itemsize for dim in range(len(self.shape)))

    @property
    def extent(self) -> int:
        """Bytes from the first of the tensor to its end."""
        return sum((n - 1) * stride for n, stride in zip(self.shape, self.strides)) + self.itemsize

    def to_dict(self) -> dict[str, Any]:
        """Returns what the map says of boxes in terms of JSON, in the numbers of cuTensorMapEncodeTiled; the box from
        the innermost dim on."""
        return {
            "type": ELEMENTS[self.element][1],
            "bytes": self.itemsize,
            "box": list(reversed(self.box)),
            "swizzle": _SWIZZLES[self.swizzle],
            "promotion": _PROMOTIONS[self.l2_promotion],
        }

    def encode(self) -> bytes:
        """The 128 bytes for a kernel's parameter, by the driver (cuTensorMapEncodeTiled).

        Raises TargetError if there is no driver, or it refuses the tensor.
        """
        address = self._number()
        if address is None:
            raise SpecError("a tensor map for a GPU takes a tensor or its address, tensor.data_ptr(), not an array")
        from lowbit.pylib.runtime.driver import describe, tensor_map_function

        memory = ctypes.create_string_buffer(SIZE + ALIGN)
        start = ctypes.addressof(memory) + -ctypes.addressof(memory) % ALIGN
        wide, narrow = ctypes.c_uint64, ctypes.c_uint32
        code = tensor_map_function()(
            start,
            ELEMENTS[self.element][1],
            len(self.shape),
            address,
            _sizes(wide, self.shape),
            _sizes(wide, self.strides[:-1]),
            _sizes(narrow, self.box),
            _sizes(narrow, (1,) * len(self.shape)),
            0,  # nothing is interleaved
            _SWIZZLES[self.swizzle],
            _PROMOTIONS[self.l2_promotion],
            0,  # what lies outside is zero
        )
        if code:
            raise TargetError(f"cuTensorMapEncodeTiled: {describe(code)}")
        return ctypes.string_at(start, SIZE)


def _are_integers(given: object) -> bool:
    """Tells whether this is a tuple (or list) of integers, NumPy's included."""
    return isinstance(given, tuple | list) and all(hasattr(n, "__index__") for n in given)


def _sizes(kind: Any, values: Sequence[int]) -> Any:
    """An array as the driver takes it: from the innermost dim on."""
    return (kind * len(values))(*reversed(values))
