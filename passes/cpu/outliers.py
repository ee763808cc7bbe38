"""Outliers in host code: numbers in f16 that are added to single weights (`dialect.formats.outliers` has their lines).

They are few, so they are taken one after the other, in scalars. Products are exact and added to the sums in f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.outliers import ENTRIES, LINE, ROW_BITS, SPAN, VALUE_SHIFT
from lowbit.dialect.formats.packing import ROWS
from lowbit.passes.cpu.vector_ops import (
    Value,
    add,
    at,
    bits_and,
    constant,
    f32,
    i,
    i64,
    less,
    load,
    loop,
    loop_while,
    mul,
    scalar_type,
    shift_left,
    shift_right,
    store,
    when,
)
from lowbit.passes.cpu.weight import Weight
from lowbit.passes.cpu.worker import Task

_WORD = 4  # bytes


class Outlier(NamedTuple):
    """A decoded word: row of the row block and column of the weight (i64), value in f32."""

    row: Value
    column: Value
    value: Value


class Lines:
    """The outliers of a weight inside a function. One of several experts has its part of the lines of all: its row
    blocks are those from a task's `first_block` on."""

    def __init__(self, weight: Weight, task: Task) -> None:
        self.spec, self._base = weight.spec, weight.arrays["outliers"]
        self._first_block = task.integer("first_block")

    def of_block(self, block: Value) -> tuple[Value, Value]:
        """Returns the first word of a row block's lines, and the first after them."""
        entry = arith.addi(self._first_block, block)
        ends = [self._word(add(entry, more)) for more in (0, 1)]
        first, end = (shift_left(arith.extui(i(64), line), LINE.bit_length() - 1) for line in ends)
        return first, end

    def _word(self, index: Value) -> Value:
        return load(i(32), at(self._base, mul(index, _WORD)))

    def _head(self, word: Value) -> Value:
        """The least column of the line that word number `word` is in."""
        return arith.extui(i(64), self._word(bits_and(word, -LINE)))

    def outlier(self, number: Value) -> tuple[Outlier, Value]:
        """Returns what word `number` says, and whether it says something."""
        word, head = self._word(number), self._head(number)
        half = arith.trunci(i(16), shift_right(word, VALUE_SHIFT))
        value = arith.extf(f32(), arith.bitcast(ir.F16Type.get(), half))
        wide = arith.extui(i(64), word)
        beyond = bits_and(shift_right(wide, ROW_BITS), SPAN - 1)
        there = arith.andi(*(_nonzero(v) for v in (bits_and(number, LINE - 1), wide)))
        return Outlier(bits_and(wide, ROWS - 1), add(head, beyond), value), there

    def column(self, number: Value) -> Value:
        """The column of a word: of a line's first, and of what fills a line up, the least of the line."""
        wide = arith.extui(i(64), self._word(number))
        beyond = bits_and(shift_right(wide, ROW_BITS), SPAN - 1)
        is_head = arith.cmpi(arith.CmpIPredicate.eq, bits_and(number, LINE - 1), i64(0))
        return add(self._head(number), arith.select(is_head, i64(0), beyond))

    def each(self, block: Value, visit: Callable[[Outlier], None]) -> None:
        """Emits a loop over the outliers of a row block."""
        first, end = self.of_block(block)
        with loop(first, end, LINE) as line, loop(1, ENTRIES + 1) as place:
            outlier, there = self.outlier(add(line.index, place.index))
            with when(there):
                visit(outlier)

    def each_below(self, start: Value, end: Value, column: Value, visit: Callable[[Outlier], None]) -> Value:
        """Emits a loop over the outliers from word `start` up to the first in a column that is not below `column`;
        returns that word."""

        def goes_on(number: Value) -> Value:
            inside = arith.minsi(number, arith.subi(end, i64(1)))
            below = arith.cmpi(arith.CmpIPredicate.slt, self.column(inside), column)
            return arith.andi(less(number, end), below)

        with loop_while(start, goes_on) as word:
            outlier, there = self.outlier(word.carried[0])
            with when(there):
                visit(outlier)
            word.carried = [add(word.carried[0], 1)]
        return word.carried[0]

    def product(self, x: Value, token: Value, outlier: Outlier) -> Value:
        """An outlier times the number of token `token` that it meets, in f32."""
        act = self.spec.act
        place = mul(add(mul(token, self.spec.k), outlier.column), ELEMENTS[act].bytes)
        return arith.mulf(outlier.value, arith.extf(f32(), load(scalar_type(act), at(x, place))))


def add_to(place: Value, value: Value) -> None:
    """Adds to an f32 in memory."""
    store(arith.addf(load(f32(), place), value), place)


def _nonzero(value: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.ne, value, constant(value.type, 0))
