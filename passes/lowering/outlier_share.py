"""The outliers that a warp multiplies (`dialect.formats.outliers` has the lines they lie in), and a loop over them.

The lines of a row block are dealt out to warps. The first few of a warp are copied to shared memory, or loaded to
registers, long before they are needed; the others, in row blocks with many outliers, are read where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm, scf
from lowbit.dialect.formats.outliers import LINE
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import read_layout
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import LoweringContext, either, int_attr
from lowbit.passes.lowering.outlier_lines import WORD, Outlier, first_word, lines_of, outlier_of, word
from lowbit.passes.lowering.registry import lowers

WARP = 32
PIECE = 4  # words of an asynchronous copy

Sums = list[Any]
"""The accumulators of one row block."""


class Line(NamedTuple):
    """Where a line is, in device memory or in shared memory, and whether there is one; None: there is."""

    pointer: Any
    inside: Any | None = None

    def words(self, first: Any, count: int, static: int = 0) -> list[Any]:
        """Loads words from `first` on, four at a time; of no line zeros."""
        wide = min(count, PIECE)
        type_ = emit.integer() if wide == 1 else ir.VectorType.get([wide], emit.integer())
        pointer = self.pointer if first is None else emit.offset_bytes(self.pointer, dynamic=first)
        found: list[Any] = []
        for i in range(0, count, wide):
            loaded = llvm.load(type_, emit.offset_bytes(pointer, static=WORD * (static + i)), alignment=WORD * wide)
            found += [loaded] if wide == 1 else [emit.element(loaded, j) for j in range(wide)]
        if self.inside is None:
            return found
        return [arith.select(self.inside, word, emit.constant(0)) for word in found]

    def word(self, static: int) -> Any:
        return self.words(None, 1, static)[0]

    def outlier(self, lane: Any) -> Outlier:
        """The outlier in a lane's word; of the head, and where the line is not full, one of value 0."""
        mine = arith.muli(lane, emit.constant(WORD))
        if self.pointer.type == emit.pointer(1):
            mine = arith.extui(emit.integer(64), mine)
        (word,) = self.words(mine, 1)
        return outlier_of(word, self.word(0), lane)


Add = Callable[[list[list[Line]], Sums], Sums]
"""Adds lines: of each turn one of each row block."""


def place_of_warp(c: LoweringContext, layout: Layout, unit: int) -> tuple[Any, Any]:
    """Returns the index along dim 0 of a layout [warps, rows, ..] and the first row block that this warp has.

    unit: rows of dim 1 for each of its indices
    """
    warp, rows = emit.constant(0), emit.constant(0)
    for size, divisor, dim, stride in layout.thread_digits():
        if divisor >= WARP and dim in (0, 1):
            digit = c.threads.digit(size, divisor, layout.threads)
            digit = arith.muli(digit, emit.constant(stride * (unit if dim else 1)))
            warp, rows = (warp, arith.addi(rows, digit)) if dim else (arith.addi(warp, digit), rows)
    return warp, arith.divui(rows, emit.constant(ROWS))


class Share:
    """The lines of a warp, whose rows and part are those that it has in a layout [warps, rows, ..]."""

    def __init__(self, op: Any, c: LoweringContext, layout: Layout, unit: int) -> None:
        """unit: rows of dim 1 of the layout for each of its indices."""
        self.table, self._lane = c.places[op.outliers], c.thread_digit(WARP)
        self.warp, self._row_block = place_of_warp(c, layout, unit)
        self._block = arith.addi(c.scalars[op.first_block], self._row_block)
        warps = layout.shape[0]
        self._parts = warps * int_attr(op, "splits")
        self.parts = emit.constant(self._parts)
        self.part = arith.addi(arith.muli(c.scalars[op.part], emit.constant(warps)), self.warp)

    def ends(self, row_block: int) -> tuple[Any, Any]:
        """Loads where the lines of one of the warp's row blocks begin and end."""
        return lines_of(self.table, arith.addi(self._block, emit.constant(row_block)))

    def in_memory(self, line: Any, end: Any) -> Line:
        """A line in device memory; of one that is not before the end, the table is read in its place."""
        inside = emit.below(line, end)
        first = first_word(arith.select(inside, line, emit.constant(0)))
        offset = arith.muli(first, emit.constant(WORD, 64))
        return Line(emit.offset_bytes(self.table.base, dynamic=offset), inside)

    def load_first(self, row_blocks: int, count: int) -> list[Any]:
        """Loads this lane's words of the first lines of this warp of its row blocks; of no line 0. Lines of a row block
        are as far apart as the warps that share them are many, so that their addresses differ by constants."""
        ends = self._all_ends(row_blocks)
        lane = arith.extui(emit.integer(64), self._lane)
        words: list[Any] = []
        for start, end in pairwise(ends):
            first = arith.addi(start, self.part)
            mine = arith.muli(arith.addi(first_word(first), lane), emit.constant(WORD, 64))
            pointer, lines = emit.offset_bytes(self.table.base, dynamic=mine), arith.subi(end, first)
            words += [word_if(pointer, i * self._parts, lines) for i in range(count)]
        return words

    def _all_ends(self, row_blocks: int) -> list[Any]:
        """Where the lines of the first row block begin, and those of each end: none of one beyond the last. One load,
        a word of the table for each lane, so that all are waited for once."""
        index = arith.minsi(arith.addi(self._block, self._lane), emit.constant(self.table.type.shape[0] - 1))
        mine = word(self.table, arith.extui(emit.integer(64), index))
        return [emit.of_lane(lane, mine) for lane in range(row_blocks + 1)]

    def fold_in_memory(self, row_blocks: Sequence[int], skipped: int, turns: int, sums: Sums, add: Add) -> Sums:
        """Returns the sums of some row blocks after their lines in device memory, but for the first `skipped` of each.
        add: adds `turns` lines of each row block."""
        ends = [self.ends(row) for row in row_blocks]
        most = reduce(arith.maxsi, [arith.subi(end, start) for start, end in ends])
        first = arith.addi(self.part, arith.muli(self.parts, emit.constant(skipped)))

        def some(number: Any, sums: Sums) -> Sums:
            numbers = [arith.addi(number, arith.muli(self.parts, emit.constant(turn))) for turn in range(turns)]
            lines = [[self.in_memory(arith.addi(start, n), end) for start, end in ends] for n in numbers]
            return add(lines, sums)

        return _loop(first, most, arith.muli(self.parts, emit.constant(turns)), sums, some)


def word_if(pointer: Any, line: int, lines: Any, otherwise: int = 0) -> Any:
    """Loads a word so many lines on, or another number if there are no more than that."""
    test = f"setp.gt.s32 there, $2, {line}; mov.b32 $0, {otherwise};"
    load = f"{test} @there ld.global.b32 $0, [$1+{line * LINE * WORD}];"
    text, result = f"{{ .reg .pred there; {load} }}", emit.integer()
    return llvm.inline_asm(result, [pointer, lines], text, "=&r,l,r", asm_dialect=0, has_side_effects=True)


class StagedShare(Share):
    """The same, the first lines of which are in a buffer in shared memory."""

    def __init__(self, op: Any, c: LoweringContext, layout: Layout, unit: int) -> None:
        super().__init__(op, c, layout, unit)
        self._buffer = c.places[op.buffer]
        self._staged = self._buffer.type.shape[2]

    def in_shared(self, row_block: int, number: Any) -> Line:
        """A line of this warp in shared memory, by its number there."""
        warps, blocks, *_ = (stride * WORD for stride in self._buffer.type.strides)
        place = arith.addi(
            arith.muli(self.warp, emit.constant(warps)),
            arith.muli(arith.addi(self._row_block, emit.constant(row_block)), emit.constant(blocks)),
        )
        place = arith.addi(place, arith.muli(number, emit.constant(LINE * WORD)))
        return Line(emit.offset_bytes(self._buffer.base, dynamic=place))

    def fold(self, row_blocks: Sequence[int], turns: int, sums: Sums, add: Add) -> Sums:
        """Returns the sums of some row blocks after all their lines, those beyond the buffer only if its last is one.
        add: adds `turns` lines of each row block."""

        def staged(number: Any, sums: Sums) -> Sums:
            lines = [
                [self.in_shared(row, arith.addi(number, emit.constant(turn))) for row in row_blocks]
                for turn in range(turns)
            ]
            return if_any(_first_words(lines[0]), sums, lambda: add(lines, sums))

        sums = _loop(emit.constant(0), emit.constant(self._staged), emit.constant(turns), sums, staged)
        last = [self.in_shared(row, emit.constant(self._staged - 1)) for row in row_blocks]
        others = partial(self.fold_in_memory, row_blocks, self._staged, turns, sums, add)
        return if_any(_first_words(last), sums, others)


def _first_words(lines: Sequence[Line]) -> list[Any]:
    """The words of these lines' first outliers: 0 if there is none, as no outlier is."""
    return [line.word(1) for line in lines]


def _loop(start: Any, end: Any, step: Any, sums: Sums, body: Callable[[Any, Sums], Sums]) -> Sums:
    loop = scf.ForOp(start, end, step, list(sums))
    with ir.InsertionPoint(loop.body):
        scf.YieldOp(body(loop.induction_variable, list(loop.inner_iter_args)))
    return list(loop.results)


def if_any(words: Sequence[Any], sums: Sums, action: Callable[[], Sums]) -> Sums:
    """Returns what `action` does if one of these words is an outlier, which all lanes agree on; else `sums`."""
    condition = arith.cmpi(arith.CmpIPredicate.ne, reduce(arith.ori, words), emit.constant(0))
    return either(condition, [value.type for value in sums], action, lambda: sums)


@lowers(ops.CopyOutliersOp)
def copy_outliers(op: Any, c: LoweringContext) -> None:
    """A lane copies a piece of 16 bytes of every fourth line; zeros where there is no line."""
    layout = read_layout(op.layout)
    share = StagedShare(op, c, layout, ROWS)
    _, row_blocks, lines, _ = layout.restrict(1, 0, layout.shape[1])[0].shape
    own = row_blocks // max(1, _warps_along(layout, 1))
    lane = c.thread_digit(WARP)
    piece = arith.muli(arith.remui(lane, emit.constant(LINE // PIECE)), emit.constant(PIECE * WORD))
    mine = arith.divui(lane, emit.constant(LINE // PIECE))
    per_copy = WARP * PIECE // LINE
    modifier = nvvm.LoadCacheModifierKind.CG
    for row in range(own):
        start, end = share.ends(row)
        for first in range(0, lines, per_copy):
            number = arith.addi(mine, emit.constant(first))
            line = arith.addi(arith.addi(start, share.part), arith.muli(share.parts, number))
            source = share.in_memory(line, end)
            to, from_ = (
                emit.offset_bytes(pointer, dynamic=offset)
                for pointer, offset in (
                    (share.in_shared(row, number).pointer, piece),
                    (source.pointer, arith.extui(emit.integer(64), piece)),
                )
            )
            taken = arith.select(source.inside, emit.constant(PIECE * WORD), emit.constant(0))
            nvvm.cp_async_shared_global(to, from_, PIECE * WORD, modifier, cp_size=taken)


def _warps_along(layout: Layout, dim: int) -> int:
    """How many warps a layout has side by side along a dim."""
    count = 1
    for size, divisor, d, _ in layout.thread_digits():
        count *= size if d == dim and divisor >= WARP else 1
    return count
