"""Integer arithmetic, logic, shifts and bit manipulation (PTX ISA 9.7.1, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from pylib.emulator.decoder import Array, Dest, Op, dtype_of, instruction
from pylib.emulator.faults import Fault, Unsupported
from pylib.emulator.float_arithmetic import float_binary, float_fma, float_unary, is_float
from pylib.emulator.machine import Mask, Step
from pylib.emulator.ptx import BITS

INTEGERS = tuple(f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64))
PAIRS = ("u16x2", "s16x2")


def elementwise(dest: Dest, function: Callable[..., Any], *sources: Array) -> Step:
    """d = function(sources): computed for every lane, kept for the active ones."""
    match sources:
        case (a,):
            return lambda mask: dest.write(function(a), mask)
        case (a, b):
            return lambda mask: dest.write(function(a, b), mask)
        case _:
            return lambda mask: dest.write(function(*sources), mask)


def _integer_binary(op: Op, function: Callable[[Array, Array], Array], packed: bool = False) -> Step:
    kind = op.type(*INTEGERS, *(PAIRS if packed else ()))
    dest, a, b = op.dest(_raw(kind)), op.source(_raw(kind)), op.source(_raw(kind))
    if kind in PAIRS:
        half = np.dtype("i2" if kind == "s16x2" else "u2")
        dest = Dest(dest.register, dest.view.view(half).reshape(-1, 2))
        a, b = (np.atleast_1d(x).view(half).reshape(-1, 2) for x in (a, b))
    return elementwise(dest, function, a, b)


def _raw(kind: str) -> str:
    return "b32" if kind in PAIRS else kind


@instruction("add", "sub")
def _add(op: Op) -> Step:
    name = op.instr.opcode
    if is_float(op):
        return float_binary(op, name)
    if op.flag("sat"):
        op.type("s32")
        dest, a, b = op.dest("s32"), op.source("s32"), op.source("s32")
        wide = np.add if name == "add" else np.subtract
        return elementwise(
            dest,
            lambda a, b: np.clip(wide(a, b, dtype=np.int64), -(2**31), 2**31 - 1).astype(np.int32),
            a,
            b,
        )
    return _integer_binary(op, np.add if name == "add" else np.subtract, packed=name == "add")


@instruction("min", "max")
def _min(op: Op) -> Step:
    if is_float(op):
        return float_binary(op, op.instr.opcode)
    return _integer_binary(op, np.minimum if op.instr.opcode == "min" else np.maximum, packed=True)


@instruction("mul")
def _mul(op: Op) -> Step:
    if is_float(op):
        return float_binary(op, "mul")
    part = op.choice("lo", "hi", "wide")
    kind = op.type(*INTEGERS)
    wide = _widened(kind) if part == "wide" else kind
    dest, a, b = op.dest(wide), op.source(kind), op.source(kind)
    return elementwise(dest, _product(part, kind), a, b)


@instruction("mad")
def _mad(op: Op) -> Step:
    if is_float(op):
        return float_fma(op)
    part = op.choice("lo", "hi", "wide")
    kind = op.type(*INTEGERS)
    wide = _widened(kind) if part == "wide" else kind
    dest, a, b, c = op.dest(wide), op.source(kind), op.source(kind), op.source(wide)
    product = _product(part, kind)
    return elementwise(dest, lambda a, b, c: product(a, b) + c, a, b, c)


def _widened(kind: str) -> str:
    if BITS[kind] == 64:
        raise Unsupported(f"mul.wide.{kind}: the product has 128 bits")
    return f"{kind[0]}{2 * BITS[kind]}"


def _product(part: str, kind: str) -> Callable[[Array, Array], Array]:
    if part == "lo":
        return np.multiply
    if part == "hi" and BITS[kind] == 64:
        high = np.frompyfunc(lambda a, b: int(a) * int(b) >> 64, 2, 1)
        return lambda a, b: np.asarray(high(a, b)).astype(dtype_of(kind))
    wide = dtype_of(_widened(kind))
    if part == "wide":
        return lambda a, b: np.multiply(a, b, dtype=wide)
    return lambda a, b: (np.multiply(a, b, dtype=wide) >> BITS[kind]).astype(dtype_of(kind))


@instruction("div", "rem")
def _div(op: Op) -> Step:
    if is_float(op):
        if op.instr.opcode == "rem":
            raise Unsupported("rem has no floating-point form")
        return float_binary(op, "div")
    kind = op.type(*INTEGERS)
    dest, a, b = op.dest(kind), op.source(kind), op.source(kind)
    remainder = op.instr.opcode == "rem"

    def step(mask: Mask) -> None:
        zero = np.broadcast_to(b == 0, (op.block.lanes,))
        zero = zero if mask is None else zero & mask
        if zero.any():
            raise Fault("division by zero", int(np.flatnonzero(zero)[0]))
        # C's division: the quotient is cut towards zero, the remainder has the sign of a.
        quotient = a // b
        rest = a - quotient * b
        if kind[0] == "s":
            wrong = (rest != 0) & ((a < 0) != (b < 0))
            quotient, rest = quotient + wrong, rest - wrong * b
        dest.write(rest if remainder else quotient, mask)

    return step


@instruction("neg", "abs")
def _neg(op: Op) -> Step:
    if is_float(op):
        return float_unary(op, op.instr.opcode)
    kind = op.type("s16", "s32", "s64")
    dest, a = op.dest(kind), op.source(kind)
    return elementwise(dest, np.negative if op.instr.opcode == "neg" else np.abs, a)


@instruction("and", "or", "xor")
def _and(op: Op) -> Step:
    kind = op.type("pred", "b16", "b32", "b64")
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op.instr.opcode]
    dest = op.dest(kind)
    if kind == "pred":
        p, q = op.predicate(), op.predicate()
        return lambda mask: dest.write(function(p(), q()), mask)
    return elementwise(dest, function, op.source(kind), op.source(kind))


@instruction("not")
def _not(op: Op) -> Step:
    kind = op.type("pred", "b16", "b32", "b64")
    dest = op.dest(kind)
    if kind == "pred":
        p = op.predicate()
        return lambda mask: dest.write(~p(), mask)
    return elementwise(dest, np.invert, op.source(kind))


@instruction("shl", "shr")
def _shift(op: Op) -> Step:
    """Shift amounts beyond the width act as the width."""
    left = op.instr.opcode == "shl"
    kind = op.type(*(f"b{n}" for n in (16, 32, 64)), *(() if left else INTEGERS))
    bits = BITS[kind]
    dest, a, amount = op.dest(kind), op.source(kind), op.source("u32")
    if amount.ndim == 0 and int(amount) < bits:
        fixed = a.dtype.type(int(amount))
        return elementwise(dest, np.left_shift if left else np.right_shift, a, np.array(fixed))

    def shift(a: Array, n: Array) -> Array:
        clamped = np.minimum(n, bits - 1).astype(a.dtype)
        if kind[0] == "s":
            return a >> clamped
        return np.where(n < bits, a << clamped if left else a >> clamped, a.dtype.type(0))

    return elementwise(dest, shift, a, amount)


@instruction("shf")
def _funnel(op: Op) -> Step:
    """Shift {b, a}, a low: left gives the high word, right the low word."""
    left = op.choice("l", "r") == "l"
    clamp = op.choice("wrap", "clamp") == "clamp"
    op.type("b32")
    dest, a, b, amount = op.dest("b32"), op.source("b32"), op.source("b32"), op.source("u32")

    def shift(a: Array, b: Array, c: Array) -> Array:
        n = (np.minimum(c, 32) if clamp else c & 31).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return elementwise(dest, shift, a, b, amount)


@instruction("bfe")
def _bfe(op: Op) -> Step:
    """The field of `c` bits from bit `b` on; bits above the word are copies of the field's sign, or zero."""
    kind = op.type("u32", "s32", "u64", "s64")
    bits, signed = BITS[kind], kind[0] == "s"
    dest, a, start, length = op.dest(kind), op.source(kind), op.source("u32"), op.source("u32")

    def field() -> tuple[Array, Array, Array]:
        """How far to shift left and then right, and which bits to keep."""
        position, count = (start & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
        top = np.minimum(position + count, bits) if signed else np.array(bits)
        left = bits - np.maximum(top, 1)  # puts the field's sign at the top
        right = np.minimum(left + position, bits - 1)
        ones = np.where(count >= 64, ~np.uint64(0), (np.uint64(1) << (count & 63).astype(np.uint64)) - np.uint64(1))
        kept = np.where(count > 0, ~np.uint64(0), np.uint64(0)) if signed else np.where(position < bits, ones, 0)
        return left.astype(a.dtype), right.astype(a.dtype), kept.astype(f"u{bits // 8}").view(a.dtype)

    fixed = field() if start.ndim == length.ndim == 0 else None

    def step(mask: Mask) -> None:
        left, right, kept = fixed or field()
        dest.write(((a << left) >> right) & kept, mask)

    return step


@instruction("bfi")
def _bfi(op: Op) -> Step:
    """The low `d` bits of a, put into b from bit `c` on."""
    kind = op.type("b32", "b64")
    bits = BITS[kind]
    dest, a, b = op.dest(kind), op.source(kind), op.source(kind)
    start, length = op.source("u32"), op.source("u32")

    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        position, count = (c & 0xFF).astype(np.uint64), (d & 0xFF).astype(np.uint64)
        ones = np.where(count >= 64, np.uint64(2**64 - 1), (np.uint64(1) << np.minimum(count, 63)) - np.uint64(1))
        low = np.minimum(position, 63)
        field = np.where(position < bits, ones << low, np.uint64(0))
        value = np.where(position < bits, a.astype(np.uint64) << low, np.uint64(0))
        return ((b & ~field) | (value & field)).astype(b.dtype)

    return elementwise(dest, insert, a, b, start, length)


@instruction("popc", "clz", "brev")
def _bits(op: Op) -> Step:
    name = op.instr.opcode
    kind = op.type("b32", "b64")
    dest = op.dest(kind if name == "brev" else "u32")
    function = {"popc": np.bitwise_count, "clz": _leading_zeros, "brev": _reversed}[name]
    return elementwise(dest, function, op.source(kind))


def _leading_zeros(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    filled = a.copy()
    for n in (1, 2, 4, 8, 16, 32)[: bits.bit_length() - 1]:
        filled |= filled >> a.dtype.type(n)
    return (bits - np.bitwise_count(filled)).astype(np.uint32)


def _reversed(a: Array) -> Array:
    size = a.dtype.itemsize
    bits = np.unpackbits(np.atleast_1d(a).view(np.uint8).reshape(-1, size), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype).ravel()


@instruction("lop3")
def _lop3(op: Op) -> Step:
    """Any function of three bits: bit 4 a + 2 b + c of the table."""
    op.type("b32")
    dest, *sources = op.dest("b32"), op.source("b32"), op.source("b32"), op.source("b32")
    table = op.immediate()
    if not 0 <= table < 256:
        raise Unsupported(f"lop3 table {table} is not 0 to 255")
    # As the exclusive or of products (Zhegalkin polynomial): a product's coefficient is the parity of the table
    # over all inputs that lie within it.
    products = [
        [source for bit, source in zip((4, 2, 1), sources) if term & bit]
        for term in range(8)
        if sum(table >> i & 1 for i in range(8) if i | term == term) & 1
    ]
    one = np.full(1, 2**32 - 1, np.uint32)

    def step(mask: Mask) -> None:
        result: Array = np.zeros(1, np.uint32)
        for factors in products:
            result = result ^ reduce(np.bitwise_and, factors, one)
        dest.write(result, mask)

    return step


#: Bytes d0 to d3 that the modes of prmt pick from {b, a} for the values 0 to 3 of the low bits of c.
_PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@instruction("prmt")
def _prmt(op: Op) -> Step:
    """Each nibble of the selector picks a byte of {b, a}; its top bit asks for the byte's sign instead."""
    mode = op.flag(*_PRMT_MODES)
    op.type("b32")
    dest, a, b, c = op.dest("b32"), op.source("b32"), op.source("b32"), op.source("b32")
    lanes = op.block.lanes
    both = np.empty((lanes, 2), np.uint32)
    source, picked = both.view(np.uint8), np.empty((lanes, 4), np.uint8)
    start = 8 * np.arange(lanes)[:, None]

    def step(mask: Mask) -> None:
        both[:, 0], both[:, 1] = a, b
        selector = np.array(_PRMT_MODES[mode], np.uint32)[c & 3] if mode else c
        if selector.ndim == 0:
            for i in range(4):
                nibble = int(selector) >> 4 * i & 15
                byte = source[:, nibble & 7]
                picked[:, i] = byte.view(np.int8) >> 7 if nibble & 8 else byte
        else:
            nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
            byte = source.ravel()[start + (nibbles & 7)]
            picked[:] = np.where(nibbles & 8, byte.view(np.int8) >> 7, byte.view(np.int8)).view(np.uint8)
        dest.write(picked.view(np.uint32)[:, 0], mask)

    return step


@instruction("dp4a")
def _dp4a(op: Op) -> Step:
    """c plus the dot product of four bytes; each operand has its own signedness, c's follows from both."""
    if len(op.modifiers) != 2 or not set(op.modifiers) <= {"u32", "s32"}:
        raise Unsupported("dp4a needs two of .u32, .s32")
    second, first = op.modifiers.pop(), op.modifiers.pop()
    kind = "u32" if first == second == "u32" else "s32"
    dest, a, b, c = op.dest(kind), op.source("b32"), op.source("b32"), op.source(kind)

    def parts(x: Array, kind: str) -> Array:
        return np.atleast_1d(x).view(np.int8 if kind == "s32" else np.uint8).reshape(-1, 4).astype(np.int64)

    def dot(a: Array, b: Array, c: Array) -> Array:
        return (c + (parts(a, first) * parts(b, second)).sum(axis=1)).astype(dest.view.dtype)

    return elementwise(dest, dot, a, b, c)
