"""Floating-point instructions of the emulator against exact rational arithmetic, rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from emulator_kernel import apply

RNG = np.random.default_rng(2)
#: name -> bits, mantissa bits, largest exponent
FORMATS = {"f16": (16, 10, 15), "bf16": (16, 7, 127), "f32": (32, 23, 127)}


def value(code: int, fmt: str) -> float:
    """The number that `code` stands for, from the IEEE definition."""
    bits, mantissa, emax = FORMATS[fmt]
    fraction, exponent = code & (1 << mantissa) - 1, code >> mantissa & (1 << bits - 1 - mantissa) - 1
    sign = -1.0 if code >> bits - 1 else 1.0
    if exponent == 2 * emax + 1:
        return math.nan if fraction else sign * math.inf
    return sign * math.ldexp(fraction + (bool(exponent) << mantissa), max(exponent, 1) - emax - mantissa)


def rounded(x: Fraction, fmt: str, mode: str = "rn") -> int:
    """The code of a non-zero exact number in `fmt`."""
    bits, mantissa, emax = FORMATS[fmt]
    magnitude, sign = abs(x), int(x < 0) << bits - 1
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    exponent = max(exponent, 1 - emax)
    scaled = magnitude / Fraction(2) ** (exponent - mantissa)
    integer, rest = divmod(scaled.numerator, scaled.denominator)
    half = 2 * rest - scaled.denominator
    up = {
        "rn": half > 0 or (half == 0 and integer & 1),
        "rz": False,
        "rm": rest and x < 0,
        "rp": rest and x > 0,
    }
    integer += bool(up[mode])
    code = (exponent + emax - 1 << mantissa) + integer  # the hidden bit adds 1 to the exponent field
    infinity = 2 * emax + 1 << mantissa
    if code >= infinity:
        outward = mode == "rn" or (mode == "rm" and x < 0) or (mode == "rp" and x > 0)
        code = infinity if outward else infinity - 1
    return sign | code


def codes(fmt: str, operands: int, count: int = 1500) -> list[np.ndarray]:
    """Edge cases against each other, random patterns, and triples near each other so that sums cancel."""
    bits, mantissa, emax = FORMATS[fmt]
    one, infinity = emax << mantissa, 2 * emax + 1 << mantissa
    positive = [
        0,
        1,
        2,
        (1 << mantissa) - 1,
        1 << mantissa,
        one - 1,
        one,
        one + 1,
        infinity - 1,
        infinity,
        infinity + 1,
    ]
    edges = np.array(positive + [code | 1 << bits - 1 for code in positive], f"u{bits // 8}")
    grids = np.array([x.ravel() for x in np.meshgrid(*[edges] * operands)])
    grids = grids[:, RNG.permutation(grids.shape[1])[:count]]
    wild = RNG.integers(0, 2**bits, (operands, count), dtype=f"u{bits // 8}")
    tame = RNG.integers(one - (6 << mantissa), one + (6 << mantissa), (operands, count), dtype=f"u{bits // 8}")
    tame |= RNG.integers(0, 2, tame.shape, dtype=tame.dtype) << tame.dtype.type(bits - 1)
    return [np.concatenate(parts) for parts in zip(grids, wild, tame)]


def check(
    got: np.ndarray,
    fmt: str,
    exact: Callable[..., Fraction],
    native: Callable[..., float],
    *inputs: np.ndarray,
    mode: str = "rn",
) -> None:
    """`exact` decides where all operands are finite and the result is not zero; `native`, in float64,
    elsewhere."""
    bits = FORMATS[fmt][0]
    for result, *row in zip(got.tolist(), *(x.tolist() for x in inputs)):
        x = [value(code, fmt) for code in row]
        if all(map(math.isfinite, x)) and (wanted := exact(*map(Fraction, x))) != 0:
            expected = rounded(wanted, fmt, mode)
        else:
            special = float(native(*map(np.float64, x)))
            if math.isnan(special):
                expected = (1 << bits - 1) - 1  # canonical NaN
            elif special == 0 and mode == "rm" and len(x) > 1 and exact is not OPERATIONS["mul"][1]:
                # x - x is -0 when rounding down: only a sum of positive zeros is +0.
                terms = (
                    [x[0] * x[1], x[2]] if len(x) == 3 else [x[0], x[1] if exact is not OPERATIONS["sub"][1] else -x[1]]
                )
                expected = (1 << bits - 1) * any(math.copysign(1, term) < 0 for term in terms)
            else:
                expected = (1 << bits - 1) * (math.copysign(1, special) < 0)
                expected |= 2 * FORMATS[fmt][2] + 1 << FORMATS[fmt][1] if math.isinf(special) else 0
        assert result == expected, (fmt, mode, [hex(c) for c in row], x, hex(result), hex(expected))


OPERATIONS = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_rounds_once(name: str, fmt: str) -> None:
    count, function = OPERATIONS[name]
    inputs = codes(fmt, count, 800)
    operands = "".join(f", %{'abc'[i]}" for i in range(count))
    got = apply(f"{name}.rn.{fmt} %x{operands};", *inputs, out=inputs[0].dtype)
    check(got, fmt, function, function, *inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_directed_rounding(name: str, mode: str) -> None:
    count, function = OPERATIONS[name]
    inputs = codes("f32", count, 500)
    operands = "".join(f", %{'abc'[i]}" for i in range(count))
    got = apply(f"{name}.{mode}.f32 %x{operands};", *inputs, out=np.uint32)
    check(got, "f32", function, function, *inputs, mode=mode)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_pairs_equal_two_halves(name: str, fmt: str) -> None:
    count, function = OPERATIONS[name]
    inputs = [x[: len(x) // 2 * 2] for x in codes(fmt, count, 500)]
    words = [np.ascontiguousarray(x).view(np.uint32) for x in inputs]
    operands = "".join(f", %{'abc'[i]}" for i in range(count))
    got = apply(f"{name}.rn.{fmt}x2 %x{operands};", *words, out=np.uint32)
    check(got.view(np.uint16), fmt, function, function, *inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
def test_mixed_precision(name: str, fmt: str) -> None:
    """The last operand and the result are f32, the others are not."""
    count, function = OPERATIONS[name]
    narrow, wide = codes(fmt, count, 500), codes("f32", count, 500)
    length = min(len(narrow[0]), len(wide[0]))
    inputs = [*(x[:length] for x in narrow[:-1]), wide[-1][:length]]
    operands = "".join(f", %{'abc'[i]}" for i in range(count))
    got = apply(f"{name}.rn.f32.{fmt} %x{operands};", *inputs, out=np.uint32)
    exact = [np.array([value(int(c), kind) for c in x]) for x, kind in zip(inputs, [fmt] * (count - 1) + ["f32"])]
    widened = [x.astype(np.float32).view(np.uint32) for x in exact]  # every number of 16 bits is one of f32
    check(got, "f32", function, function, *widened)


def test_fma_is_not_a_product_and_a_sum() -> None:
    """Cases that a second rounding gets wrong: a tie of the product that a tiny addend breaks."""
    a = np.array([1 + 2.0**-12], np.float32)
    c = np.array([2.0**-100], np.float32)
    got = apply("fma.rn.f32 %x, %a, %a, %b;", a, c, out=np.float32)  # a * a = 1 + 2^-11 + 2^-24, a tie
    assert got[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    one_and = np.array([0x3F84], np.uint16)  # bf16: 1 + 2^-5; squared 1 + 2^-4 + 2^-10
    tiny = np.array([0x0080, 0x8080], np.uint16)
    half = np.array([0x3F88], np.uint16)  # 1 + 2^-4; squared 1 + 2^-3 + 2^-8, a tie between 0x3F90 and 0x3F91
    for x, addend, expected in (
        (half, tiny[:1], 0x3F91),
        (half, tiny[1:], 0x3F90),
        (one_and, tiny[:1], 0x3F88),
    ):
        assert apply("fma.rn.bf16 %x, %a, %a, %b;", x, addend, out=np.uint16)[0] == expected


def test_f64() -> None:
    a, b = RNG.standard_normal((2, 100))
    c = -(a * b)
    got = apply("add.rn.f64 %x, %a, %b; mul.rn.f64 %y, %a, %b; fma.rn.f64 %z, %a, %b, %c;", a, b, c, out=(float,) * 3)
    np.testing.assert_array_equal(got[0], a + b)
    np.testing.assert_array_equal(got[1], a * b)
    exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c)]
    np.testing.assert_array_equal(got[2], exact)
    assert np.count_nonzero(got[2])  # what the product lost


def test_ftz_and_sat() -> None:
    a = np.array([2.0**-127, -(2.0**-127), 2.0**-126, -0.5, 2.0, np.nan], np.float32)
    zero = np.zeros_like(a)
    got = apply("add.ftz.f32 %x, %a, %b; add.rn.f32 %y, %a, %b; add.sat.f32 %z, %a, %b;", a, zero, out=("f4",) * 3)
    np.testing.assert_array_equal(got[0], np.array([0, 0, 2.0**-126, -0.5, 2, np.nan], np.float32))
    np.testing.assert_array_equal(got[1], a)
    np.testing.assert_array_equal(got[2], np.clip(np.nan_to_num(a), 0, 1).astype(np.float32))
    halves = np.array([2.0**-15, 0.5], np.float16)
    kept, flushed = apply(
        "mul.rn.f16 %x, %a, %b; mul.ftz.f16 %y, %a, %b;", halves, np.ones(2, np.float16), out=("f2", "f2")
    )
    np.testing.assert_array_equal(kept, halves)
    np.testing.assert_array_equal(flushed, np.array([0, 0.5], np.float16))
    below = np.array([0x1553], np.uint16).view(np.float16)  # times the other: 2^-14 only by rounding
    other = np.array([0x2A02], np.uint16).view(np.float16)
    got = apply("mul.rn.f16 %x, %a, %b; mul.ftz.f16 %y, %a, %b;", below, other, out=("f2", "f2"))
    np.testing.assert_array_equal([x.view(np.uint16)[0] for x in got], [0x0400, 0])


@pytest.mark.parametrize("fmt", ["f16", "bf16", "f32"])
def test_min_max(fmt: str) -> None:
    """The other operand beats NaN, -0 is below +0, and .NaN propagates."""
    a, b = codes(fmt, 2, 300)
    asm = f"min.{fmt} %x, %a, %b; max.{fmt} %y, %a, %b; min.NaN.{fmt} %z, %a, %b;"
    low, high, propagating = apply(asm, a, b, out=(a.dtype,) * 3)
    bits = FORMATS[fmt][0]
    nan = (1 << bits - 1) - 1
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist())):
        numbers = [code for code in (x, y) if not math.isnan(value(code, fmt))]
        # Codes ordered as numbers: -0 below +0.
        order = sorted(numbers, key=lambda code: (value(code, fmt), -(code >> bits - 1)))
        assert low[i] == (order[0] if order else nan)
        assert high[i] == (order[-1] if order else nan)
        assert propagating[i] == (order[0] if len(order) == 2 else nan)


@pytest.mark.parametrize("fmt", ["f16", "bf16", "f32"])
def test_neg_abs(fmt: str) -> None:
    (a,) = codes(fmt, 1, 200)
    a = a[[not math.isnan(value(code, fmt)) for code in a.tolist()]]
    sign = a.dtype.type(1 << FORMATS[fmt][0] - 1)
    negated, magnitude = apply(f"neg.{fmt} %x, %a; abs.{fmt} %y, %a;", a, out=(a.dtype, a.dtype))
    np.testing.assert_array_equal(negated, a ^ sign)
    np.testing.assert_array_equal(magnitude, a & ~sign)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_division_and_functions() -> None:
    a, b = np.abs(RNG.standard_normal((2, 500)).astype(np.float32)) + np.float32(1e-3)
    wide = a.astype(np.float64)
    asm = "div.rn.f32 %x, %a, %b; rcp.rn.f32 %y, %a; sqrt.rn.f32 %z, %a; div.full.f32 %w, %a, %b;"
    got = apply(asm, a, b, out=("f4",) * 4)
    for result, expected in zip(got, (wide / b, 1 / wide, np.sqrt(wide), wide / b)):
        np.testing.assert_array_equal(result, expected.astype(np.float32))
    asm = "ex2.approx.f32 %x, %a; rsqrt.approx.f32 %y, %a; lg2.approx.f32 %z, %a; tanh.approx.f32 %w, %a;"
    got = apply(asm, a, out=("f4",) * 4)
    for result, expected in zip(got, (np.exp2(wide), wide**-0.5, np.log2(wide), np.tanh(wide))):
        np.testing.assert_allclose(result, expected, rtol=2**-23, atol=2**-126)


COMPARE: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a < b or a > b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: not (a < b or a > b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: not a >= b,
    "leu": lambda a, b: not a > b,
    "gtu": lambda a, b: not a <= b,
    "geu": lambda a, b: not a < b,
    "num": lambda a, b: a == a and b == b,
    "nan": lambda a, b: a != a or b != b,
}


@pytest.mark.parametrize("fmt", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", COMPARE)
def test_setp_float(name: str, fmt: str) -> None:
    a, b = codes(fmt, 2, 100)
    expected = [COMPARE[name](value(x, fmt), value(y, fmt)) for x, y in zip(a.tolist(), b.tolist())]
    np.testing.assert_array_equal(apply(f"setp.{name}.{fmt} %x, %a, %b;", a, b, out=bool), expected)
    if fmt == "f32":  # the only one of them with a second result
        _, opposite = apply(f"setp.{name}.f32 %x|%y, %a, %b;", a, b, out=(bool, bool))
        np.testing.assert_array_equal(opposite, np.logical_not(expected))


@pytest.mark.parametrize("name", ["lt", "neu"])
def test_setp_pair(name: str) -> None:
    a, b = codes("f16", 2, 100)
    got = apply(f"setp.{name}.f16x2 %x|%y, %a, %b;", a.view(np.uint32), b.view(np.uint32), out=(bool, bool))
    expected = [COMPARE[name](value(x, "f16"), value(y, "f16")) for x, y in zip(a.tolist(), b.tolist())]
    np.testing.assert_array_equal(np.stack(got, axis=1).ravel(), expected)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_setp_integer(kind: str) -> None:
    bits = int(kind[1:])
    edges = np.array([0, 1, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1], f"u{bits // 8}")
    a, b = (x.ravel() for x in np.meshgrid(edges, edges))
    x, y = (v.view(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}") for v in (a, b))
    for name, function in (
        ("eq", np.equal),
        ("ne", np.not_equal),
        ("lt", np.less),
        ("le", np.less_equal),
        ("gt", np.greater),
        ("ge", np.greater_equal),
    ):
        np.testing.assert_array_equal(apply(f"setp.{name}.{kind} %x, %a, %b;", a, b, out=bool), function(x, y))
    if kind[0] == "u":
        for name, function in (
            ("lo", np.less),
            ("ls", np.less_equal),
            ("hi", np.greater),
            ("hs", np.greater_equal),
        ):
            np.testing.assert_array_equal(apply(f"setp.{name}.{kind} %x, %a, %b;", a, b, out=bool), function(x, y))


@pytest.mark.parametrize(
    ("name", "function"), [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)]
)
def test_setp_combines(name: str, function: Callable[..., np.ndarray]) -> None:
    """p = (a < b) op c, q = !(a < b) op c."""
    a, b = np.array([1, 2, 1, 2], np.uint32), np.array([2, 1, 2, 1], np.uint32)
    c = np.array([0, 0, 1, 1], bool)
    p, q, negated = apply(
        f"setp.lt.{name}.u32 %x|%y, %a, %b, %c; setp.lt.{name}.u32 %z, %a, %b, !%c;", a, b, c, out=(bool,) * 3
    )
    np.testing.assert_array_equal(p, function(a < b, c))
    np.testing.assert_array_equal(q, function(~(a < b), c))
    np.testing.assert_array_equal(negated, function(a < b, ~c))


def test_selp_slct_set() -> None:
    a, b = np.arange(6, dtype=np.uint32), np.arange(6, dtype=np.uint32) + 100
    c = np.array([-1, 0, 1, -0.0, np.nan, -2], np.float32)
    chosen, by_sign, mask, one = apply(
        "setp.gt.f32 %p1, %c, 0f00000000; selp.b32 %x, %a, %b, %p1; slct.u32.f32 %y, %a, %b, %c;"
        "set.gt.u32.f32 %z, %c, 0f00000000; set.le.f32.f32 %w, %c, 0f00000000;",
        a, b, c, out=("u4", "u4", "u4", "f4"),
    )  # fmt: skip
    np.testing.assert_array_equal(chosen, np.where(c > 0, a, b))
    np.testing.assert_array_equal(by_sign, np.where(c >= 0, a, b))
    np.testing.assert_array_equal(mask, np.where(c > 0, 2**32 - 1, 0))
    np.testing.assert_array_equal(one, np.where(c <= 0, 1.0, 0.0))


def test_set_of_pairs() -> None:
    """A mask of 16 bits for each half. Subnormals are numbers of their own, and zeros of both signs are one."""
    a = np.array([0x0001_0002, 0x0003_0002, 0x8000_7E00, 0x000F_0000], np.uint32)
    b = np.array([0x0001_0003, 0x0001_0002, 0x0000_7E00, 0x000F_0000], np.uint32)
    (found,) = apply("set.eq.u32.f16x2 %x, %a, %b;", a, b, out=("u4",))
    assert found.tolist() == [0xFFFF_0000, 0x0000_FFFF, 0xFFFF_0000, 0xFFFF_FFFF]

