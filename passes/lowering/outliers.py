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
from lowbit.passes.lowering.context import LoweringContext, int_attr, when
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


class _Cursor(NamedTuple):
    """How far a warp has come in the lines of its row block.

    word, column   a lane's word of this line, and the column that it names
    following      its word of the next line
    line, end      the number of this line, and that behind the last; words of lines that there are not mean nothing
    last, before   where the lane has written an outlier of the last line of this panel, and of the line before: bytes
                   from the beginning of the buffer, or -1
    lines          lines that have been looked at for this panel
    """

    word: Any
    column: Any
    following: Any
    line: Any
    end: Any
    last: Any
    before: Any
    lines: Any


def _carried(reg: Reg, cursor: _Cursor) -> Fragment:
    return Fragment(reg, "scalar", list(cursor).__getitem__)


@lowers(ops.FirstOutliersOp)
def first_outliers(op: Any, c: LoweringContext) -> None:
    """The cursor is on an empty line in front of the first."""
    table, zero = c.places[op.outliers], emit.constant(0)
    warps = c.threads_per_block // _WARP
    start, end = outlier_lines.lines_of(table, arith.addi(c.scalars[op.block], c.thread_digit(warps, _WARP)))
    following, line = _word_of_lane(table, start, end, c), arith.subi(start, emit.constant(1))
    c.tiles[op.result] = _carried(Reg.of(op.result.type), _Cursor(zero, zero, following, line, end, zero, zero, zero))


@lowers(ops.ScatterOutliersOp)
def scatter_outliers(op: Any, c: LoweringContext) -> None:
    """Writes what this line has of the buffer's columns. If nothing of it is left for later columns, it goes on with
    the next line, which has come meanwhile, and asks for the one behind that."""
    c.pending.finish_reads()
    none = emit.constant(-1)
    start = _Cursor(*c.tiles[op.cursor].registers("scalar"))
    start = start._replace(last=none, before=none, lines=emit.constant(0))
    types = [emit.integer()] * len(start)
    loop = scf.WhileOp(types, list(start))
    before, after = (region.blocks.append(*types) for region in loop.regions)
    with ir.InsertionPoint(before):
        here = _Cursor(*before.arguments)
        is_there = emit.below(here.line, here.end)
        place, some_left = _scatter_line(op, c, here, is_there)
        here = here._replace(last=place, before=here.last, lines=arith.addi(here.lines, emit.constant(1)))
        scf.ConditionOp(arith.andi(arith.xori(some_left, emit.constant(1, 1)), is_there), list(here))
    with ir.InsertionPoint(after):
        scf.YieldOp(list(_on_next_line(_Cursor(*after.arguments), c.places[op.outliers], c)))
    c.tiles[op.result] = _carried(Reg.of(op.result.type), _Cursor(*loop.results))


def _on_next_line(cursor: _Cursor, table: Place, c: LoweringContext) -> _Cursor:
    """Returns the cursor on the next line, whose first word, the head, all lanes get."""
    word, line = cursor.following, arith.addi(cursor.line, emit.constant(1))
    head = emit.of_lane(0, word)
    following = _word_of_lane(table, arith.addi(line, emit.constant(1)), cursor.end, c)
    return cursor._replace(word=word, column=outlier_lines.outlier(word, head).column, following=following, line=line)


def _word_of_lane(table: Place, line: Any, end: Any, c: LoweringContext) -> Any:
    """Loads this lane's word of a line; of one that is not before the end, a word of the table."""
    first = outlier_lines.first_word(arith.select(emit.below(line, end), line, emit.constant(0)))
    return outlier_lines.word(table, arith.addi(first, arith.extui(emit.integer(64), c.thread_digit(_WARP))))


def _scatter_line(op: Any, c: LoweringContext, cursor: _Cursor, is_there: Any) -> tuple[Any, Any]:
    """Writes the outliers of a line that are in the buffer; returns where this lane has, and whether others of the line
    are behind the buffer."""
    buffer, word = c.places[op.buffer], cursor.word
    column = arith.subi(cursor.column, c.scalars[op.first_column])
    lane = c.thread_digit(_WARP)
    is_outlier = arith.andi(*(arith.cmpi(arith.CmpIPredicate.ne, v, emit.constant(0)) for v in (lane, word)))
    is_outlier = arith.andi(is_there, is_outlier)
    columns = emit.constant(BLOCK_K * buffer.type.shape[1])
    inside = arith.andi(is_outlier, arith.cmpi(arith.CmpIPredicate.ult, column, columns))
    outlier = outlier_lines.outlier(word, emit.constant(0))
    place = _place_in_fragments(buffer, outlier.row, column, c)
    when(inside, lambda: _write(buffer, place, outlier.value))
    behind = arith.andi(is_outlier, arith.cmpi(arith.CmpIPredicate.sge, column, columns))
    some_left = nvvm.vote_sync(emit.constant(-1), behind, ir.Attribute.parse("#nvvm<vote_sync_kind any>"))
    return arith.select(inside, place, emit.constant(-1)), some_left


def _place_in_fragments(buffer: Place, row: Any, column: Any, c: LoweringContext) -> Any:
    """Returns where a lane of the warp reads an element as part of a fragment, in bytes: `MMA_M16N8K16_A`, digit by
    digit."""
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
    branch = scf.IfOp(emit.below(cursor.lines, emit.constant(3)), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        for place in (cursor.last, cursor.before):
            has_written = arith.cmpi(arith.CmpIPredicate.ne, place, emit.constant(-1))
            when(has_written, lambda place=place: _write(buffer, place, emit.real(0.0, ir.F32Type.get())))
        scf.YieldOp([])
    with ir.InsertionPoint(branch.else_block):
        _clear_part_of_warp(buffer, c)
        scf.YieldOp([])


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
