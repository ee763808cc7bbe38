"""Codes as bytes and activations as limbs: how mma.m16n8k32 of 8-bit integers multiplies a packed weight by one token.

*Codes.* In a word of `dialect.formats.packing` with 1, 2 or 4 bits to a code, codes 8 bits apart belong to one row: one
mask takes four of them, a register of an A fragment of bytes. Two such registers, for rows g and g + 8 of lane 4 g + q,
are a *half* of a fragment, with 16 columns. Nothing is shifted: row g has its codes times 2^shift, row g + 8 another
2^bits times as large.

*Limbs.* x is a fixed-point number, the same unit for a *piece* of 128 columns: X = round(x / unit), below 2^30, as
four signed limbs to the base of 256, each a column of B. A code that is 2^shift too large meets round(x / unit /
2^shift) instead, so that all products of a row come in the same unit. In shared memory, word [limb, q, half] has the
limbs that lane q needs for a half. The sums of a piece's limbs are below 2^22, so that they can be had as f32
without a conversion.

The largest of a piece is 2^29 to 2^30 units. With the coarsest shift, 6, x is wrong by 2^5 units at most, which is
2^-24 of that largest: what f32 loses when it adds the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lowbit.dialect.formats.dtypes import DType

PIECE = 128  # columns
HALVES = 8  # of a piece
LIMBS = 4
ROW = HALVES + 4  # words from lane to lane in shared memory: loads of 16 bytes meet all banks
TOP = 29  # the largest X of a piece is from 2^TOP up, below 2^(TOP + 1): rounding and carries stay within 32 bits
BITS = (1, 2, 4)  # of codes that are side by side in bytes


def takes(format: DType) -> bool:
    """Whether codes of a format can be multiplied as bytes."""
    return format.kind in ("uint", "int") and format.bits in BITS


@dataclass(frozen=True)
class Half:
    """The codes (word >> shift) & mask are of row g, those at shift + bits of row g + 8, in columns column + 2 q + (0,
    32 / bits, 1, 32 / bits + 1) from the lowest byte up. `word` counts in a lane's words of a piece."""

    word: int
    shift: int
    column: int


@lru_cache(maxsize=None)
def halves(bits: int) -> tuple[Half, ...]:
    """Returns the halves of a piece, for codes of 1, 2 or 4 bits."""
    per_word = 4 // bits
    places = (divmod(number, per_word) for number in range(HALVES))
    return tuple(Half(word, 2 * bits * within, 64 // bits * word + 8 * within) for word, within in places)
