"""The rules of `index_outliers` and `load_lines`: where the outliers of any columns are.

Lines are sorted by column, and so are their first columns. A warp keeps those of its row blocks in registers, a line to
a lane: how many of them are below a column tells at which line the outliers from this column on begin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, nvvm, scf
from lowbit.dialect.formats.outliers import INDEX_ENDS
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import LoweringContext, int_attr
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.outlier_lines import WORD, first_word, lines_of, word
from lowbit.passes.lowering.outlier_share import WARP, place_of_warp, word_if
from lowbit.passes.lowering.registry import lowers

NO_COLUMN = (1 << 30) - 1  # of lanes without a line: more than any


class LineIndex(NamedTuple):
    """A row block's lines: the first, that behind the last, and the first columns of those that a lane has."""

    start: Any
    end: Any
    heads: list[Any]


def _of_rows(tile: Fragment) -> list[list[Any]]:
    """Returns a tile's numbers, row block by row block."""
    count, numbers = tile.reg.shape[2], tile.registers("scalar")
    return [numbers[i : i + count] for i in range(0, len(numbers), count)]


def line_indexes(tile: Fragment) -> list[LineIndex]:
    return [LineIndex(start, end, heads) for start, end, *heads in _of_rows(tile)]


@lowers(ops.IndexOutliersOp)
def index_outliers(op: Any, c: LoweringContext) -> None:
    """All first columns are asked for at once, when the table has come."""
    reg, table = Reg.of(op.result.type), c.places[op.outliers]
    _, first = place_of_warp(c, reg.layout, ROWS)
    block, lane = arith.addi(c.scalars[op.first_block], first), c.thread_digit(WARP)
    count = reg.shape[2]
    nvvm.bar_warp_sync(emit.constant(-1))
    ends = [lines_of(table, arith.addi(block, emit.constant(i))) for i in range(reg.layout.locals // count)]
    numbers: list[Any] = []
    for start, end in ends:
        mine = arith.addi(start, lane)
        pointer = emit.offset_bytes(table.base, dynamic=arith.muli(first_word(mine), emit.constant(WORD, 64)))
        lines = arith.subi(end, mine)
        heads = [word_if(pointer, i * WARP, lines, NO_COLUMN) for i in range(count - INDEX_ENDS)]
        numbers += [start, end, *heads]
    c.tiles[op.result] = Fragment(reg, "scalar", numbers.__getitem__)


@lowers(ops.LoadLinesOp)
def load_lines(op: Any, c: LoweringContext) -> None:
    """A lane's words of all lines are asked for at once, at addresses that differ by constants."""
    index, reg = c.tiles[op.index], Reg.of(op.result.type)
    table, lane, count = c.places[op.outliers], c.thread_digit(WARP), reg.shape[2]
    column = first_column(op, c, index.reg.layout, int_attr(op, "columns"))
    words: list[Any] = []
    for numbers in line_indexes(index):
        pointer, left = words_from(first_line(numbers, column, table, lane), numbers, table, lane)
        words += [word_if(pointer, i, left) for i in range(count)]
    c.tiles[op.result] = Fragment(reg, "scalar", words.__getitem__)


def words_from(line: Any, index: LineIndex, table: Place, lane: Any) -> tuple[Any, Any]:
    """Returns where a lane's word of a line is, and how many lines of the row block there are from this one on."""
    mine = arith.addi(first_word(line), arith.extui(emit.integer(64), lane))
    pointer = emit.offset_bytes(table.base, dynamic=arith.muli(mine, emit.constant(WORD, 64)))
    return pointer, arith.subi(index.end, line)


def first_line(index: LineIndex, column: Any, table: Place, lane: Any) -> Any:
    """Returns the last line that begins in front of a column, as its outliers may reach beyond it."""
    before = _lines_before(index, column, table, lane)
    return arith.addi(index.start, arith.maxsi(arith.subi(before, emit.constant(1)), emit.constant(0)))


def first_column(op: Any, c: LoweringContext, layout: Layout, columns: int) -> Any:
    """Returns the first column of this warp's step."""
    warp, _ = place_of_warp(c, layout, ROWS)
    return arith.addi(c.scalars[op.column], arith.muli(warp, emit.constant(columns)))


def _lines_before(index: LineIndex, column: Any, table: Place, lane: Any) -> Any:
    """Counts the lines of a row block that begin in front of a column: those that lanes have, and where there are more,
    those in memory."""
    count = emit.constant(0)
    for head in index.heads:
        count = arith.addi(count, _lanes(emit.below(head, column)))
    first = arith.addi(index.start, emit.constant(WARP * len(index.heads)))
    loop = scf.ForOp(first, index.end, emit.constant(WARP), [count])
    with ir.InsertionPoint(loop.body):
        line = arith.addi(loop.induction_variable, lane)
        there = emit.below(line, index.end)
        head = word(table, first_word(arith.select(there, line, index.start)))
        some = _lanes(arith.andi(there, emit.below(head, column)))
        scf.YieldOp([arith.addi(loop.inner_iter_args[0], some)])
    return loop.results[0]


def _lanes(condition: Any) -> Any:
    """Counts the lanes of a warp of which something is true."""
    kind = ir.Attribute.parse("#nvvm<vote_sync_kind ballot>")
    return emit.intrinsic("llvm.ctpop", nvvm.vote_sync(emit.constant(-1), condition, kind))
