"""Recipes: how a pair of low-bit codes becomes a pair of numbers, derived from the format and the target type.

A thread has its codes as fields of 32-bit words, one word per plane, the two codes of a pair 16 bits apart
(`dialect.packing`). Everything works on both at once:

*Integers* are put into the low bits of a mantissa under a fixed ("magic") exponent, which makes the number
2^j + u, and 2^j is subtracted: exact, and signed codes, stored in offset binary, cost nothing more. Where the field
may sit in the mantissa is free, so it is chosen to spare the shift. Eight bits do not fit bf16's seven: two
nibbles, each under its own exponent, are added.

Where the subtraction is too dear, for the narrowest formats, it is left out (`biased`): the numbers are too large by a
bias that depends on the register alone, and the accumulator starts from minus the sum of bias * x.

*Floats*: sign, and exponent with mantissa, move to their places; the bias difference is a power of two that the
kernel folds into its scale (f16), or one multiplication (bf16, f32, whose range is too wide to leave it for later).
Subnormal codes come out right by themselves: the target's subnormals have the same spacing. NaN and inf, where the
format has them, are the codes that carry into the next bit when one unit is added.

*Tables* are looked up (`passes.lower_table`): both codes at once up to four bits, one at a time above.

Method: FP6-LLM (Xia et al., 2024), section 5.2, and Kim et al., "Who Says Elephants Can't Run" (2022), for the magic
exponents; here derived for every format and type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dialect.dtypes import DType
from dialect.packing import plane_bits


@dataclass(frozen=True)
class Real:
    """A floating-point type to decode into, as IEEE lays it out."""

    name: str
    bits: int
    mantissa: int
    bias: int
    max: float


F16 = Real("f16", 16, 10, 15, 65504.0)
BF16 = Real("bf16", 16, 7, 127, 3.3895313892515355e38)
F32 = Real("f32", 32, 23, 127, 3.4028234663852886e38)
REALS = {r.name: r for r in (F16, BF16, F32)}


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
    """Bits of a word, `width` wide, to be moved right by `shift` (left if negative) and kept at `low`."""

    plane: int
    shift: int
    low: int
    width: int

    @property
    def mask(self) -> int:
        return ((1 << self.width) - 1) << self.low


def place(t: DType, shifts: tuple[int, ...], first: int, count: int, low: int) -> tuple[Field, ...]:
    """Where bits first .. first+count-1 of the code come from so that they land at `low` and up.

    shifts[i] is the place of plane i's field in its word.
    """
    fields: list[Field] = []
    start = 0
    for plane, width in enumerate(plane_bits(t.bits)):
        a, b = max(first, start), min(first + count, start + width)
        if a < b:
            target = low + a - first
            fields.append(Field(plane, shifts[plane] + a - start - target, target, b - a))
        start += width
    return tuple(fields)


_SHARED_SHIFTS = (8,)  # that serve several registers of a word
_SHARED_SHIFTS_BIASED = (6, -4)  # the same where fields go to the upper half of the mantissa
_LARGEST_BIAS = 128.0  # costs 7 of f32's 24 bits


def _cost(fields: tuple[Field, ...], shared: tuple[int, ...]) -> int:
    """Shifts needed: none is best, and one shared with other registers is nearly none."""
    return sum(0 if f.shift == 0 else 1 if f.shift in shared else 2 for f in fields)


@dataclass(frozen=True)
class Magic:
    """Fields or-ed under the exponent bits `bits`: a number 2^.. = `offset` plus the fields times `scale`."""

    fields: tuple[Field, ...]
    bits: int
    offset: float


def magic(t: DType, real: Real, shifts: tuple[int, ...], first: int, count: int, biased: bool = False) -> Magic:
    """Bits first .. first+count-1 of the code, u of weight 2^first each, as the number offset + u * 2^first.

    biased: keep the offset small, as it will not be subtracted right away.
    """
    lows = range(real.mantissa - count + 1)
    if biased:
        lows = [low for low in lows if 2.0 ** (real.mantissa - low) <= _LARGEST_BIAS]
    shared = _SHARED_SHIFTS_BIASED if biased else _SHARED_SHIFTS
    # Few shifts first; then a high place, where 2^j is small.
    low = min(lows, key=lambda low: (_cost(place(t, shifts, first, count, low), shared), -low))
    exponent_ = real.mantissa - low + first
    return Magic(place(t, shifts, first, count, low), (real.bias + exponent_) << real.mantissa, 2.0**exponent_)


def zero_code(t: DType) -> float:
    """The code of 0 in memory: signed codes are in offset binary."""
    return float(1 << (t.bits - 1)) if t.kind == "int" else 0.0


def can_be_biased(t: DType, element: str) -> bool:
    """Whether a format can be decoded without the subtraction: integers with room above them in the mantissa."""
    real = REALS[element]
    return t.kind in ("uint", "int") and real is not F32 and 2.0**t.bits <= _LARGEST_BIAS and t.bits < real.mantissa


def bias(t: DType, real: Real, shifts: tuple[int, ...]) -> float:
    """What biased decoding adds to a number whose fields are at `shifts`."""
    return magic(t, real, shifts, 0, t.bits, biased=True).offset + zero_code(t)


@dataclass(frozen=True)
class FloatPlaces:
    """Where a float code's parts go, the factor that makes up for the bias, and the carry that marks NaN and inf."""

    sign: tuple[Field, ...]
    rest: tuple[Field, ...]
    factor: float
    unit: int  # added to `rest` to make special codes carry; 0 where there are none
    carry: int  # the bit they carry into


def float_places(t: DType, real: Real, shifts: tuple[int, ...]) -> FloatPlaces:
    """Sign to the top bit, exponent and mantissa to the mantissa's top and above."""
    low = real.mantissa - t.mantissa
    sign = place(t, shifts, t.bits - 1, 1, real.bits - 1)
    rest = place(t, shifts, 0, t.bits - 1, low)
    factor = 1.0 if real is F16 else 2.0 ** (real.bias - t.bias)
    # f8e4m3: only S.1111.111 is NaN, so one unit in the last place carries; f8e5m2: every code with all exponent
    # bits set is inf or NaN, so one unit of the exponent does. In f16, e5m2 is f16's own upper byte.
    special = t.has_nan and not (t.has_inf and real is F16)
    unit = (1 << real.mantissa if t.has_inf else 1 << low) if special else 0
    return FloatPlaces(sign, rest, factor, unit, low + t.bits - 1)
