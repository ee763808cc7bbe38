"""Recipes: how a pair of low-bit codes becomes a pair of numbers, derived from the format and the target type.

A thread has its codes in registers of a run, pieces of 32-bit words with the two codes of a pair 16 bits apart
(`dialect.formats.packing`). Everything works on both at once:

*Integers* are put into the low bits of a mantissa under a fixed ("magic") exponent, which makes the number
2^j + u, and 2^j is subtracted: exact, and signed codes, stored in offset binary, cost nothing more. Where a code may
sit in the mantissa is free (another place, another exponent), so many need no shift, and those that do share it
with their neighbours in the word: `aims` finds the fewest shifts for a run. Eight bits do not fit bf16's seven: two
nibbles, each under its own exponent, are added.

Where the subtraction is too dear, for the narrowest formats, it is left out (`deferred_offset`): the numbers are too
large by a bias that depends on the register alone, and the accumulator starts from minus the sum of bias * x. In f16
the magic exponent can be left out as well (`raw`): a code is a subnormal then, u * 2^-24 or more by where it sits, and
tensor cores take that as any number. Codes may sit in two places, one for the first eight rows of a block of 16 and one
for the others, since scales are per row; what is to be subtracted from signed codes, and zero points, go by sums of x.

*Floats*: sign, and exponent with mantissa, move to their places; the bias difference is a power of two that the
kernel folds into its scale (f16), or one multiplication (bf16, f32, whose range is too wide to leave it for later).
Subnormal codes come out right by themselves: the target's subnormals have the same spacing. NaN and inf, where the
format has them, are the codes that carry into the next bit when one unit is added.

*Tables* are looked up (`passes.lowering.tables`): both codes at once up to four bits, one at a time above.

Method: FP6-LLM (Xia et al., 2024), section 5.2, and Kim et al., "Who Says Elephants Can't Run" (2022), for the magic
exponents; here derived for every format and type.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import run_of


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


@lru_cache(maxsize=None)
def aims(bits: int, count: int, least: int, most: int) -> dict[tuple[int, int], int]:
    """Where codes go that may go anywhere: (register, first bit) -> lowest bit, for every register of a run and every
    part of `count` bits of its code, from `least` to `most`, with as few shifts of words as there can be.

    A code in several pieces forces a shift upon the word of each piece, for every place that it may have. Then a word
    needs more shifts only for the codes that neither it as it is nor a forced shift brings to their places.
    """
    run = run_of(bits)
    parts = [(r, first) for r in range(len(run)) for first in range(0, bits, count)]
    split = [part for part in parts if len(run[part[0]]) > 1]
    single = [part for part in parts if part not in split]
    plans: list[tuple[int, dict[int, set[int]], dict[tuple[int, int], int]]] = []
    for lows in itertools.product(range(most, least - 1, -1), repeat=len(split)):
        found = dict(zip(split, lows))
        shifts: dict[int, set[int]] = {piece.word: {0} for pieces in run for piece in pieces}
        for (register, first), low in found.items():
            for piece in run[register]:
                shifts[piece.word].add(piece.shift - (low + piece.low - first))
        for register, first in single:
            (piece,) = run[register]
            at = piece.shift + first
            if not any(least <= at - shift <= most for shift in shifts[piece.word]):
                # The largest serves the next code, too, and one by whole codes puts them where others are in place:
                # fewer exponents, each of which takes a register.
                by_codes = (at - least) // count * count
                shifts[piece.word].add(by_codes if by_codes >= at - most else at - least)
        plans.append((sum(map(len, shifts.values())), shifts, found))
    _, shifts, found = min(plans, key=lambda plan: plan[0])
    for register, first in single:
        (piece,) = run[register]
        places = (piece.shift + first - shift for shift in sorted(shifts[piece.word], key=abs))
        found[register, first] = next(low for low in places if least <= low <= most)
    return found


OFFSET_BITS = 2  # formats up to which a subtraction per pair would be the bound (H200, 2026-11)
_LARGEST_OFFSET = 128.0  # costs 7 of f32's 24 bits


@dataclass(frozen=True)
class Magic:
    """Fields or-ed under the exponent bits `bits`: a number 2^.. = `offset` plus the fields times `scale`."""

    fields: tuple[Field, ...]
    bits: int
    offset: float


def magic(t: DType, real: Real, register: int, first: int, count: int, deferred: bool = False) -> Magic:
    """Bits first .. first+count-1 of the code, u of weight 2^first each, as the number offset + u * 2^first.

    deferred: keep the offset small, as it will not be subtracted right away.
    """
    least = max(0, real.mantissa - int(math.log2(_LARGEST_OFFSET))) if deferred else 0
    low = aims(t.bits, count, least, real.mantissa - count)[register, first]
    exponent_ = real.mantissa - low + first
    fields = place(t, register, first, count, low)
    return Magic(fields, (real.bias + exponent_) << real.mantissa, 2.0**exponent_)


def zero_code(t: DType) -> float:
    """The code of 0 in memory: signed codes are in offset binary."""
    return float(1 << (t.bits - 1)) if t.kind == "int" else 0.0


def can_defer_offset(t: DType, element: str) -> bool:
    """Whether a format can be decoded without the subtraction: integers with room above them in the mantissa."""
    real = REALS[element]
    return t.kind in ("uint", "int") and real is not F32 and 2.0**t.bits <= _LARGEST_OFFSET and t.bits < real.mantissa


def deferred_offset(t: DType, real: Real, register: int) -> float:
    """Returns what decoding with a deferred offset adds to the numbers of a register of a run."""
    return magic(t, real, register, 0, t.bits, deferred=True).offset + zero_code(t)


def can_be_raw(t: DType, element: str) -> bool:
    """Whether integers can be left in the mantissa's bits as they are: f16, whose tensor cores take subnormals."""
    return t.kind in ("uint", "int") and element == "f16" and t.bits < F16.mantissa


@lru_cache(maxsize=None)
def raw_lows(bits: int) -> tuple[int, int]:
    """The lowest bit of codes that stay subnormals of f16, in even registers of a run (the first eight rows of a
    block of 16) and in odd ones: such that as few shifts are needed as can be."""
    run = run_of(bits)

    def shifts(lows: tuple[int, int]) -> int:
        moved = {
            (piece.word, piece.shift - lows[register % 2] - piece.low)
            for register, pieces in enumerate(run)
            for piece in pieces
        }
        return len({(word, shift) for word, shift in moved if shift})

    places = range(F16.mantissa - bits + 1)
    return min(itertools.product(places, places), key=shifts)


def raw_exponents(t: DType) -> tuple[int, int]:
    """The e for which raw codes are code * 2^-e, in the first eight rows of a block of 16 and in the others."""
    least = F16.bias - 1 + F16.mantissa  # f16's smallest number is 2^-24
    even, odd = raw_lows(t.bits)
    return least - even, least - odd


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
