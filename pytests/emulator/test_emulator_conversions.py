"""cvt in the emulator against NumPy, torch's types and the formats' definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from emulator_kernel import apply

from lowbit.dialect.errors import EmulatorError

RNG = np.random.default_rng(3)
HALVES = np.arange(2**16, dtype=np.uint16)
INTEGERS = [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]


def numpy_type(kind: str) -> np.dtype:
    return np.dtype(f"{'i' if kind[0] == 's' else kind[0]}{int(kind[1:]) // 8}")


def bf16_value(code: np.ndarray) -> np.ndarray:
    return (code.astype(np.uint32) << 16).view(np.float32)


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal as numbers, zeros with their signs, any NaN for any NaN."""
    np.testing.assert_array_equal(got, expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[finite]), np.signbit(expected[finite]))


def words(kind: str, count: int = 300) -> np.ndarray:
    info = np.iinfo(numpy_type(kind))
    edges = [info.min, info.min + 1, -1, 0, 1, 127, 128, 255, 256, info.max // 2, info.max - 1, info.max]
    edges = [v for v in edges if info.min <= v <= info.max]
    drawn = RNG.integers(info.min, info.max, count, dtype=info.dtype, endpoint=True)
    return np.concatenate([np.array(edges, info.dtype), drawn])


@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_integer(source: str, target: str) -> None:
    a = words(source)
    wide = "32" if int(target[1:]) == 8 else target[1:]
    got = apply(f"cvt.{target}.{source} %x, %a;", a, out=f"u{int(wide) // 8}")
    # An 8-bit result in a wider register is extended by its own sign.
    expected = a.astype(numpy_type(target)).astype(f"{'i' if target[0] == 's' else 'u'}{int(wide) // 8}")
    np.testing.assert_array_equal(got, expected.view(got.dtype))


@pytest.mark.parametrize(
    ("target", "source"), [("s8", "s32"), ("u8", "s32"), ("u16", "s64"), ("s32", "u32"), ("u32", "s32")]
)
def test_saturating_integers(target: str, source: str) -> None:
    a = words(source)
    info = np.iinfo(numpy_type(target))
    size = max(int(target[1:]) // 8, 2)
    got = apply(f"cvt.sat.{target}.{source} %x, %a;", a, out=f"i{size}" if target[0] == "s" else f"u{size}")
    np.testing.assert_array_equal(got, [min(max(int(v), info.min), info.max) for v in a])


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s8", "u8", "s32", "u32", "s64", "u64", "s16", "u16"])
@pytest.mark.parametrize("source", ["f16", "f32", "f64"])
def test_float_to_integer(source: str, target: str, mode: str) -> None:
    info = np.iinfo(numpy_type(target))
    limits = [
        float(info.min),
        float(info.max),
        np.nextafter(float(info.max), 0),
        -0.5,
        0.5,
        1.5,
        2.5,
        -2.5,
        -0.0,
    ]
    a = np.array([*limits, np.inf, -np.inf, np.nan, *RNG.standard_normal(200) * 300], numpy_type(source))
    got = apply(f"cvt.{mode}.{target}.{source} %x, %a;", a, out=numpy_type(f"{target[0]}{max(int(target[1:]), 16)}"))
    rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for result, x in zip(got.tolist(), a.tolist()):
        if math.isnan(x):
            narrow = source != "f64" and info.bits < 64
            expected = 0 if narrow else (info.min if target[0] == "s" else 1 << info.bits - 1)
        elif math.isinf(x):
            expected = info.max if x > 0 else info.min
        else:
            expected = min(max(rounding(x), info.min), info.max)
        assert result == expected, (x, result, expected)


@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_float_nearest(source: str) -> None:
    a = words(source)
    for target in ("f16", "f32", "f64"):
        got = apply(f"cvt.rn.{target}.{source} %x, %a;", a, out=numpy_type(target))
        with np.errstate(over="ignore"):
            expected = np.array([np.float64(int(v)) for v in a]) if target != "f32" else a.astype(np.float32)
            expected = expected.astype(numpy_type(target))
        np.testing.assert_array_equal(got, expected)


def test_integer_to_f32_directed() -> None:
    a = np.array([2**24 + 1, -(2**24) - 1, 2**24 + 3, 5], np.int32)
    down, up, cut = apply("cvt.rm.f32.s32 %x, %a; cvt.rp.f32.s32 %y, %a; cvt.rz.f32.s32 %z, %a;", a, out=("f4",) * 3)
    np.testing.assert_array_equal(down, [2**24, -(2**24) - 2, 2**24 + 2, 5])
    np.testing.assert_array_equal(up, [2**24 + 2, -(2**24), 2**24 + 4, 5])
    np.testing.assert_array_equal(cut, [2**24, -(2**24), 2**24 + 2, 5])


def test_all_f16_widen() -> None:
    single, double = apply("cvt.f32.f16 %x, %a; cvt.f64.f16 %y, %a;", HALVES, out=("f4", "f8"))
    same(single, HALVES.view(np.float16).astype(np.float32))
    same(double, HALVES.view(np.float16).astype(np.float64))


def test_all_bf16_widen_and_return() -> None:
    wide = apply("cvt.f32.bf16 %x, %a;", HALVES, out=np.float32)
    same(wide, bf16_value(HALVES))
    back = apply("cvt.rn.bf16.f32 %x, %a;", wide, out=np.uint16)
    np.testing.assert_array_equal(back, np.where(np.isnan(wide), 0x7FFF, HALVES))


@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_narrowing_is_to_nearest_even(target: str) -> None:
    """Every finite value, the middle to its neighbour, and just beside the middle."""
    torch = pytest.importorskip("torch")
    value = HALVES.view(np.float16).astype(np.float32) if target == "f16" else bf16_value(HALVES)
    with np.errstate(all="ignore"):
        middle = ((value[:-1].astype(np.float64) + value[1:]) / 2).astype(np.float32)
        a = np.concatenate(
            [
                value,
                middle,
                np.nextafter(middle, np.float32(np.inf)),
                np.nextafter(middle, np.float32(-np.inf)),
            ]
        )
    got = apply(f"cvt.rn.{target}.f32 %x, %a;", a, out=np.uint16)
    kind = torch.float16 if target == "f16" else torch.bfloat16
    expected = torch.from_numpy(a).to(kind).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got, np.where(np.isnan(a), 0x7FFF, expected))


def test_directed_narrowing() -> None:
    a = np.array([1 + 2.0**-12, -1 - 2.0**-12, 1e6, -1e6, 2.0**-26, -(2.0**-26)], np.float32)
    cut = apply("cvt.rz.f16.f32 %x, %a;", a, out=np.float16)
    np.testing.assert_array_equal(cut, np.array([1, -1, 65504, -65504, 0, -0.0], np.float16))
    down, up = apply("cvt.rm.f32.f64 %x, %a; cvt.rp.f32.f64 %y, %a;", np.array([0.1, -0.1]), out=("f4", "f4"))
    assert float(down[0]) < 0.1 < float(up[0])
    assert float(down[1]) < -0.1 < float(up[1])


def test_packed_order() -> None:
    """cvt d, a, b: a goes to the upper half."""
    a, b = np.array([1.5, 70000.0], np.float32), np.array([-2.0, 1e-8], np.float32)
    pair = apply("cvt.rn.f16x2.f32 %x, %a, %b;", a, b, out=np.uint32).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(pair, np.array([[-2.0, 1.5], [0.0, np.inf]], np.float16))
    pair = apply("cvt.rn.bf16x2.f32 %x, %a, %b;", a, b, out=np.uint32).view(np.uint16).reshape(-1, 2)
    np.testing.assert_array_equal(pair[0], [0xC000, 0x3FC0])
    relu = apply("cvt.rn.relu.f16x2.f32 %x, %a, %b;", a, b, out=np.uint32).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(relu[0], [0.0, 1.5])


def fp8_values(mantissa: int, bias: int, ieee: bool) -> np.ndarray:
    """All 256 values, spelled out from the format: e4m3 has NaN at S.1111.111 only, e5m2 is IEEE-like."""
    values = []
    for code in range(256):
        exponent, fraction = code >> mantissa & (1 << 7 - mantissa) - 1, code & (1 << mantissa) - 1
        top = exponent == (1 << 7 - mantissa) - 1
        if top and ieee:
            magnitude = math.nan if fraction else math.inf
        elif code & 127 == 127:
            magnitude = math.nan
        elif exponent:
            magnitude = 2.0 ** (exponent - bias) * (1 + fraction / (1 << mantissa))
        else:
            magnitude = 2.0 ** (1 - bias) * fraction / (1 << mantissa)
        values.append(-magnitude if code & 128 else magnitude)
    return np.array(values)


FP8 = {"e4m3": fp8_values(3, 7, False), "e5m2": fp8_values(2, 15, True)}


@pytest.mark.parametrize("kind", FP8)
def test_all_fp8_codes_decode(kind: str) -> None:
    """All pairs of bytes, low byte in the low half."""
    got = apply(f"cvt.rn.f16x2.{kind}x2 %x, %a;", HALVES, out=np.uint32).view(np.float16).reshape(-1, 2)
    table = FP8[kind].astype(np.float16)
    same(got[:, 0], table[HALVES & 255])
    same(got[:, 1], table[HALVES >> 8])


@pytest.mark.parametrize("kind", FP8)
def test_fp8_encoding(kind: str) -> None:
    """Nearest, ties to even, clamped to the largest finite value; checked by search over all codes."""
    table = FP8[kind]
    finite = np.sort(table[np.isfinite(table)])
    a = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, [1e9, -1e9, np.inf, -np.inf], RNG.standard_normal(500)])
    a = a.astype(np.float32)
    got = apply(f"cvt.rn.satfinite.{kind}x2.f32 %x, %b, %a;", a, -a, out=np.uint16)
    for x, low, high in zip(a.astype(float), (got & 255).tolist(), (got >> 8).tolist()):
        distance = np.abs(np.where(np.isfinite(table), table, np.nan) - np.clip(x, finite[0], finite[-1]))
        nearest = [code for code in range(256) if distance[code] == np.nanmin(distance)]
        same_sign = [code for code in nearest if (code >= 128) == (math.copysign(1, x) < 0)]
        even = [code for code in same_sign if code & 1 == 0] if len(same_sign) > 1 else same_sign
        assert [low] == even, (x, low, even)
        assert high == low ^ 128
    nan = np.array([np.nan], np.float32)
    assert apply(f"cvt.rn.satfinite.{kind}x2.f32 %x, %a, %a;", nan, out=np.uint16)[0] == 0x7F7F


@pytest.mark.parametrize("kind", FP8)
def test_fp8_from_f16_pairs(kind: str) -> None:
    codes = np.flatnonzero(np.isfinite(FP8[kind])).astype(np.uint16)
    pairs = (codes | codes[::-1] << 8).astype(np.uint16)
    back = apply(f"cvt.rn.f16x2.{kind}x2 %r9, %a; cvt.rn.satfinite.{kind}x2.f16x2 %x, %r9;", pairs, out=np.uint16)
    np.testing.assert_array_equal(back, pairs)


def test_tf32_rounding() -> None:
    a = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-12], np.float32)
    away, even = apply("cvt.rna.tf32.f32 %x, %a; cvt.rn.tf32.f32 %y, %a;", a, out=("f4", "f4"))
    np.testing.assert_array_equal(away, np.array([1 + 2.0**-10, 1 + 2.0**-9, -1 - 2.0**-10, 1], np.float32))
    np.testing.assert_array_equal(even, np.array([1, 1 + 2.0**-9, -1, 1], np.float32))


def test_tf32_rounding_beyond_the_finite() -> None:
    """As an H200 has it: the largest numbers become inf, as do NaNs whose payload is in the bits that are cut."""
    a = np.array([0x7F7FF000, 0x7F7FEFFF, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFF801FFF, 0x7F802000], np.uint32)
    (got,) = apply("cvt.rna.tf32.f32 %x, %a;", a, out=("u4",))
    expected = [0x7F800000, 0x7F7FE000, 0xFF800000, 0x7FC00000, 0x7F800000, 0xFF800000, 0x7F802000]
    np.testing.assert_array_equal(got, np.array(expected, np.uint32))


def test_integral_rounding_in_place() -> None:
    a = np.array([0.5, 1.5, -0.5, 2.7, -2.7, np.inf, -0.0], np.float32)
    got = apply("cvt.rni.f32.f32 %x, %a; cvt.rmi.f32.f32 %y, %a; cvt.rpi.f32.f32 %z, %a;", a, out=("f4",) * 3)
    for result, function in zip(got, (np.rint, np.floor, np.ceil)):
        same(result, function(a))


@pytest.mark.parametrize(
    "asm",
    [
        "cvt.f16.f32 %x, %a;",
        "cvt.rn.f32.f16 %x, %a;",
        "cvt.rn.e4m3x2.f32 %x, %a, %a;",
        "cvt.s32.f32 %x, %a;",
        "cvt.f32.s32 %x, %a;",
    ],
)
def test_rounding_must_be_said(asm: str) -> None:
    a = np.zeros(4, np.float16 if "f32.f16" in asm else np.float32)
    with pytest.raises(EmulatorError, match="line"):
        apply(asm, a, out=np.uint32 if "s32" in asm or "f32.f16" in asm else np.uint16)
