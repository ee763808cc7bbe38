"""LLVM IR text across versions: what the MLIR bindings print (LLVM 24) made readable for llvmlite (LLVM 22).

Two things changed in between. Floating-point literals: LLVM 22 reads a decimal only where it is exact in the
literal's type, while newer ones print the shortest decimal that rounds to it, or new spellings
(``f0x3DCCCCCD``, ``+inf``, ``-snan(0x1)``). All are rewritten as LLVM 22's hexadecimal, bit for bit. And
attributes: what is new and only an optimization hint is dropped, what has a meaning is spelled in the old
way.
"""

import re
import struct
from fractions import Fraction
from functools import lru_cache

from lowbit.dialect.errors import PassError

_FORMATS = {"half": (5, 10), "bfloat": (8, 7), "float": (8, 23), "double": (11, 52)}
"""LLVM type -> bits of exponent and mantissa."""

_NAME = r"(?<![\w.$%@!#-])"  # not in the middle of a name such as %float or @x.1.0
_TOKEN = re.compile(
    rf"""
      "(?:[^"\\]|\\.)*" | ;.*$
    | {_NAME}(?P<type>half|bfloat|float|double|fp128|x86_fp80|ppc_fp128)\b
    | {_NAME}(?P<literal>f0x[0-9A-Fa-f]+
        | [+-]?\d+\.\d+(?:e[+-]?\d+)?
        | [+-](?:inf|qnan|s?nan\(0x[0-9A-Fa-f]+\)))(?![\w.])
    | {_NAME}denormal_fpenv\((?P<denormals>[^)]*)\)
    | {_NAME}(?P<hint>(?:noipa|nooutline|flatten)\b(?!:)|dead_on_return\(\d*\))\s?
    """,
    re.VERBOSE,
)
_CANDIDATE = re.compile(
    r"\d\.\d|f0x|[+-](?:inf|qnan|s?nan)|denormal_fpenv|noipa|nooutline|flatten|dead_on_return"
)
"""What a line has that is written anew, and few others have."""


def downgrade(text: str) -> str:
    """LLVM IR as LLVM 24 prints it, in the spelling of LLVM 22; the same program, every constant exact.

    Raises:
        PassError: a literal of a type without a known format (fp128, ...), or without a type before it.
    """
    return "\n".join(_line(line) if _CANDIDATE.search(line) else line for line in text.split("\n"))


def _line(line: str) -> str:
    # A literal's type stands before it on its line: "fadd float %0, 1.0e-01", "[2 x half] [half 1.0, half
    # 2.0]".
    kind: str | None = None

    def replace(match: re.Match[str]) -> str:
        nonlocal kind
        if match["type"]:
            kind = match["type"]
        elif match["literal"]:
            if kind not in _FORMATS:
                raise PassError(f"LLVM IR literal {match['literal']} of type {kind} in: {line.strip()}")
            return literal(match["literal"], kind)
        elif match["denormals"] is not None:
            return _denormals(match["denormals"])
        elif match["hint"]:
            return ""
        return match[0]

    return _TOKEN.sub(replace, line)


@lru_cache(maxsize=4096)
def literal(text: str, kind: str) -> str:
    """One literal of type `kind` as LLVM 22 reads it: "0xH2E66" (half), "0xR3DCD" (bfloat), "0x3FB...0"."""
    bits = _bits(text, kind)
    if kind == "half":
        return f"0xH{bits:04X}"
    if kind == "bfloat":
        return f"0xR{bits:04X}"
    return f"0x{bits if kind == 'double' else _widen(bits):016X}"


def _bits(text: str, kind: str) -> int:
    """The literal's bit pattern."""
    exponent, mantissa = _FORMATS[kind]
    if text.startswith("f0x"):
        return int(text[3:], 16)
    magnitude = text.lstrip("+-")
    sign = int(text.startswith("-")) << (exponent + mantissa)
    infinity = ((1 << exponent) - 1) << mantissa
    quiet = 1 << (mantissa - 1)
    if magnitude == "inf":
        return sign | infinity
    if magnitude == "qnan":
        return sign | infinity | quiet
    if "nan(" in magnitude:
        payload = int(magnitude[magnitude.index("(") + 1 : -1], 16)
        return sign | infinity | payload | (0 if magnitude.startswith("snan") else quiet)
    return sign | _round(Fraction(magnitude), exponent, mantissa)


def _round(value: Fraction, exponent_bits: int, mantissa_bits: int) -> int:
    """`value` >= 0 rounded to nearest, ties to even, as an IEEE 754 bit pattern.

    Rounding to double first and then to the type would round twice, wrong for some decimals.
    """
    if not value:
        return 0
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, 1 - bias)  # below are the subnormals, with the smallest normal's spacing
    steps = round(value / Fraction(2) ** (exponent - mantissa_bits))
    # Adding the hidden bit to the exponent field carries by itself: 2.0 - epsilon to 2.0, the largest to
    # infinity.
    return min(((exponent + bias - 1) << mantissa_bits) + steps, ((1 << exponent_bits) - 1) << mantissa_bits)


def _widen(bits: int) -> int:
    """A float's bit pattern as that of the double of the same value; NaN keeps payload and quiet bit."""
    if bits >> 23 & 0xFF == 0xFF:  # Python's own conversion would make a signaling NaN quiet
        return bits >> 31 << 63 | 0x7FF << 52 | (bits & 0x7FFFFF) << 29
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return int.from_bytes(struct.pack("<d", value), "little")


def _denormals(modes: str) -> str:
    """``denormal_fpenv(output|input, float: output|input)`` as LLVM 22's string attributes."""
    spelling = {"preservesign": "preserve-sign", "positivezero": "positive-zero"}
    attributes: list[str] = []
    for mode in modes.split(","):
        which, _, names = mode.rpartition(":")
        output, _, source = names.strip().partition("|")
        pair = ",".join(spelling.get(name, name) for name in (output, source or output))
        attributes.append(f'"denormal-fp-math{"-f32" if which else ""}"="{pair}"')
    return " ".join(attributes)
