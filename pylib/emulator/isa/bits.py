"""Bit fields, bytes and bits of a word (PTX ISA 9.7.1, 9.7.8, 9.7.9.7, 9.7.17).

shf, bfe, bfi, popc, clz, brev, lop3, prmt, vabsdiff4.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from lowbit.pylib.emulator.isa.integers import elementwise
from lowbit.pylib.emulator.machine.decoder import Op, instruction
from lowbit.pylib.emulator.machine.faults import Array, Unsupported
from lowbit.pylib.emulator.machine.step_results import Mask, Step
from lowbit.pylib.emulator.text.ptx import BITS


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


@instruction("vabsdiff4")
def _byte_distances(op: Op) -> Step:
    """|a - b| of each of four unsigned bytes. All bytes of the result are written, so none of c's is."""
    if op.modifiers != ["u32", "u32", "u32"]:
        raise Unsupported("vabsdiff4 needs .u32.u32.u32, without a mask, .sat or .add")
    op.modifiers.clear()
    dest, a, b, _ = op.dest("b32"), op.source("b32"), op.source("b32"), op.source("b32")

    def distances(a: Array, b: Array) -> Array:
        first, second = (np.atleast_1d(x).view(np.uint8) for x in (a, b))
        return (np.maximum(first, second) - np.minimum(first, second)).view(np.uint32)

    return elementwise(dest, distances, a, b)
