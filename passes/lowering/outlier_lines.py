"""Lines of outliers (`dialect.formats.outliers`) as code of one thread: where they begin, and what a word says."""

from __future__ import annotations

from typing import Any, NamedTuple

from lowbit.dialect.bindings import arith, ir, llvm
from lowbit.dialect.formats.outliers import LINE, ROW_BITS, SPAN, VALUE_SHIFT
from lowbit.dialect.formats.packing import ROWS
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place

WORD = 4  # bytes


class Outlier(NamedTuple):
    """A decoded word: row of the row block, column of the weight, value in f32."""

    row: Any
    column: Any
    value: Any


def outlier(word: Any, first_column: Any) -> Outlier:
    """Reads a word of a line."""
    half = arith.trunci(emit.integer(16), emit.shift_right(word, VALUE_SHIFT))
    value = arith.extf(ir.F32Type.get(), emit.bitcast(ir.F16Type.get(), half))
    beyond = emit.mask(emit.shift_right(word, ROW_BITS), SPAN - 1)
    return Outlier(emit.mask(word, ROWS - 1), arith.addi(first_column, beyond), value)


def outlier_of(word: Any, head: Any, lane: Any) -> Outlier:
    """Reads a lane's word of a line; of the head, and where the line is not full, an outlier of value 0."""
    is_head = arith.cmpi(arith.CmpIPredicate.eq, lane, emit.constant(0))
    return outlier(arith.select(is_head, emit.constant(0), word), head)


def word(place: Place, index: Any, static: int = 0, words: int = 1) -> Any:
    """Loads words of the outliers from `index` (i64) on."""
    offset = arith.muli(index, emit.constant(WORD, 64))
    address = emit.offset_bytes(place.base, dynamic=offset, static=WORD * static)
    type_ = emit.integer() if words == 1 else ir.VectorType.get([words], emit.integer())
    return llvm.load(type_, address, alignment=WORD * words)


def lines_of(table: Place, block: Any) -> tuple[Any, Any]:
    """Loads where the lines of a row block begin and end; of one beyond the last, those of the last."""
    last = emit.constant(table.type.shape[0] - 2)
    index = arith.extui(emit.integer(64), arith.minsi(block, last))
    return word(table, index), word(table, index, 1)


def first_word(line: Any) -> Any:
    """The number of a line's first word."""
    return arith.muli(arith.extui(emit.integer(64), line), emit.constant(LINE, 64))
