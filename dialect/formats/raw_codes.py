"""What decoded integers are when the subtraction that decoding needs is left out.

Decoding puts the code of an integer into the mantissa of a float under a fixed ("magic") exponent, which makes it
2^j + code, and subtracts 2^j (`dialect.formats.recipes`). `lowbit.decode` and `lowbit.decode_pair` can leave that out:

    offset = "subtracted"   the numbers are the codes
    offset = "deferred"     the numbers are too large by `deferred_offset`, which depends on the register of a run
    offset = "raw"          the codes as they are stored, without an exponent: subnormals of f16, code * 2^-e with the
                            two e of `raw_exponents`; signed codes are in offset binary, too large by `zero_code`

Whoever multiplies such numbers by x makes up for the offset with sums of x. A code may sit anywhere in the mantissa, so
the places are chosen to need as few shifts of words as there can be (`mantissa_places`, `raw_lows`).
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import run_of
from lowbit.dialect.formats.reals import F16, F32, REALS, Real

OFFSETS = ("subtracted", "deferred", "raw")
_LARGEST_OFFSET = 128.0  # costs 7 of f32's 24 bits


def zero_code(t: DType) -> float:
    """Returns the code of 0 in memory: signed codes are in offset binary."""
    return float(1 << (t.bits - 1)) if t.kind == "int" else 0.0


# -- codes under a magic exponent


def can_defer_offset(t: DType, element: str) -> bool:
    """Whether a format can be decoded without the subtraction: integers with room above them in the mantissa."""
    real = REALS[element]
    return t.kind in ("uint", "int") and real is not F32 and 2.0**t.bits <= _LARGEST_OFFSET and t.bits < real.mantissa


def deferred_low(t: DType, real: Real, register: int) -> int:
    """Returns the lowest bit of a code whose offset is deferred: high in the mantissa, so that the offset is small."""
    least = max(0, real.mantissa - int(math.log2(_LARGEST_OFFSET)))
    return mantissa_places(t.bits, t.bits, least, real.mantissa - t.bits)[register, 0]


def deferred_offset(t: DType, real: Real, register: int) -> float:
    """Returns what decoding with a deferred offset adds to the numbers of a register of a run."""
    return 2.0 ** (real.mantissa - deferred_low(t, real, register)) + zero_code(t)


@lru_cache(maxsize=None)
def mantissa_places(bits: int, count: int, least: int, most: int) -> dict[tuple[int, int], int]:
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


# -- codes without an exponent


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
