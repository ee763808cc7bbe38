"""Rules of `lower-tiles` for outliers that are added to weights (`dialect.formats.outliers` has their lines)."""

from __future__ import annotations

from typing import Any, NamedTuple

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm, scf
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit, outlier_lines
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import LoweringContext, either, int_attr, when
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.outlier_lines import Outlier
from lowbit.passes.lowering.registry import lowers

_WARP = 32


@lowers(ops.AddOutliersOp)
def add_outliers(op: Any, c: LoweringContext) -> None:
    """A warp takes a line, and a lane one of its words."""
    c.pending.finish_reads()
    table, buffer = c.places[op.outliers], c.places[op.buffer]
    lane = c.thread_digit(_WARP)
    start, end = outlier_lines.lines_of(table, c.scalars[op.block])
    warps = c.threads_per_block // _WARP
    warp = c.thread_digit(warps, _WARP) if warps > 1 else emit.constant(0)
    loop = scf.ForOp(arith.addi(start, warp), end, emit.constant(warps))
    with ir.InsertionPoint(loop.body):
        first = outlier_lines.first_word(loop.induction_variable)
        head = outlier_lines.word(table, first)
        word = outlier_lines.word(table, arith.addi(first, arith.extui(emit.integer(64), lane)))
        outlier = outlier_lines.outlier(word, head)
        place = arith.subi(_in_memory(op, outlier.column), c.scalars[op.first_column])
        is_outlier = arith.andi(*(arith.cmpi(arith.CmpIPredicate.ne, v, emit.constant(0)) for v in (lane, word)))
        inside = arith.cmpi(arith.CmpIPredicate.ult, place, emit.constant(buffer.type.shape[1]))
        when(arith.andi(is_outlier, inside), lambda: _add_to(buffer, outlier, place))
        scf.YieldOp([])


def _in_memory(op: Any, column: Any) -> Any:
    """The column in memory of a column of the weight."""
    group, padded = int_attr(op, "group"), int_attr(op, "padded")
    if group == padded:
        return column
    whole = arith.muli(arith.divui(column, emit.constant(group)), emit.constant(padded))
    return arith.addi(whole, arith.remui(column, emit.constant(group)))


def _add_to(buffer: Place, outlier: Outlier, place: Any) -> None:
    """Adds a value where no other thread does: no two outliers are of one place."""
    row, column = (4 * stride for stride in buffer.type.strides)
    offset = arith.addi(arith.muli(outlier.row, emit.constant(row)), arith.muli(place, emit.constant(column)))
    address = emit.offset_bytes(buffer.base, dynamic=offset)
    llvm.store(arith.addf(llvm.load(ir.F32Type.get(), address, alignment=4), outlier.value), address, alignment=4)


# -- outliers of panels

_NO_COLUMN = -1


class _Cursor(NamedTuple):
    """How far a warp has come in the lines of its row block.

    word, column, place   a lane's word of this line, the column that it names, and where it goes in the buffer, in
                          bytes; where the word is no outlier, the column is `_NO_COLUMN`
    following             its word of the next line, if there is one
    line, last_line       the number of this line, and that of the last
    last, before          where the lane has written an outlier of the last line of this panel, and of the line before,
                          or -1
    lines                 lines that have been looked at for this panel
    """

    word: Any
    column: Any
    place: Any
    following: Any
    line: Any
    last_line: Any
    last: Any
    before: Any
    lines: Any


def _carried(reg: Reg, cursor: _Cursor) -> Fragment:
    return Fragment(reg, "scalar", list(cursor).__getitem__)


@lowers(ops.FirstOutliersOp)
def first_outliers(op: Any, c: LoweringContext) -> None:
    """The cursor is on an empty line in front of the first."""
    table, zero, one = c.places[op.outliers], emit.constant(0), emit.constant(1)
    warps = c.threads_per_block // _WARP
    start, end = outlier_lines.lines_of(table, arith.addi(c.scalars[op.block], c.thread_digit(warps, _WARP)))
    cursor = _Cursor(zero, emit.constant(_NO_COLUMN), *[zero] * 7)
    cursor = cursor._replace(line=arith.subi(start, one), last_line=arith.subi(end, one))
    c.tiles[op.result] = _carried(Reg.of(op.result.type), _with_following(cursor, table, c))


def _with_following(cursor: _Cursor, table: Place, c: LoweringContext) -> _Cursor:
    """Returns the cursor with its lane's word of the next line on the way, or where there is none, of another."""
    line = arith.minsi(arith.addi(cursor.line, emit.constant(1)), cursor.last_line)
    lane = arith.extui(emit.integer(64), c.thread_digit(_WARP))
    return cursor._replace(following=outlier_lines.word(table, arith.addi(outlier_lines.first_word(line), lane)))


@lowers(ops.ScatterOutliersOp)
def scatter_outliers(op: Any, c: LoweringContext) -> None:
    """Writes what this line has of the buffer's columns. If nothing of it is left for later columns, it goes on with
    the next line, which has come meanwhile, and with others after it where they are that full.

    Which line is the next is known in the end only, and it is asked for then, even if it is the one that has come: were
    it asked for where the cursor goes on, the assembler would move it at once to where the other is, and wait for it.
    """
    c.pending.finish_reads()
    none, table = emit.constant(-1), c.places[op.outliers]
    here = _Cursor(*c.tiles[op.cursor].registers("scalar"))
    here = here._replace(last=none, before=none, lines=emit.constant(0))
    here, is_over = _scatter_line(op, c, here)

    def on_more_lines() -> _Cursor:
        return _scatter_more_lines(op, c, *_scatter_line(op, c, _on_next_line(here, op, c)))

    behind = either(is_over, [emit.integer()] * len(here), on_more_lines, lambda: here)
    here = _with_following(_Cursor(*behind), table, c)
    c.tiles[op.result] = _carried(Reg.of(op.result.type), here)


def _scatter_more_lines(op: Any, c: LoweringContext, cursor: _Cursor, is_over: Any) -> _Cursor:
    """Goes on with line after line, as long as they are over in this panel."""
    types = [emit.integer()] * len(cursor)
    loop = scf.WhileOp([*types, emit.integer(1)], [*cursor, is_over])
    before = loop.regions[0].blocks.append(*types, emit.integer(1))
    after = loop.regions[1].blocks.append(*types, emit.integer(1))
    with ir.InsertionPoint(before):
        *_, goes_on = before.arguments
        scf.ConditionOp(goes_on, list(before.arguments))
    with ir.InsertionPoint(after):
        here = _with_following(_Cursor(*list(after.arguments)[:-1]), c.places[op.outliers], c)
        here, is_over = _scatter_line(op, c, _on_next_line(here, op, c))
        scf.YieldOp([*here, is_over])
    return _Cursor(*list(loop.results)[:-1])


def _on_next_line(cursor: _Cursor, op: Any, c: LoweringContext) -> _Cursor:
    """Returns the cursor on the next line, with all that its words say: panels that share it have little left to do.
    All lanes get the first word, the head."""
    word = cursor.following
    outlier = outlier_lines.outlier(word, emit.of_lane(0, word))
    is_outlier = arith.andi(
        *(arith.cmpi(arith.CmpIPredicate.ne, v, emit.constant(0)) for v in (c.thread_digit(_WARP), word))
    )
    place = _place_in_fragments(c.places[op.buffer], outlier.row, outlier.column, c)
    column = arith.select(is_outlier, outlier.column, emit.constant(_NO_COLUMN))
    return cursor._replace(word=word, column=column, place=place, line=arith.addi(cursor.line, emit.constant(1)))


def _scatter_line(op: Any, c: LoweringContext, cursor: _Cursor) -> tuple[_Cursor, Any]:
    """Writes the outliers of a line that are in the buffer; returns the cursor that knows where, and whether the warp
    goes on with the next line."""
    buffer, first = c.places[op.buffer], c.scalars[op.first_column]
    columns = emit.constant(BLOCK_K * buffer.type.shape[1])
    inside = arith.cmpi(arith.CmpIPredicate.ult, arith.subi(cursor.column, first), columns)
    value = outlier_lines.outlier(cursor.word, emit.constant(0)).value
    when(inside, lambda: _write(buffer, cursor.place, value))
    behind = arith.cmpi(arith.CmpIPredicate.sge, cursor.column, arith.addi(first, columns))
    some_left = nvvm.vote_sync(emit.constant(-1), behind, ir.Attribute.parse("#nvvm<vote_sync_kind any>"))
    is_over = arith.andi(arith.xori(some_left, emit.constant(1, 1)), emit.below(cursor.line, cursor.last_line))
    last, lines = arith.select(inside, cursor.place, emit.constant(-1)), arith.addi(cursor.lines, emit.constant(1))
    return cursor._replace(last=last, before=cursor.last, lines=lines), is_over


def _place_in_fragments(buffer: Place, row: Any, column: Any, c: LoweringContext) -> Any:
    """Returns where a lane of the warp reads an element as part of a fragment, in bytes: `MMA_M16N8K16_A`, digit by
    digit. A buffer begins at a multiple of its columns, which are a power of two."""
    warp = c.thread_digit(c.threads_per_block // _WARP, _WARP)
    digits = (  # of an element's place: where from, divisor, size, stride
        (column, BLOCK_K, buffer.type.shape[1], buffer.type.strides[1]),
        (row, 1, 8, 32),
        (column, 2, 4, 8),
        (column, 8, 2, 4),
        (row, 8, 2, 2),
        (column, 1, 2, 1),
    )
    place = arith.muli(warp, emit.constant(buffer.type.strides[0]))
    for value, divisor, size, stride in digits:
        digit = arith.andi(arith.shrui(value, emit.constant(divisor.bit_length() - 1)), emit.constant(size - 1))
        place = arith.addi(place, arith.muli(digit, emit.constant(stride)))
    return arith.muli(place, emit.constant(ELEMENTS[str(buffer.type.element)].bytes))


def _write(buffer: Place, place: Any, value: Any) -> None:
    element = str(buffer.type.element)
    address = emit.offset_bytes(buffer.base, dynamic=place)
    llvm.store(emit.convert(ir.Type.parse(element), value), address, alignment=ELEMENTS[element].bytes)


@lowers(ops.EraseOutliersOp)
def erase_outliers(op: Any, c: LoweringContext) -> None:
    """Each lane where it has written, as long as it knows; all of the warp's part of the buffer if there were more
    lines."""
    c.pending.finish_reads()
    buffer, cursor = c.places[op.buffer], _Cursor(*c.tiles[op.cursor].registers("scalar"))

    def erase_known() -> list[Any]:
        for place in (cursor.last, cursor.before):
            has_written = arith.cmpi(arith.CmpIPredicate.ne, place, emit.constant(-1))
            when(has_written, lambda place=place: _write(buffer, place, emit.real(0.0, ir.F32Type.get())))
        return []

    def erase_all() -> list[Any]:
        _clear_part_of_warp(buffer, c)
        return []

    either(emit.below(cursor.lines, emit.constant(3)), [], erase_known, erase_all)


def _clear_part_of_warp(buffer: Place, c: LoweringContext) -> None:
    """Writes zeros, 16 bytes of each lane for every fragment."""
    nbytes = ELEMENTS[str(buffer.type.element)].bytes
    warp = c.thread_digit(c.threads_per_block // _WARP, _WARP)
    start = arith.muli(warp, emit.constant(buffer.type.strides[0] * nbytes))
    start = arith.addi(start, arith.muli(c.thread_digit(_WARP), emit.constant(16)))
    zeros = llvm.mlir_zero(ir.VectorType.get([4], emit.integer()))
    for block in range(buffer.type.shape[1]):
        static = block * buffer.type.strides[1] * nbytes
        llvm.store(zeros, emit.offset_bytes(buffer.base, dynamic=start, static=static), alignment=16)
