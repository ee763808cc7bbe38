"""The element types of a weight: their names, their bits, and what every code means.

    u1..u8          unsigned integers
    i1..i8          two's complement integers (i1 is {0, -1})
    f<b>e<x>m<y>    sign, x >= 1 exponent bits, y mantissa bits, 1+x+y = b from 3 to 8; bias 2^(x-1)-1, with
                    subnormals, without inf or NaN -- but for f8e4m3 (NaN at S.1111.111) and f8e5m2 (IEEE
                    inf and NaN), which are the OCP 8-bit types
    nf4, fp4_bnb    the 16-entry tables of QLoRA (Dettmers 2023) and of bitsandbytes' fp4
    lut<b>          any table of 2^b values, b from 1 to 8

`DType.values()` *is* the definition; every path of the compiler is checked against it, code by code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowbit.dialect.errors import SpecError

MOST = 2.0**127  # of a table: fits bf16 and f32
Kind = Literal["uint", "int", "float", "table"]

# QLoRA, appendix E: quantiles of N(0, 1), asymmetric around an exact zero, scaled to [-1, 1].
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# bitsandbytes' fp4: sign and a 3-bit magnitude, scaled so that the largest is 1.
_FP4_MAGNITUDES = (0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25)
FP4_BNB = _FP4_MAGNITUDES + tuple(-v for v in _FP4_MAGNITUDES)


@dataclass(frozen=True)
class DType:
    """One element type of 1 to 8 bits. Make it with `dtype(name)`."""

    name: str
    bits: int
    kind: Kind
    exponent: int = 0
    mantissa: int = 0
    table: tuple[float, ...] = field(default=(), repr=False)

    @property
    def codes(self) -> int:
        """How many codes there are: 2**bits."""
        return 1 << self.bits

    @property
    def bias(self) -> int:
        """Exponent bias of a float format: 2^(x-1) - 1."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def has_nan(self) -> bool:
        return self.name in ("f8e4m3", "f8e5m2")

    @property
    def has_inf(self) -> bool:
        return self.name == "f8e5m2"

    @property
    def max(self) -> float:
        """The largest finite magnitude."""
        values = self.values()
        return float(np.abs(values[np.isfinite(values)]).max())

    def values(self) -> NDArray[np.float64]:
        """Returns the number that each code means: float64 [2**bits], exact."""
        return _values(self)

    def decode(self, codes: ArrayLike) -> NDArray[np.float64]:
        """Codes (integers in 0..2**bits-1, any shape) to float64 of the same shape."""
        return self.values()[np.asarray(codes)]

    def encode(self, x: ArrayLike) -> NDArray[np.uint8]:
        """The code of the nearest value, ties to the even code, saturating; NaN only where the format has it.

        x: any shape, float. Returns uint8 codes of the same shape.
        """
        x = np.asarray(x, dtype=np.float64)
        if np.isnan(x).any() and not self.has_nan:
            raise SpecError(f"{self.name} has no NaN, but the values to encode contain one; clean them first")
        values = self.values()
        codes = np.flatnonzero(np.isfinite(values))
        # Of codes with equal value (+0 and -0, repeated table entries) the first in code order stands for it.
        codes = codes[np.unique(values[codes], return_index=True)[1]]
        levels = values[codes]
        upper = np.searchsorted(levels, x).clip(1, len(levels) - 1) if len(levels) > 1 else np.zeros(x.shape, int)
        lower = np.maximum(upper - 1, 0)
        with np.errstate(invalid="ignore"):
            above, below = levels[upper] - x, x - levels[lower]
        even_lower = codes[lower] % 2 == 0
        pick = np.where((below < above) | ((below == above) & even_lower), lower, upper)
        result = codes[np.where(np.isnan(x), 0, pick)]
        if self.has_nan:
            nan = int(np.flatnonzero(np.isnan(values))[0])
            result = np.where(np.isnan(x), nan, result)
        return result.astype(np.uint8)


@lru_cache(maxsize=None)
def _values(t: DType) -> NDArray[np.float64]:
    code = np.arange(t.codes)
    if t.kind == "uint":
        values = code.astype(np.float64)
    elif t.kind == "int":
        values = np.where(code >= t.codes // 2, code - t.codes, code).astype(np.float64)
    elif t.kind == "table":
        values = np.array(t.table, dtype=np.float64)
    else:
        sign = np.where(code >> (t.bits - 1), -1.0, 1.0)
        e = (code >> t.mantissa) & ((1 << t.exponent) - 1)
        m = (code & ((1 << t.mantissa) - 1)) / (1 << t.mantissa)
        values = sign * np.where(e == 0, np.ldexp(m, 1 - t.bias), np.ldexp(1 + m, e - t.bias))
        top = e == (1 << t.exponent) - 1
        if t.has_inf:
            values = np.where(top, np.where(m == 0, sign * np.inf, np.nan), values)
        elif t.has_nan:
            values = np.where((code & 0x7F) == 0x7F, np.nan, values)
    values.setflags(write=False)
    return values


def _allowed() -> str:
    return "u1..u8, i1..i8, f<bits>e<x>m<y> with 1+x+y = bits from 3 to 8 and x >= 1, nf4, fp4_bnb, lut1..lut8"


@lru_cache(maxsize=None)
def dtype(name: str, table: tuple[float, ...] | None = None) -> DType:
    """The element type called `name`; `table` gives the 2^b values of a lut<b>.

    Raises SpecError for a name that is none, a float whose bits do not add up, or a table of the wrong length.
    """
    t = _parse(name, table)
    if table is not None and not name.startswith("lut"):
        raise SpecError(f"table= goes with weight='lut<b>' only, not with {name!r}; drop it or use 'lut{t.bits}'")
    return t


def _parse(name: str, table: tuple[float, ...] | None) -> DType:
    if name == "nf4":
        return DType(name, 4, "table", table=NF4)
    if name == "fp4_bnb":
        return DType(name, 4, "table", table=FP4_BNB)
    if m := re.fullmatch(r"lut([1-8])", name):
        bits = int(m[1])
        if table is None or len(table) != 1 << bits:
            given = "none" if table is None else f"{len(table)} values"
            raise SpecError(f"{name} needs table= with {1 << bits} values; got {given}")
        if wrong := [v for v in table if not abs(v) <= MOST]:
            raise SpecError(f"the table of {name} must be finite and within ±2^127; got {wrong[0]:g}; scale it down")
        return DType(name, bits, "table", table=tuple(float(v) for v in table))
    if m := re.fullmatch(r"([ui])([1-8])", name):
        return DType(name, int(m[2]), "uint" if m[1] == "u" else "int")
    if m := re.fullmatch(r"f([3-8])e(\d)m(\d)", name):
        bits, e, f = int(m[1]), int(m[2]), int(m[3])
        if e < 1 or 1 + e + f != bits:
            near = ", ".join(f"f{bits}e{x}m{bits - 1 - x}" for x in range(1, bits))
            rule = f"sign, exponent and mantissa must make {bits} bits (1+{e}+{f} = {1 + e + f})"
            raise SpecError(f"{name}: {rule}; try {near}")
        return DType(name, bits, "float", e, f)
    raise SpecError(f"unknown weight format {name!r}; allowed: {_allowed()}")


def all_names() -> tuple[str, ...]:
    """Every format with a fixed meaning (all but lut<b>), in catalogue order."""
    ints = [f"{s}{b}" for s in "ui" for b in range(1, 9)]
    floats = [f"f{b}e{x}m{b - 1 - x}" for b in range(3, 9) for x in range(1, b)]
    return (*ints, *floats, "nf4", "fp4_bnb")
