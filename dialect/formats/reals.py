"""The floating-point types that codes are decoded to, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Real:
    """A floating-point type as IEEE lays it out."""

    name: str
    bits: int
    mantissa: int
    bias: int
    max: float


F16 = Real("f16", 16, 10, 15, 65504.0)
BF16 = Real("bf16", 16, 7, 127, 3.3895313892515355e38)
F32 = Real("f32", 32, 23, 127, 3.4028234663852886e38)
REALS = {r.name: r for r in (F16, BF16, F32)}
