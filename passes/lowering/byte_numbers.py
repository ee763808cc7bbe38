"""Rules of `lower-tiles` for numbers of 8 bits: codes to bytes, and f32 to bytes (`dialect.formats.byte_codes`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm
from lowbit.dialect.errors import PassError
from lowbit.dialect.formats.byte_codes import column_of, moves
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A, MMA_M16N8K32_A
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.codes import places_of
from lowbit.passes.lowering.context import FP8, LoweringContext, int_attr, text_attr
from lowbit.passes.lowering.fragment import Fragment, column_parts, fragment_blocks
from lowbit.passes.lowering.registry import lowers


@lowers(ops.DecodeBytesOp)
def decode_bytes(op: Any, c: LoweringContext) -> None:
    """Registers of A fragments [16, 32]: each has the bytes of a row from one 16 x 16 block of codes."""
    codes, reg = c.tiles[op.source], Reg.of(op.result.type)
    format_, compute = codes.reg.element, ops.BYTES[str(reg.element)]
    if not isinstance(format_, DType):
        raise PassError(f"lower-tiles: nothing to decode in {format_}")
    if compute == "f8e4m3":
        c.require(FP8, op.operation.name)
    places = places_of(format_, codes.reg.layout)
    registers_of = _registers_of_a_row(fragment_blocks(codes.reg.layout, MMA_M16N8K16_A), reg)
    zero, minus = _zeros_of(op, c, reg), _MINUS[compute]
    signed = str(reg.element) == "i8" and zero is None

    def register(i: int) -> Any:
        joined = _joined(codes, format_, compute, [places[of] for of in registers_of(i)], signed)
        return joined if zero is None else minus(joined, zero(i))

    c.tiles[op.result] = Fragment(reg, "word", register)


Place = tuple[int, int]
"""The row and the column of a fragment, counted in the part of a tile that a thread has."""


def _registers_of_a_row(places: Sequence[Place], result: Reg) -> Callable[[int], tuple[int, int]]:
    """Returns which two registers of 16-bit fragments, whose places are given in order, have the numbers of register i
    of 8-bit ones."""
    blocks = {place: i for i, place in enumerate(places)}
    fragments = fragment_blocks(result.layout, MMA_M16N8K32_A)

    def registers_of(i: int) -> tuple[int, int]:
        row, column = fragments[i // 4]
        half, lower = divmod(i % 4, 2)  # which 16 columns, and whether these are rows g + 8
        first = 4 * blocks[row, 2 * column + half] + lower
        return first, first + 2

    return registers_of


def _joined(codes: Fragment, format_: DType, compute: Any, both: list[tuple[int, int]], signed: bool) -> Any:
    """Four bytes from the words of two registers, each given by the first word of its run and its number there. signed:
    whether their highest bits are turned, which the instructions that mask do, too."""
    masks: dict[tuple[int, int], int] = {}
    for which, word, shift, mask in moves(format_, compute, [number for _, number in both], signed):
        key = both[which][0] + word, shift
        masks[key] = masks.get(key, 0) | mask
    result = emit.constant(_HIGHEST) if signed else None
    for (word, shift), mask in masks.items():
        moved = emit.shift_right(codes.register(word), shift)
        if result is None:
            result = emit.mask(moved, mask)
        else:
            result = (emit.mask_xor if signed else emit.mask_or)(moved, mask, result)
    return result


_EVERY_BYTE, _HIGHEST = 0x01010101, 0x80808080


def _zeros_of(op: Any, c: LoweringContext, reg: Reg) -> Callable[[int], Any] | None:
    """Returns what gives the zero of register i, in each of four bytes; None where nothing is subtracted."""
    if op.offset is not None:
        offset = int_attr(op, "offset") * _EVERY_BYTE
        return lambda i: emit.constant(offset)
    if not op.zeros:
        return None
    zeros = [c.tiles[each] for each in op.zeros]
    slots, made = zeros[0].reg.layout.slots_for(reg.layout), dict[tuple[int, int], Any]()
    parts = column_parts(reg.layout, MMA_M16N8K32_A, len(zeros))

    def zero(i: int) -> Any:
        part, slot = parts[i // 4], slots[4 * i]
        if (part, slot) not in made:
            wide = arith.extui(emit.integer(), zeros[part].scalar(slot))
            made[part, slot] = arith.muli(wide, emit.constant(_EVERY_BYTE))
        return made[part, slot]

    return zero


def _signed_minus(codes: Any, zeros: Any) -> Any:
    """Four codes less their zeros as i8: bit 7 keeps a byte from borrowing of the next."""
    high = emit.constant(_HIGHEST)
    return arith.xori(arith.subi(arith.ori(codes, high), zeros), high)


def _e4m3_minus(codes: Any, zeros: Any) -> Any:
    """Four codes less their zeros, d from -15 to 15, as f8e4m3: |d|, which is the number |d| * 2^-9, and a sign.

    A byte of 128 + d has its highest bit set unless d is negative.
    """
    signs = emit.constant(_HIGHEST)
    shifted = arith.addi(codes, arith.subi(signs, zeros))
    negative = emit.mask(arith.xori(shifted, emit.constant(0xFFFFFFFF)), _HIGHEST)
    return arith.ori(_distances(codes, zeros), negative)


def _distances(a: Any, b: Any) -> Any:
    """|a - b| of each of four unsigned bytes (PTX ISA 9.7.17): one instruction on GPUs since sm_50."""
    text = "vabsdiff4.u32.u32.u32 $0, $1, $2, $1;"
    return llvm.inline_asm(emit.integer(), [a, b], text, "=r,r,r", asm_dialect=0)


_MINUS: dict[str, Callable[[Any, Any], Any]] = {"f8e4m3": _e4m3_minus, "i8": _signed_minus}


# -- numbers to bytes


@lowers(ops.EncodeFragmentsOp)
def encode_fragments(op: Any, c: LoweringContext) -> None:
    reg, places, pairs, column = Reg.of(op.result.type), list[Place](), list[Callable[[], Any]](), 0
    if reg.element == "f8E4M3FN":
        c.require(FP8, op.operation.name)
    for source in (c.tiles[each] for each in op.sources):
        layout = source.reg.layout
        places += [(row, column + within) for row, within in fragment_blocks(layout, MMA_M16N8K16_A)]
        pairs += [partial(source.pair, i) for i in range(layout.locals // 2)]
        column += layout.shape[-1] // BLOCK_K
    registers_of, row = _registers_of_a_row(places, reg), _ROWS[str(reg.element)]
    c.tiles[op.result] = Fragment(reg, "word", lambda i: row(*(pairs[of]() for of in registers_of(i))))


def _e4m3_row(near: Any, far: Any) -> Any:
    """Two pairs of f16, of which the second is eight columns behind the first, as bytes in the order of columns."""
    lines = (
        "{.reg .b16 a, b; .reg .b32 both;",
        "cvt.rn.satfinite.e4m3x2.f16x2 a, $1;",
        "cvt.rn.satfinite.e4m3x2.f16x2 b, $2;",
        "mov.b32 both, {a, b};",
        "prmt.b32 $0, both, 0, 0x3120;}",
    )
    words = [llvm.bitcast(emit.integer(), pair) for pair in (near, far)]
    return llvm.inline_asm(emit.integer(), words, "\n".join(lines), "=r,r,r", asm_dialect=0)


def _i8_row(near: Any, far: Any) -> Any:
    """The lowest bytes of the same."""
    low, high = (llvm.bitcast(emit.integer(), pair) for pair in (near, far))
    return emit.permute_bytes(low, high, 0x6240)


_ROWS: dict[str, Callable[[Any, Any], Any]] = {"f8E4M3FN": _e4m3_row, "i8": _i8_row}


@lowers(ops.EncodeBytesOp)
def encode_bytes(op: Any, c: LoweringContext) -> None:
    source, reg = c.tiles[op.source], Reg.of(op.result.type)
    kind = text_attr(op, "kind")
    to_word = _WORDS[kind]
    if kind == "f8e4m3":
        c.require(FP8, op.operation.name)

    def word(i: int) -> Any:
        first, byte = BLOCK_K * (i // 4), 4 * (i % 4)
        return to_word([source.scalar(first + column_of(byte + j)) for j in range(4)])

    c.tiles[op.result] = Fragment(reg, "word", word)


def _e4m3_word(x: list[Any]) -> Any:
    """Four numbers to f8e4m3, the first in the lowest byte."""
    lines = (
        "{.reg .b16 a, b;",
        "cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;",
        "cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;",
        "mov.b32 $0, {a, b};}",
    )
    return llvm.inline_asm(emit.integer(), x, "\n".join(lines), "=r,f,f,f,f", asm_dialect=0)


def _i8_word(x: list[Any]) -> Any:
    """Four numbers to signed bytes, the first in the lowest."""
    low, high, *_ = (_bytes_of_two(x[i], x[i + 1]) for i in (0, 2))
    return arith.ori(low, emit.shift_right(high, -16))


def _bytes_of_two(a: Any, b: Any) -> Any:
    low, high = (emit.mask(_integer(x), 0xFF) for x in (a, b))
    return arith.ori(low, emit.shift_right(high, -8))


def _integer(x: Any) -> Any:
    """The nearest integer from -128 to 127."""
    number = llvm.inline_asm(emit.integer(), [x], "cvt.rni.s32.f32 $0, $1;", "=r,f", asm_dialect=0)
    return arith.maxsi(arith.minsi(number, emit.constant(127)), emit.constant(-128))


_WORDS: dict[str, Callable[[list[Any]], Any]] = {"f8e4m3": _e4m3_word, "i8": _i8_word}


def _round_e4m3(x: Any) -> Any:
    lines = (
        "{.reg .b16 a, b; .reg .b32 c; .reg .f32 zero;",
        "mov.f32 zero, 0f00000000;",
        "cvt.rn.satfinite.e4m3x2.f32 a, zero, $1;",
        "cvt.rn.f16x2.e4m3x2 c, a;",
        "mov.b32 {a, b}, c;",
        "cvt.f32.f16 $0, a;}",
    )
    return llvm.inline_asm(ir.F32Type.get(), [x], "\n".join(lines), "=f,f", asm_dialect=0)


def _round_i8(x: Any) -> Any:
    return arith.sitofp(ir.F32Type.get(), _integer(x))


ROUND: dict[str, Callable[[Any], Any]] = {"f8e4m3": _round_e4m3, "i8": _round_i8}
"""f32 to the f32 of the byte that it becomes."""
