"""Tiles in shared memory: strides, padding, XOR swizzles, and what an access to them costs.

Shared memory has 32 banks of 4 bytes. Lanes that touch different words of one bank are served one after the
other (CUDA programming guide, "Shared Memory"), so the columns of a row-major tile must be spread over the
banks: by padding every row, or by a swizzle, which needs no room and keeps 16-byte vectors whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.errors import LayoutError

BANKS = 32
BANK_BYTES = 4

Offset = TypeVar("Offset", int, NDArray[np.int64])


@dataclass(frozen=True)
class Swizzle:
    """The permutation of offsets that XORs `bits` bits, `shift` places up, into the bits from `base` on.

    offset ^ ((offset >> shift) & mask) with mask = (2^bits - 1) << base: CUTLASS's Swizzle<bits, base,
    shift>. An involution that keeps runs of 2^base offsets and stays inside blocks of 2^(base + bits). The
    unit of the offsets, bytes or elements, is the caller's.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise LayoutError(
                f"{self} needs bits >= 0, base >= 0 and shift >= bits, or it would not be a bijection"
            )

    @classmethod
    def for_rows(cls, row: int, item_bytes: int = 1, vector_bytes: int = 16) -> Swizzle:
        """The swizzle of element offsets for rows of `row` elements of `item_bytes`, read in vectors.

        A column of vectors, one per row, then meets as many different banks as there are vectors in a row, up
        to all 128 bytes of banks: 128-byte rows of 16-byte vectors get CUTLASS's Swizzle<3, 4, 3> (in bytes).
        All sizes are powers of two.
        """
        sizes = (row, item_bytes, vector_bytes)
        if any(n < 1 or n & (n - 1) for n in sizes) or not item_bytes <= vector_bytes <= row * item_bytes:
            raise LayoutError(
                f"row={row}, item_bytes={item_bytes}, vector_bytes={vector_bytes} must be powers of two with "
                "item_bytes <= vector_bytes <= row * item_bytes; pad other rows instead"
            )
        row_vectors = (row * item_bytes // vector_bytes).bit_length() - 1
        bank_vectors = max(BANKS * BANK_BYTES // vector_bytes, 1).bit_length() - 1
        base = (vector_bytes // item_bytes).bit_length() - 1
        return cls(min(row_vectors, bank_vectors), base, max(row_vectors, bank_vectors))

    def apply(self, offset: Offset) -> Offset:
        """The swizzled offset of an int, or of every entry of an integer array."""
        return offset ^ ((offset >> self.shift) & (((1 << self.bits) - 1) << self.base))


@dataclass(frozen=True)
class SharedLayout:
    """Where the elements of a tile lie in shared memory: sum of index * stride, then swizzled; in elements.

    Raises LayoutError when two elements would overlap.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: Swizzle | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or any(n < 1 for n in self.shape):
            raise LayoutError(
                f"shape={self.shape} and strides={self.strides} need equal ranks and sizes >= 1"
            )
        extent = 1
        for stride, n in sorted((s, n) for s, n in zip(self.strides, self.shape) if n > 1):
            if stride < extent:
                raise LayoutError(f"shape={self.shape} with strides={self.strides}: elements overlap")
            extent += (n - 1) * stride

    @classmethod
    def row_major(cls, shape: Sequence[int], pad: int = 0, swizzle: Swizzle | None = None) -> SharedLayout:
        """Rows one after the other, with `pad` unused elements after every row of the last dim."""
        pitches = [n + pad if i == 0 else n for i, n in enumerate(reversed(shape))]
        strides = list(accumulate(pitches[:-1], int.__mul__, initial=1)) if shape else []
        return cls(tuple(shape), tuple(reversed(strides)), swizzle)

    @property
    def size(self) -> int:
        """Elements from the first to the last one, with padding, in whole blocks of the swizzle."""
        extent = 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides))
        block = 1 << (self.swizzle.base + self.swizzle.bits) if self.swizzle else 1
        return -(-extent // block) * block

    def offset(self, index: Sequence[int]) -> int:
        """The offset in elements of the element at `index`."""
        if len(index) != len(self.shape) or any(not 0 <= i < n for i, n in zip(index, self.shape)):
            raise LayoutError(f"index {tuple(index)} is outside a tile of shape {self.shape}")
        linear = sum(i * stride for i, stride in zip(index, self.strides))
        return self.swizzle.apply(linear) if self.swizzle else linear

    def table(self) -> NDArray[np.int64]:
        """All offsets: int64 of the tile's shape."""
        grid = np.indices(self.shape, dtype=np.int64)
        linear = np.tensordot(np.array(self.strides, dtype=np.int64), grid, axes=1)
        return self.swizzle.apply(linear) if self.swizzle else linear


def wavefronts(addresses: Sequence[int] | NDArray[np.int64], width: int) -> int:
    """Passes through the banks of one access of `width` = 4, 8 or 16 bytes at each byte address.

    A warp is served whole, in halves or in quarters, so that a pass moves at most 128 bytes; 32 lanes without
    bank conflicts take width / 4 passes. Lanes that read the same word share it.
    """
    if width not in (4, 8, 16) or any(int(a) % width for a in addresses):
        raise LayoutError(f"an access of width={width} must be 4, 8 or 16 bytes at multiples of its width")
    group = BANKS * BANK_BYTES // width
    passes = 0
    for start in range(0, len(addresses), group):
        words = {
            int(a) // BANK_BYTES + i
            for a in addresses[start : start + group]
            for i in range(width // BANK_BYTES)
        }
        banks = [word % BANKS for word in words]
        passes += max(banks.count(bank) for bank in set(banks))
    return passes
