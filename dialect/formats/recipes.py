"""Recipes: how a pair of low-bit codes becomes a pair of numbers, derived from the format and the target type.

A thread has its codes in registers of a run, pieces of 32-bit words with the two codes of a pair 16 bits apart
(`dialect.formats.packing`). Everything works on both at once:

*Integers* are put into the low bits of a mantissa under a fixed ("magic") exponent, which makes the number
2^j + u, and 2^j is subtracted: exact, and signed codes, stored in offset binary, cost nothing more. Where a code may
sit in the mantissa is free (another place, another exponent), so many need no shift, and those that do share it
with their neighbours in the word: `mantissa_places` finds the fewest shifts for a run. Eight bits do not fit bf16's
seven: two nibbles, each under its own exponent, are added.

Where the subtraction is too dear, for the narrowest formats, it is left out, and so is the magic exponent in f16, where
tensor cores multiply subnormals like any number: `dialect.formats.raw_codes` says what the numbers are then.

*Floats*: sign, and exponent with mantissa, move to their places; the bias difference is a power of two that the
kernel folds into its scale (f16), or one multiplication (bf16, f32, whose range is too wide to leave it for later).
Subnormal codes come out right by themselves: the target's subnormals have the same spacing. NaN and inf, where the
format has them, are the codes that carry into the next bit when one unit is added. Four bits, whose f16 has only zeros
below its upper byte, move to bytes first, four codes at once.

*Tables* are looked up (`passes.lowering.tables`): both codes at once up to four bits, one at a time above.

Method: FP6-LLM (Xia et al., 2024), section 5.2, and Kim et al., "Who Says Elephants Can't Run" (2022), for the magic
exponents; here derived for every format and type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import run_of
from lowbit.dialect.formats.raw_codes import deferred_low, mantissa_places
from lowbit.dialect.formats.reals import F16, REALS, Real


def compute_element(t: DType, act: str) -> str:
    """The type that codes are decoded to for activations of type `act`: act itself, or f32 where f16 is too narrow.

    Then the products run as tf32, whose 10 mantissa bits hold f16 activations and every code exactly.
    """
    if act == "f16" and t.kind == "float" and (t.exponent > 5 or t.max > F16.max):
        return "f32"
    return act


def exponent(t: DType, element: str) -> int:
    """The e for which decoding yields decode(code) * 2^-e; the kernel multiplies its scale by 2^e."""
    real = REALS[element]
    if t.kind == "float" and real is F16:
        return F16.bias - t.bias
    if t.kind == "table" and real is F16:
        top = max(abs(v) for v in t.table)
        # f16 is precise between 2^-14 and 2^15: a table far out is brought to [1, 2).
        return 0 if top == 0 or 2.0**-4 <= top <= 2.0**12 else math.floor(math.log2(top))
    return 0


@dataclass(frozen=True)
class Field:
    """Bits of the word that holds a register's piece `piece`, `width` wide, to be moved right by `shift` (left if
    negative) and kept at `low`."""

    piece: int
    shift: int
    low: int
    width: int

    @property
    def mask(self) -> int:
        return ((1 << self.width) - 1) << self.low


def place(t: DType, register: int, first: int, count: int, low: int) -> tuple[Field, ...]:
    """Where bits first .. first+count-1 of the code of a register of a run come from, to land at `low` and up."""
    fields: list[Field] = []
    for number, piece in enumerate(run_of(t.bits)[register]):
        a, b = max(first, piece.low), min(first + count, piece.low + piece.bits)
        if a < b:
            target = low + a - first
            fields.append(Field(number, piece.shift + a - piece.low - target, target, b - a))
    return tuple(fields)


OFFSET_BITS = 2  # formats up to which a subtraction per pair would be the bound (H200, 2026-11)


@dataclass(frozen=True)
class Magic:
    """Fields or-ed under the exponent bits `bits`: a number 2^.. = `offset` plus the fields times `scale`."""

    fields: tuple[Field, ...]
    bits: int
    offset: float


def magic(t: DType, real: Real, register: int, first: int, count: int) -> Magic:
    """Bits first .. first+count-1 of the code, u of weight 2^first each, as the number offset + u * 2^first."""
    low = mantissa_places(t.bits, count, 0, real.mantissa - count)[register, first]
    return _magic_at(t, real, register, first, count, low)


def deferred_magic(t: DType, real: Real, register: int) -> Magic:
    """The whole code where its offset, which is not subtracted right away, is small."""
    return _magic_at(t, real, register, 0, t.bits, deferred_low(t, real, register))


def _magic_at(t: DType, real: Real, register: int, first: int, count: int, low: int) -> Magic:
    exponent_ = real.mantissa - low + first
    fields = place(t, register, first, count, low)
    return Magic(fields, (real.bias + exponent_) << real.mantissa, 2.0**exponent_)


@dataclass(frozen=True)
class FloatPlaces:
    """Where a float code's parts go, the factor that makes up for the bias, and the carry that marks NaN and inf."""

    sign: tuple[Field, ...]
    rest: tuple[Field, ...]
    factor: float
    unit: int  # added to `rest` to make special codes carry; 0 where there are none
    carry: int  # the bit they carry into


def float_places(t: DType, real: Real, register: int) -> FloatPlaces:
    """Sign to the top bit, exponent and mantissa to the mantissa's top and above."""
    low = real.mantissa - t.mantissa
    sign = place(t, register, t.bits - 1, 1, real.bits - 1)
    rest = place(t, register, 0, t.bits - 1, low)
    factor = 1.0 if real is F16 else 2.0 ** (real.bias - t.bias)
    # f8e4m3: only S.1111.111 is NaN, so one unit in the last place carries; f8e5m2: every code with all exponent
    # bits set is inf or NaN, so one unit of the exponent does. In f16, e5m2 is f16's own upper byte.
    special = t.has_nan and not (t.has_inf and real is F16)
    unit = (1 << real.mantissa if t.has_inf else 1 << low) if special else 0
    return FloatPlaces(sign, rest, factor, unit, low + t.bits - 1)


@dataclass(frozen=True)
class FloatBytes:
    """Four numbers in f16 by their upper bytes: where the parts of a code go in its byte, and the bytes that make up a
    register, the lowest in the lowest digit (4: zeros)."""

    sign: Field
    rest: Field
    selector: int


def has_float_bytes(t: DType, real: Real) -> bool:
    """Whether four codes of a word are moved to bytes at once, rather than two to the halves of a register."""
    return t.kind == "float" and t.bits == 4 and real is F16


def float_bytes(t: DType, register: int) -> FloatBytes:
    """The bytes of registers 0 and 2 of a word are made together, and those of 1 and 3."""
    (sign,) = place(t, register % 2, t.bits - 1, 1, 7)
    (rest,) = place(t, register % 2, 0, t.bits - 1, F16.mantissa - t.mantissa - 8)
    first = register // 2
    return FloatBytes(sign, rest, 0x0404 | first << 4 | (first + 2) << 12)
