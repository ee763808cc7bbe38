"""Integer instructions of the emulator against Python integers and the definitions in the PTX ISA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from emulator_kernel import apply

from lowbit.dialect.errors import EmulatorError

RNG = np.random.default_rng(1)
EDGES = {
    bits: np.array(
        [0, 1, 2, 3, 7, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2 ** (bits - 1) + 1, 2**bits - 2, 2**bits - 1],
        f"u{bits // 8}",
    )
    for bits in (16, 32, 64)
}


def pairs(bits: int, count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of edge cases, then random words."""
    edges = EDGES[bits]
    a, b = (x.ravel() for x in np.meshgrid(edges, edges))
    words = RNG.integers(0, 2**bits, (2, count), dtype=f"u{bits // 8}")
    return np.concatenate([a, words[0]]), np.concatenate([b, words[1]])


def exact(function: Callable[..., int], kind: str, *arrays: np.ndarray, out: int | None = None) -> np.ndarray:
    """`function` on Python integers read as `kind`, cut to `out` bits."""
    bits = int(kind[1:])
    signed = [a.view(f"i{bits // 8}") if kind[0] == "s" and a.dtype.itemsize * 8 == bits else a for a in arrays]
    mask = (1 << (out or bits)) - 1
    values = [function(*(int(v) for v in row)) & mask for row in zip(*signed)]
    return np.array(values, f"u{(out or bits) // 8}")


INTEGERS = [f"{sign}{bits}" for sign in "us" for bits in (16, 32, 64)]


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul.lo", lambda a, b: a * b),
        ("min", min),
        ("max", max),
    ],
)
def test_two_operands(name: str, function: Callable[[int, int], int], kind: str) -> None:
    a, b = pairs(int(kind[1:]))
    got = apply(f"{name}.{kind} %x, %a, %b;", a, b, out=a.dtype)
    np.testing.assert_array_equal(got, exact(function, kind, a, b))


@pytest.mark.parametrize(("name", "function"), [("min", min), ("max", max)])
def test_no_less_than_zero(name: str, function: Callable[[int, int], int]) -> None:
    a, b = pairs(32)
    got = apply(f"{name}.relu.s32 %x, %a, %b;", a, b, out=a.dtype)
    np.testing.assert_array_equal(got, exact(lambda a, b: max(0, function(a, b)), "s32", a, b))


@pytest.mark.parametrize("kind", INTEGERS)
def test_mul_hi(kind: str) -> None:
    bits = int(kind[1:])
    a, b = pairs(bits)
    got = apply(f"mul.hi.{kind} %x, %a, %b;", a, b, out=a.dtype)
    np.testing.assert_array_equal(got, exact(lambda a, b: a * b >> bits, kind, a, b))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    bits = int(kind[1:])
    wide = f"u{bits // 4}"
    a, b = pairs(bits)
    c = RNG.integers(0, 2**31, len(a)).astype(wide)
    got = apply(f"mul.wide.{kind} %x, %a, %b; mad.wide.{kind} %y, %a, %b, %c;", a, b, c, out=(wide, wide))
    product = exact(lambda a, b: a * b, kind, a, b, out=2 * bits)
    np.testing.assert_array_equal(got[0], product)
    np.testing.assert_array_equal(got[1], product + c)


def test_mad_lo_and_hi() -> None:
    a, b = pairs(32)
    c = RNG.integers(0, 2**32, len(a), dtype=np.uint32)
    low, high = apply("mad.lo.s32 %x, %a, %b, %c; mad.hi.s32 %y, %a, %b, %c;", a, b, c, out=(np.uint32, np.uint32))
    np.testing.assert_array_equal(low, a * b + c)
    np.testing.assert_array_equal(high, exact(lambda a, b: a * b >> 32, "s32", a, b) + c)


@pytest.mark.parametrize("kind", INTEGERS)
def test_division_cuts_towards_zero(kind: str) -> None:
    a, b = pairs(int(kind[1:]))
    a, b = a[b != 0], b[b != 0]
    if kind[0] == "s":  # -2^31 / -1 overflows
        keep = ~((a == 1 << int(kind[1:]) - 1) & (b == np.array(-1).astype(b.dtype)))
        a, b = a[keep], b[keep]
    quotient, rest = apply(f"div.{kind} %x, %a, %b; rem.{kind} %y, %a, %b;", a, b, out=(a.dtype, a.dtype))

    def cut(a: int, b: int) -> int:
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    np.testing.assert_array_equal(quotient, exact(cut, kind, a, b))
    np.testing.assert_array_equal(rest, exact(lambda a, b: a - cut(a, b) * b, kind, a, b))


def test_division_by_zero_is_reported() -> None:
    zero = np.array([1, 2, 0, 3], np.uint32)
    with pytest.raises(EmulatorError, match=r"div\.u32.*thread \(2, 0, 0\): division by zero"):
        apply("div.u32 %x, %a, %a;", zero, out=np.uint32)


def test_saturating_add_and_sub() -> None:
    a, b = pairs(32)
    got = apply("add.sat.s32 %x, %a, %b; sub.sat.s32 %y, %a, %b;", a, b, out=(np.uint32, np.uint32))

    def clamp(x: int) -> int:
        return max(-(2**31), min(2**31 - 1, x))

    np.testing.assert_array_equal(got[0], exact(lambda a, b: clamp(a + b), "s32", a, b))
    np.testing.assert_array_equal(got[1], exact(lambda a, b: clamp(a - b), "s32", a, b))


@pytest.mark.parametrize("kind", ["s16x2", "u16x2"])
def test_packed_halves(kind: str) -> None:
    a, b = pairs(32)
    got = apply(f"add.{kind} %x, %a, %b; max.{kind} %y, %a, %b; min.{kind} %z, %a, %b;", a, b, out=("u4",) * 3)
    half = np.int16 if kind[0] == "s" else np.uint16
    x, y = a.view(half), b.view(half)
    for result, function in zip(got, (np.add, np.maximum, np.minimum)):
        np.testing.assert_array_equal(result.view(half), function(x, y))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_neg_abs_not_and_logic(bits: int) -> None:
    a, b = pairs(bits)
    got = apply(
        f"neg.s{bits} %x, %a; abs.s{bits} %y, %a; not.b{bits} %z, %a; xor.b{bits} %w, %a, %b;",
        a,
        b,
        out=(a.dtype,) * 4,
    )
    for result, function in zip(got, (lambda a, _: -a, lambda a, _: abs(a), lambda a, _: ~a, lambda a, b: a ^ b)):
        np.testing.assert_array_equal(result, exact(function, f"s{bits}", a, b))
    both, either = apply(f"and.b{bits} %x, %a, %b; or.b{bits} %y, %a, %b;", a, b, out=(a.dtype,) * 2)
    np.testing.assert_array_equal(both, a & b)
    np.testing.assert_array_equal(either, a | b)


def test_predicate_logic() -> None:
    p, q = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    got = apply(
        "and.pred %x, %a, !%b; or.pred %y, %a, %b; xor.pred %z, %a, %b; not.pred %w, %a;",
        p,
        q,
        out=(bool,) * 4,
    )
    for result, expected in zip(got, (p & ~q, p | q, p ^ q, ~p)):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", [f"{c}{b}" for c in "bus" for b in (16, 32, 64)])
def test_shifts_clamp(kind: str) -> None:
    bits = int(kind[1:])
    words, amounts = EDGES[bits], np.arange(0, 140, dtype=np.uint32)
    a, n = (x.ravel() for x in np.meshgrid(words, np.append(amounts, 2**32 - 1).astype(np.uint32)))
    got = apply(f"shr.{kind} %x, %a, %b;", a, n, out=a.dtype)
    shift = {"s": lambda a, n: a >> min(n, bits - 1)}.get(kind[0], lambda a, n: a >> min(n, bits))
    signed = a.view(f"i{bits // 8}") if kind[0] == "s" else a
    mask = 2**bits - 1
    expected = [shift(int(v), int(c)) & mask for v, c in zip(signed, n)]
    np.testing.assert_array_equal(got, np.array(expected, a.dtype))
    if kind[0] == "b":
        left = apply(f"shl.{kind} %x, %a, %b;", a, n, out=a.dtype)
        np.testing.assert_array_equal(
            left, np.array([int(v) << min(int(c), bits) & mask for v, c in zip(a, n)], a.dtype)
        )


@pytest.mark.parametrize("amount", [0, 1, 5, 31, 32, 40])
@pytest.mark.parametrize("direction", ["l", "r"])
@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shift(direction: str, mode: str, amount: int) -> None:
    """PTX ISA 9.7.8.8: u32 n = c & 31 or min(c, 32); .l: d = (b << n) | (a >> (32 - n)); .r: mirrored."""
    low, high = pairs(32)
    n = amount & 31 if mode == "wrap" else min(amount, 32)
    amounts = np.full(len(low), amount, np.uint32)
    constant, variable = apply(
        f"shf.{direction}.{mode}.b32 %x, %a, %b, {amount}; shf.{direction}.{mode}.b32 %y, %a, %b, %c;",
        low,
        high,
        amounts,
        out=(np.uint32, np.uint32),
    )
    if direction == "l":
        expected = [(int(h) << n | int(l) >> 32 - n) & 0xFFFFFFFF for l, h in zip(low, high)]
    else:
        expected = [(int(h) << 32 - n | int(l) >> n) & 0xFFFFFFFF for l, h in zip(low, high)]
    np.testing.assert_array_equal(constant, np.array(expected, np.uint32))
    np.testing.assert_array_equal(variable, constant)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe(kind: str) -> None:
    """Follows the loop in PTX ISA 9.7.8.1 bit by bit."""
    bits = int(kind[1:])
    positions, lengths = np.meshgrid([0, 1, 7, 31, 32, 33, 63, 64, 255], [0, 1, 2, 8, 31, 32, 33, 63, 64, 255])
    pos, length = (np.repeat(x.ravel(), 4).astype(np.uint32) for x in (positions, lengths))
    a = RNG.integers(0, 2**bits, len(pos), dtype=f"u{bits // 8}")
    got = apply(f"bfe.{kind} %x, %a, %b, %c;", a, pos, length, out=a.dtype)
    msb = bits - 1

    def extract(a: int, pos: int, length: int) -> int:
        sign = 0 if kind[0] == "u" or length == 0 else a >> min(pos + length - 1, msb) & 1
        d = 0
        for i in range(msb + 1):
            bit = a >> pos + i & 1 if i < length and pos + i <= msb else sign
            d |= bit << i
        return d

    expected = [extract(*map(int, row)) for row in zip(a, pos, length)]
    np.testing.assert_array_equal(got, np.array(expected, a.dtype))


@pytest.mark.parametrize("bits", [32, 64])
def test_bfi(bits: int) -> None:
    """f = b; for (i < len && pos + i <= msb) f[pos + i] = a[i] (PTX ISA 9.7.8.2)."""
    positions, lengths = np.meshgrid([0, 1, 7, 31, 32, 33, 63, 64, 255], [0, 1, 2, 8, 31, 32, 33, 63, 64, 255])
    pos, length = (np.repeat(x.ravel(), 4).astype(np.uint32) for x in (positions, lengths))
    a, b = RNG.integers(0, 2**bits, (2, len(pos)), dtype=f"u{bits // 8}")
    got = apply(f"bfi.b{bits} %x, %a, %b, %c, %d;", a, b, pos, length, out=a.dtype)

    def insert(a: int, b: int, pos: int, length: int) -> int:
        for i in range(length):
            if pos + i < bits:
                b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
        return b

    np.testing.assert_array_equal(got, np.array([insert(*map(int, row)) for row in zip(a, b, pos, length)], a.dtype))


@pytest.mark.parametrize("bits", [32, 64])
def test_popc_clz_brev(bits: int) -> None:
    a, _ = pairs(bits)
    count, zeros = apply(f"popc.b{bits} %x, %a; clz.b{bits} %y, %a;", a, out=(np.uint32, np.uint32))
    backwards = apply(f"brev.b{bits} %x, %a;", a, out=a.dtype)
    texts = [f"{int(v):0{bits}b}" for v in a]
    np.testing.assert_array_equal(count, [text.count("1") for text in texts])
    np.testing.assert_array_equal(zeros, [bits - len(text.lstrip("0")) for text in texts])
    np.testing.assert_array_equal(backwards, np.array([int(text[::-1], 2) for text in texts], a.dtype))


def test_lop3_all_tables() -> None:
    """Bit i of the result is bit (a_i b_i c_i) of the table."""
    a, b, c = RNG.integers(0, 2**32, (3, 8), dtype=np.uint32)
    bits = [np.unpackbits(x.view(np.uint8)).astype(int) for x in (a, b, c)]
    index = 4 * bits[0] + 2 * bits[1] + bits[2]
    for first in range(0, 256, 4):
        tables = range(first, first + 4)
        asm = "".join(f"lop3.b32 %{'xyzw'[i]}, %a, %b, %c, {table:#x};" for i, table in enumerate(tables))
        for table, got in zip(tables, apply(asm, a, b, c, out=(np.uint32,) * 4)):
            np.testing.assert_array_equal(np.unpackbits(got.view(np.uint8)), table >> index & 1, err_msg=hex(table))


def _bytes(words: np.ndarray) -> np.ndarray:
    return words.view(np.uint8).reshape(-1, 4)


def test_prmt_generic() -> None:
    """All 16 selectors in every position: bits 0-2 pick a byte of {b, a}, bit 3 replicates its sign."""
    selector = np.arange(16)
    control = np.concatenate([(selector << 4 * i | 0x3210 & ~(0xF << 4 * i)) for i in range(4)]).astype(np.uint32)
    control = np.concatenate([control, RNG.integers(0, 2**16, 200).astype(np.uint32)])
    a, b = RNG.integers(0, 2**32, (2, len(control)), dtype=np.uint32)
    got = _bytes(apply("prmt.b32 %x, %a, %b, %c;", a, b, control, out=np.uint32))
    source = np.concatenate([_bytes(a), _bytes(b)], axis=1)
    for i in range(4):
        nibble = control >> 4 * i & 15
        byte = source[np.arange(len(a)), nibble & 7]
        np.testing.assert_array_equal(got[:, i], np.where(nibble >= 8, np.where(byte >= 128, 255, 0), byte))


#: The table of PTX ISA 9.7.9.7, as written there: d.b3 d.b2 d.b1 d.b0 for control values 0 to 3.
PRMT_MODES = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


@pytest.mark.parametrize("mode", PRMT_MODES)
def test_prmt_modes(mode: str) -> None:
    control = np.arange(64, dtype=np.uint32)  # only the two low bits count
    a, b = RNG.integers(0, 2**32, (2, 64), dtype=np.uint32)
    got = _bytes(apply(f"prmt.b32.{mode} %x, %a, %b, %c;", a, b, control, out=np.uint32))
    source = np.concatenate([_bytes(a), _bytes(b)], axis=1)
    for i, row in enumerate(PRMT_MODES[mode][c & 3] for c in range(64)):
        np.testing.assert_array_equal(got[i], [source[i, int(digit)] for digit in reversed(row)])


def test_distances_of_bytes() -> None:
    """Of unsigned bytes, each alone, whatever the operand has whose bytes a mask would keep."""
    a, b, c = RNG.integers(0, 2**32, (3, 200), dtype=np.uint32)
    got = _bytes(apply("vabsdiff4.u32.u32.u32 %x, %a, %b, %c;", a, b, c, out=np.uint32))
    np.testing.assert_array_equal(got, np.abs(_bytes(a).astype(int) - _bytes(b).astype(int)))


@pytest.mark.parametrize("name", ["vabsdiff4.u32.u32.u32.add", "vabsdiff4.u32.s32.u32"])
def test_distances_of_other_bytes_are_refused(name: str) -> None:
    one = np.ones(1, np.uint32)
    with pytest.raises(EmulatorError, match="vabsdiff4 needs"):
        apply(f"{name} %x, %a, %b, %c;", one, one, one, out=np.uint32)


@pytest.mark.parametrize("first", ["u32", "s32"])
@pytest.mark.parametrize("second", ["u32", "s32"])
def test_dp4a(first: str, second: str) -> None:
    a, b, c = RNG.integers(0, 2**32, (3, 100), dtype=np.uint32)
    got = apply(f"dp4a.{first}.{second} %x, %a, %b, %c;", a, b, c, out=np.uint32)
    parts = [x.view(np.int8 if kind == "s32" else np.uint8).astype(int) for x, kind in ((a, first), (b, second))]
    total = (parts[0] * parts[1]).reshape(-1, 4).sum(axis=1) + c.view(np.int32)
    np.testing.assert_array_equal(got, (total & 0xFFFFFFFF).astype(np.uint32))
