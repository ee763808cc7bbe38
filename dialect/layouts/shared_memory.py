"""Shared memory: its banks, and swizzles that spread the columns of a tile over them.

Shared memory has 32 banks of 4 bytes. Lanes that touch different words of one bank are served one after the other (CUDA
programming guide, "Shared Memory"), so the columns of a row-major tile must be spread over the banks: by padding every
row, or by a swizzle, which needs no room and keeps 16-byte vectors whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.errors import LayoutError

BANKS = 32
BANK_BYTES = 4


@dataclass(frozen=True)
class Swizzle:
    """The permutation of offsets that XORs `bits` bits, `shift` places up, into the bits from `base` on.

    offset ^ ((offset >> shift) & mask) with mask = (2^bits - 1) << base: CUTLASS's Swizzle<bits, base, shift>. It is
    its own inverse, keeps runs of 2^base offsets and stays inside blocks of 2^(base + bits). The unit of the offsets,
    bytes or elements, is the caller's.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise LayoutError(f"{self} needs bits >= 0, base >= 0 and shift >= bits, or it would not be a bijection")

    @property
    def mask(self) -> int:
        """The bits of an offset that change."""
        return ((1 << self.bits) - 1) << self.base

    def apply(self, offset: int) -> int:
        """Returns where an offset goes."""
        return offset ^ ((offset >> self.shift) & self.mask)
