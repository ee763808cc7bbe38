"""The floating-point formats of PTX on float64 arrays: decoding, one rounding, and sums that round only once.

Every value of the formats here is a float64, every product of two f32 (or smaller) values too. A sum need not
be: `sum_to_odd` then gives the float64 whose last bit records that something was lost ("round to odd"), and
rounding that to any format of at most 51 mantissa bits is the correctly rounded exact sum (Boldo and
Melquiond, 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, any_of

#: PTX rounding modifiers (PTX ISA 9.3, 9.7.9): to nearest even, to zero, down, up.
ROUND: dict[str, Callable[[Array], Array]] = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}


@dataclass(frozen=True)
class Float:
    """A binary format with subnormals. `finite` formats (e4m3) have no infinity and one NaN per sign."""

    name: str
    bits: int
    mantissa: int
    emax: int
    finite: bool = False

    @property
    def emin(self) -> int:
        return 1 - self.emax if not self.finite else 2 - self.emax

    @property
    def raw(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.bits // 8}")

    @property
    def max(self) -> float:
        """The largest finite value; e4m3 gives its last mantissa up for NaN."""
        ones = 2.0 - 2.0**-self.mantissa
        return float(np.ldexp(ones - 2.0**-self.mantissa if self.finite else ones, self.emax))

    @property
    def nan(self) -> int:
        """The canonical NaN that instructions produce (PTX ISA 5.2.3, 9.7.3): every bit but the sign."""
        return (1 << self.bits - 1) - 1

    @cached_property
    def _table(self) -> Array:
        """All values of an 8-bit format by code."""
        code = np.arange(256)
        exponent, fraction = (code & 127) >> self.mantissa, code & (1 << self.mantissa) - 1
        normal = exponent > 0
        value = np.ldexp(fraction + (normal << self.mantissa), np.maximum(exponent, 1) - 1 + self.emin - self.mantissa)
        top = 127 >> self.mantissa
        if self.finite:
            value[code & 127 == 127] = np.nan
        else:
            value[exponent == top] = np.where(fraction[exponent == top] == 0, np.inf, np.nan)
        return np.where(code >> 7, -value, value)

    def decode(self, raw: Array) -> Array:
        """Codes (unsigned integers) to their float64 values."""
        match self.name:
            case "f64":
                return raw.view(np.float64)
            case "f32" | "tf32":
                return raw.view(np.float32).astype(np.float64)
            case "f16":
                return raw.view(np.float16).astype(np.float64)
            case "bf16":
                return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            case _:
                return self._table[raw]

    def round(self, x: Array, rounding: str = "rn") -> Array:
        """`x` (float64) rounded to this precision and exponent range, still as float64. No NaN handling."""
        if self.name == "f64":
            return x
        if rounding == "rn" and self.name == "f32":
            return x.astype(np.float32).astype(np.float64)
        if rounding == "rn" and self.name == "f16":
            return x.astype(np.float16).astype(np.float64)
        exponent = np.frexp(x)[1]
        ulp = np.maximum(exponent - 1, self.emin) - self.mantissa
        y = np.ldexp(ROUND[rounding](np.ldexp(x, -ulp)), ulp)
        over = np.abs(y) > self.max
        if any_of(over):
            keeps_finite = {"rn": False, "rz": True, "rm": x > 0, "rp": x < 0}[rounding]
            limit = np.where(keeps_finite & np.isfinite(x), self.max, np.inf)
            y = np.where(over, np.copysign(limit, x), y)
        return y

    def encode(self, x: Array, rounding: str = "rn", saturate: bool = False) -> Array:
        """float64 to codes, rounding once; NaN becomes canonical. `saturate` clamps to the finite range."""
        if saturate:
            x = np.clip(x, -self.max, self.max)  # keeps NaN
        if rounding == "rn" and self.name == "f16":
            code = x.astype(np.float16).view(np.uint16)
        elif rounding == "rn" and self.name == "f32":
            code = x.astype(np.float32).view(np.uint32)
        elif rounding == "rn" and self.name == "bf16":
            code = _bf16(self, x)
        elif self.bits == 8:
            code = self._nearest_code(x)
        else:
            code = self._code(self.round(x, rounding))
        bad = np.isnan(x)
        return np.where(bad, self.raw.type(self.nan), code) if any_of(bad) else code

    def _code(self, x: Array) -> Array:
        """The code of values that are exactly representable."""
        match self.name:
            case "f64":
                return x.view(np.uint64)
            case "f32" | "tf32":
                return x.astype(np.float32).view(np.uint32)
            case "f16":
                return x.astype(np.float16).view(np.uint16)
            case "bf16":
                return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            case _:
                raise NotImplementedError(self.name)

    @cached_property
    def _bounds(self) -> Array:
        """Of an 8-bit format: the largest number that is rounded to code i, for nearest even, of each i but the last,
        which is infinity's, or of e4m3 NaN's."""
        last = int(np.searchsorted(self._table[:127], self.max))
        values = np.append(self._table[: last + 1], 2 * self._table[last] - self._table[last - 1])
        middle = (values[:-1] + values[1:]) / 2  # exact
        return np.where(np.arange(last + 1) % 2 == 0, middle, np.nextafter(middle, 0.0))

    def _nearest_code(self, x: Array) -> Array:
        """The code of an 8-bit format that is nearest, even of two."""
        magnitude = np.searchsorted(self._bounds, np.abs(x)).astype(np.uint8)
        return magnitude | np.signbit(x).astype(np.uint8) << 7

    def flush(self, x: Array) -> Array:
        """Subnormal values to zero, keeping the sign (`.ftz`)."""
        return np.where(np.abs(x) < 2.0**self.emin, np.copysign(0.0, x), x)


def _bf16(fmt: Float, x: Array) -> Array:
    """Round to nearest even on the bits of the float64: the 45 bits that bf16 has not, carry included."""
    bits = np.ascontiguousarray(x).view(np.uint64)
    kept = (bits + np.uint64((1 << 44) - 1) + (bits >> np.uint64(45) & np.uint64(1))) & np.uint64(
        ~((1 << 45) - 1) % 2**64
    )
    y = kept.view(np.float64)
    small = np.abs(x) < 2.0**fmt.emin
    if any_of(small):
        y = np.where(small, fmt.round(x), y)
    return (y.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


FLOATS = {
    fmt.name: fmt
    for fmt in (
        Float("f64", 64, 52, 1023),
        Float("f32", 32, 23, 127),
        Float("tf32", 32, 10, 127),
        Float("f16", 16, 10, 15),
        Float("bf16", 16, 7, 127),
        Float("e5m2", 8, 2, 15),
        Float("e4m3", 8, 3, 8, finite=True),
    )
}


def sum_to_odd(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd: exact, or the neighbour of the exact sum whose last bit is 1."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)  # Knuth's TwoSum: a + b = total + lost, exactly
    if not any_of(lost):
        return total
    inexact = (lost != 0) & np.isfinite(total)
    bits = np.ascontiguousarray(total).view(np.int64)
    even = inexact & (bits & 1 == 0)
    # Towards the lost part: away from zero where its sign is that of the total.
    step = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where(even, bits + step, bits).view(np.float64)
