"""Codes as bytes that tensor cores multiply by activations of 8 bits. No MLIR is needed here.

    "f8e4m3"   bytes are numbers of f8e4m3. An unsigned code u below 16 is the number u * 2^-9 as it stands: f8e4m3's
               subnormals and its first exponent are one line. The sign, exponent and mantissa of a float move to the
               places of f8e4m3's, which leaves the power of two between the two biases. Both powers are for the
               scale (`byte_exponent`).
    "i8"       bytes are integers: unsigned ones are the codes as they are stored. Signed ones without zeros have their
               code at the top of the byte, whose highest bit is turned: the number is the value times 2^(8 - bits), in
               two's complement, and takes no instruction more (`has_signs`). Activations are signed.

Signed codes are in offset binary. Where bytes are these, they are too large by `raw_codes.zero_code`, which sums of x
correct, as they subtract zeros.

A register of mma.m16n8k32 has four codes of a row, where the packed weight (`dialect.formats.packing`) has two codes in
each of the two registers for this row of a 16 x 16 block. Byte `4 t + j` of 16 columns is therefore column
`column_of(4 t + j)`: 2t, 2t + 8, 2t + 1, 2t + 9. Activations are written in this order, which is the same for all
formats, so that any number of matmuls can share them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.dtypes import DType, all_names, dtype
from lowbit.dialect.formats.packing import BLOCK_K, Piece, run_of

Compute = Literal["f8e4m3", "i8"]
COMPUTE: tuple[Compute, ...] = ("f8e4m3", "i8")

SUM_COLUMNS = 32  # of x that have a sum: the K of an mma of bytes, so groups are multiples of it
PROMOTED = 128  # columns after which products of f8e4m3 are added to sums in f32
MOST_EXACT = 512  # columns of u8 * s8, less zeros of 8 bits times sums of x, of which f32 holds every number on the way
MOST_UNFOLDED = 128  # tokens up to which codes are multiplied where they can be, whatever `MatmulSpec.fold_scales` says
MOST_COLUMNS = 65536  # sums of u8 * s8 over more would not fit into 32 bits

ROUNDER = 1536.0
"""What is added to a number of f16 from -128 to 127 to round it: f16 numbers from 1024 to 2048 are integers, and the
lowest byte of the sum is the nearest integer in two's complement."""

LARGEST: dict[Compute, float] = {"f8e4m3": 448.0, "i8": 127.0}
"""The magnitude that the largest number of a row of x is quantized to."""
LEAST_PEAK = 2.0**-100  # what counts as the largest |x| of a row of less: its scale has a reciprocal in f32

_EXPONENT, _MANTISSA, _BIAS = 4, 3, 7  # of f8e4m3
_EXACT_BITS = 4  # unsigned codes of so many bits are numbers of f8e4m3
_HALVES = 0x00010001
_BYTE = 8  # bits
_FOLD = "fold"  # after the type, on a command line


def fits(t: DType, compute: Compute) -> bool:
    """Tells whether all values of a format are bytes of this type, up to one power of two."""
    if t.kind in ("uint", "int"):
        return compute == "i8" or t.bits <= _EXACT_BITS
    return compute == "f8e4m3" and t.kind == "float" and t.exponent <= _EXPONENT and t.mantissa <= _MANTISSA


def fits_rounds(group: int) -> bool:
    """Tells whether kernels that scale weights first have rounds for groups of so many columns: rounds of 512 to 2048
    that are a multiple of the group, or a part of it."""
    return any(step % group == 0 or group % step == 0 for step in (512, 1024, 1536, 2048))


def products_named(name: str) -> dict[str, Any]:
    """Returns the fields of a spec that a name on a command line stands for: "none", "i8", "f8e4m3", or "i8+fold" and
    "f8e4m3+fold" with `MatmulSpec.fold_scales`."""
    compute, plus, folded = name.partition("+")
    if plus and folded != _FOLD:
        names = ", ".join((*COMPUTE, *(f"{each}+{_FOLD}" for each in COMPUTE)))
        raise SpecError(f"{name!r} must be one of none, {names}")
    return {"compute": None if compute == "none" else compute, "fold_scales": bool(plus)}


def products_name(compute: str | None, fold_scales: bool) -> str:
    """The inverse of `products_named`."""
    return f"{compute or 'none'}{f'+{_FOLD}' if fold_scales else ''}"


@lru_cache(maxsize=None)
def fitting_names(compute: Compute) -> tuple[str, ...]:
    """Returns the formats that fit a type, for errors and documentation."""
    return tuple(name for name in all_names() if fits(dtype(name), compute))


def has_signs(t: DType, compute: Compute, zeros: str) -> bool:
    """Tells whether codes become signed integers: those of signed formats from which no zeros are subtracted. Less
    their zeros, codes of both kinds are the differences of what is stored."""
    return compute == "i8" and t.kind == "int" and zeros == "none"


def sums_correct(t: DType, compute: Compute, zeros: str) -> bool:
    """Tells whether sums of x make up for what bytes are too large by, where these are codes as they are stored."""
    return zeros != "none" or (t.kind == "int" and not has_signs(t, compute, zeros))


def byte_exponent(t: DType, compute: Compute, zeros: str = "none") -> int:
    """Returns the e for which bytes are value * 2^-e. zeros: of the weight, as in `MatmulSpec`."""
    if compute == "i8":
        return t.bits - _BYTE if has_signs(t, compute, zeros) else 0
    return _BIAS - t.bias if t.kind == "float" else _BIAS - 1 + _MANTISSA


def reciprocal_of_largest(compute: Compute) -> float:
    """Returns the f32 by which the largest |x| of a row is multiplied to give the scale of the row."""
    return float(np.float32(1.0 / LARGEST[compute]))


def column_of(byte: int) -> int:
    """Returns the column that a byte of 16 belongs to."""
    lane, within = divmod(byte, 4)
    return 2 * lane + 8 * (within % 2) + within // 2


def byte_order() -> NDArray[np.int64]:
    """Returns the column of each byte of 16."""
    return np.array([column_of(byte) for byte in range(BLOCK_K)])


def _fields(t: DType, compute: Compute, signed: bool) -> Iterator[tuple[int, int, int]]:
    """Yields the parts of a code: lowest bit, number of bits, and the lowest bit that they have in the byte."""
    if compute == "i8" or t.kind != "float":
        yield 0, t.bits, _BYTE - t.bits if signed else 0
    else:
        yield 0, t.bits - 1, _MANTISSA - t.mantissa
        yield t.bits - 1, 1, 7


def moves(
    t: DType, compute: Compute, registers: Sequence[int], signed: bool = False
) -> list[tuple[int, int, int, int]]:
    """Returns how the four bytes of a row are made of the words of its two registers (numbers in their runs): a list of
    (register 0 or 1, word of its run, right shift, mask), of which the masked words are joined.

    The codes of register 0 become bytes 0 and 2, those of register 1 bytes 1 and 3. What needs the same shift of the
    same word is one move; whether two registers have the same words, the caller knows: they do if they are of one run.

    signed: whether integers are to be at the top of their bytes, whose highest bits are left to turn (`has_signs`)
    """
    masks: dict[tuple[int, int, int], int] = defaultdict(int)
    for which, number in enumerate(registers):
        for piece in run_of(t.bits)[number]:
            for low, bits, target in _fields(t, compute, signed):
                first, width = _overlap(piece, low, bits)
                if width > 0:
                    place = 8 * which + target + first - low
                    shift = piece.shift + first - piece.low - place
                    masks[which, piece.word, shift] |= ((1 << width) - 1 << place) * _HALVES
    return [(which, word, shift, mask) for (which, word, shift), mask in masks.items()]


def _overlap(piece: Piece, low: int, bits: int) -> tuple[int, int]:
    """Returns the first bit of a code that is in a piece and in a field from `low` on, and how many are."""
    first = max(piece.low, low)
    return first, min(piece.low + piece.bits, low + bits) - first
