"""Rules of `lower-tiles` for tiles of codes, to numbers and back; `dialect.formats.packing` says where each code is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, WORDS_PER_UNIT, Packing, Piece, run_of
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.layouts.shared_memory import BANK_BYTES, BANKS
from lowbit.dialect.types import Reg, format_attr
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import LoweringContext
from lowbit.passes.lowering.fragment import Fragment, column_parts, fragment_blocks, pairs_at
from lowbit.passes.lowering.registry import lowers


@lowers(ops.DecodeOp)
def decode(op: Any, c: LoweringContext) -> None:
    """Registers of A fragments, each from the words of a lane."""
    codes = c.tiles[op.source]
    reg, format_ = Reg.of(op.result.type), _format(codes, "decode")
    shifts = [pairs_at(f, f.reg.layout.slots_for(reg.layout)) for f in (c.tiles[v] for v in op.shifts)]
    parts = column_parts(reg.layout, MMA_M16N8K16_A, len(shifts))

    def shift(i: int) -> Any:
        """Returns what is added to pair i."""
        return shifts[parts[i // 4]](i)

    def decoded(i: int, words: list[Any], register: Any, vector: Any) -> Any:
        rest = words, format_attr(format_), register, op.exponent, vector
        if shifts:
            return ops.DecodeShiftedPairOp(shift(i), *rest).result
        pair = ops.DecodePairOp(*rest)
        pair.offset = op.offset
        return pair.result

    c.tiles[op.result] = _pairs_of_words(codes, reg, format_, decoded)


@lowers(ops.LookupOp)
def lookup(op: Any, c: LoweringContext) -> None:
    """The same, each from a table in shared memory."""
    codes = c.tiles[op.source]
    reg, format_ = Reg.of(op.result.type), _format(codes, "look up")
    table = c.places[op.table]

    def looked_up(_: int, words: list[Any], register: Any, vector: Any) -> Any:
        column = arith.muli(c.thread_digit(BANKS), emit.constant(BANK_BYTES))
        return ops.LookupPairOp(table.base, column, words, format_attr(format_), register, vector).result

    c.tiles[op.result] = _pairs_of_words(codes, reg, format_, looked_up)


def _format(codes: Fragment, purpose: str) -> DType:
    format_ = codes.reg.element
    if not isinstance(format_, DType):
        raise PassError(f"lower-tiles: nothing to {purpose} in {format_}")
    return format_


def _pairs_of_words(
    codes: Fragment, reg: Reg, format_: DType, make: Callable[[int, list[Any], Any, Any], Any]
) -> Fragment:
    """Registers of A fragments: make(i, words, number in the run, type) of register i, from the words of its pieces."""
    places, run = places_of(format_, reg.layout), run_of(format_.bits)
    vector = ir.VectorType.get([2], ir.Type.parse(str(reg.element)))

    def pair(i: int) -> Any:
        first, register = places[i]
        words = [codes.register(first + piece.word) for piece in run[register]]
        return make(i, words, ir.IntegerAttr.get(emit.integer(64), register), vector)

    return Fragment(reg, "pair", pair)


def places_of(format_: DType, layout: Layout) -> list[tuple[int, int]]:
    """Returns for every register (a pair of codes) of a thread which of its words begins the run, and the register's
    number in the run."""
    blocks = fragment_blocks(layout, MMA_M16N8K16_A)
    packing = Packing(format_.bits, ROWS, BLOCK_K * (1 + max(column for _, column in blocks)))  # of one warp
    places: list[tuple[int, int]] = []
    for row_block, k_block in blocks:
        chunk, block = divmod(k_block, packing.chunk // BLOCK_K)
        first = (row_block * packing.chunks + chunk) * packing.units * WORDS_PER_UNIT
        for register in range(4):
            word, number = packing.place(block, register)
            places.append((first + word, number))
    return places


@lowers(ops.EncodeOp)
def encode(op: Any, c: LoweringContext) -> None:
    """Words of a lane from its codes: the inverse of where `decode` looks for them."""
    numbers, there = c.tiles[op.source], [c.tiles[tile] for tile in op.there]
    reg = Reg.of(op.result.type)
    format_ = reg.element
    if not isinstance(format_, DType):
        raise PassError(f"lower-tiles: {format_} is no low-bit format to encode in")
    held: dict[int, list[tuple[int, Piece]]] = {}  # word -> registers with a piece in it
    for i, (first, register) in enumerate(places_of(format_, reg.layout)):
        for piece in run_of(format_.bits)[register]:
            held.setdefault(first + piece.word, []).append((i, piece))
    sign = 1 << (format_.bits - 1) if format_.kind == "int" else 0  # to offset binary

    def make(word: int) -> Any:
        total = emit.constant(0)
        for (i, piece), half in itertools.product(held[word], range(2)):
            code = arith.extui(emit.integer(), numbers.scalar(2 * i + half))
            if sign:
                code = arith.xori(code, emit.constant(sign))
            for condition in there:
                code = arith.select(condition.scalar(2 * i + half), code, emit.constant(0))
            bits = emit.mask(emit.shift_right(code, piece.low), (1 << piece.bits) - 1)
            total = arith.ori(total, emit.shift_right(bits, -(piece.shift + 16 * half)))
        return total

    c.tiles[op.result] = Fragment(reg, "word", make)
