"""The rule of `place_outliers`: the outliers of some columns go to the places where lanes read them as fragments.

A lane takes a word of each line, and writes its value if its column is one of the buffer's. The first lines have been
loaded; a row block that has more of them in these columns is dense, and the others are loaded one by one.
"""

from __future__ import annotations

from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, scf
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import BLOCK_K, ROWS
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import LoweringContext, when
from lowbit.passes.lowering.outlier_index import LineIndex, first_column, first_line, line_indexes, words_from
from lowbit.passes.lowering.outlier_lines import outlier
from lowbit.passes.lowering.outlier_share import WARP, place_of_warp, word_if
from lowbit.passes.lowering.registry import lowers

_DIGITS = ((0, 1, 8, 32), (1, 2, 4, 8), (1, 8, 2, 4), (0, 8, 2, 2), (1, 1, 2, 1))
"""Of an element's place in a fragment (`MMA_M16N8K16_A`): whether it is of the row or the column, and its divisor, size
and stride."""


@lowers(ops.PlaceOutliersOp)
def place_outliers(op: Any, c: LoweringContext) -> None:
    """Row block by row block."""
    c.pending.finish_reads()
    words, indexes = c.tiles[op.lines], line_indexes(c.tiles[op.index])
    count, every = words.reg.shape[2], words.registers("scalar")
    places = _Places(op, c)
    for row, index in enumerate(indexes):
        places.write(row, index, every[row * count : (row + 1) * count])


class _Places:
    """Where a warp's outliers go: what does not change from line to line."""

    def __init__(self, op: Any, c: LoweringContext) -> None:
        buffer, layout = c.places[op.buffer], c.tiles[op.index].reg.layout
        self._element, self._erase = str(buffer.type.element), bool(op.erases)
        _, self._row_stride, self._block_stride, *_ = buffer.type.strides
        self._columns = BLOCK_K * buffer.type.shape[2]
        self._table, self._lane = c.places[op.outliers], c.thread_digit(WARP)
        self._first = first_column(op, c, layout, self._columns)
        self._limit = arith.addi(self._first, emit.constant(self._columns))
        warp, row_block = place_of_warp(c, layout, ROWS)
        own = arith.muli(warp, emit.constant(buffer.type.strides[0] * self._bytes))
        own = arith.addi(own, arith.muli(row_block, emit.constant(self._row_stride * self._bytes)))
        self._own = emit.offset_bytes(buffer.base, dynamic=own)

    @property
    def _bytes(self) -> int:
        return ELEMENTS[self._element].bytes

    def write(self, row: int, index: LineIndex, words: list[Any]) -> None:
        """Writes the outliers of a row block, of which these lines have been loaded. A line that is there names a
        first outlier, and is 0 otherwise."""
        heads = [self._write_line(row, word) for word in words]
        there = arith.cmpi(arith.CmpIPredicate.ne, emit.of_lane(1, words[-1]), emit.constant(0))
        begins = arith.andi(there, emit.below(heads[-1], self._limit))
        when(begins, lambda: self._walk(row, index, len(words)))

    def _walk(self, row: int, index: LineIndex, skipped: int) -> None:
        """Goes on with the lines behind those that have been loaded, as long as they begin in these columns."""
        first = arith.addi(first_line(index, self._first, self._table, self._lane), emit.constant(skipped))
        integer = emit.integer()
        loop = scf.WhileOp([integer, integer], [first])
        before, after = loop.regions[0].blocks.append(integer), loop.regions[1].blocks.append(integer, integer)
        with ir.InsertionPoint(before):
            (line,) = before.arguments
            pointer, left = words_from(line, index, self._table, self._lane)
            word = word_if(pointer, 0, left)
            begins = emit.below(emit.of_lane(0, word), self._limit)
            scf.ConditionOp(arith.andi(emit.below(line, index.end), begins), [line, word])
        with ir.InsertionPoint(after):
            line, word = after.arguments
            self._write_line(row, word)
            scf.YieldOp([arith.addi(line, emit.constant(1))])

    def _write_line(self, row: int, word: Any) -> Any:
        """Writes what a line has of these columns, each lane its word. Returns the first column of the line."""
        head = emit.of_lane(0, word)
        mine = outlier(word, arith.subi(head, self._first))
        is_outlier = [arith.cmpi(arith.CmpIPredicate.ne, v, emit.constant(0)) for v in (self._lane, word)]
        inside = arith.cmpi(arith.CmpIPredicate.ult, mine.column, emit.constant(self._columns))
        value = emit.real(0.0, ir.F32Type.get()) if self._erase else mine.value
        when(arith.andi(arith.andi(*is_outlier), inside), lambda: self._store(row, mine.row, mine.column, value))
        return head

    def _store(self, row_block: int, row: Any, column: Any, value: Any) -> None:
        """Writes a number to where the lane that multiplies it reads it."""
        place = arith.muli(arith.divui(column, emit.constant(BLOCK_K)), emit.constant(self._block_stride))
        for of_column, divisor, size, stride in _DIGITS:
            digit = arith.divui((row, column)[of_column], emit.constant(divisor))
            digit = arith.remui(digit, emit.constant(size))
            place = arith.addi(place, arith.muli(digit, emit.constant(stride)))
        place = arith.muli(place, emit.constant(self._bytes))
        address = emit.offset_bytes(self._own, dynamic=place, static=row_block * self._row_stride * self._bytes)
        number = emit.convert(ir.Type.parse(self._element), value)
        llvm.store(number, address, alignment=self._bytes)
