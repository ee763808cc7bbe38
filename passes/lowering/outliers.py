"""Rules of `lower-tiles` for outliers (`dialect.formats.outliers` has the lines they lie in).

A line is 32 columns of a sparse operand A, one for each of its words, with one number in each column: in the row that
the word names. Operand B has, in the row of that column of A, the x that the outlier meets. Which column of A a word
plays does not matter to the sum, so a lane takes the eight words that lie side by side and reads them at once. That
makes four mma.m16n8k8.tf32 of a line, for eight tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm, scf
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.outliers import LINE, ROW_BITS, SPAN, VALUE_SHIFT
from lowbit.dialect.formats.packing import BLOCK_K, ROWS
from lowbit.dialect.layouts.layout import MMA_M16N8_D
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import LoweringContext, int_attr, when
from lowbit.passes.lowering.fragment import Fragment, fragment_blocks
from lowbit.passes.lowering.mma import mma_sync
from lowbit.passes.lowering.registry import lowers

_WORD = 4  # bytes
_PER_LANE = 8  # words of a line that a lane multiplies, two in each of four products
_WARP = 32
_AHEAD = 4  # lines that are on their way at once with up to eight tokens: more tokens need the registers themselves


class _Outlier(NamedTuple):
    """What a word says: row of the row block, column of the weight, value in f32."""

    row: Any
    column: Any
    value: Any


def _outlier(word: Any, first_column: Any) -> _Outlier:
    half = arith.trunci(emit.integer(16), emit.shift_right(word, VALUE_SHIFT))
    value = arith.extf(ir.F32Type.get(), emit.bitcast(ir.F16Type.get(), half))
    beyond = emit.mask(emit.shift_right(word, ROW_BITS), SPAN - 1)
    return _Outlier(emit.mask(word, ROWS - 1), arith.addi(first_column, beyond), value)


def _word(place: Place, index: Any, static: int = 0, words: int = 1) -> Any:
    """Loads words of the outliers from `index` (i64) on."""
    offset = arith.muli(index, emit.constant(_WORD, 64))
    address = emit.offset_bytes(place.base, dynamic=offset, static=_WORD * static)
    type_ = emit.integer() if words == 1 else ir.VectorType.get([words], emit.integer())
    return llvm.load(type_, address, alignment=_WORD * words)


def _lines_of(table: Place, block: Any) -> tuple[Any, Any]:
    """Loads where the lines of a row block begin and end; of one beyond the last, those of the last."""
    last = emit.constant(table.type.shape[0] - 2)
    index = arith.extui(emit.integer(64), arith.minsi(block, last))
    return _word(table, index), _word(table, index, 1)


def _first_word(line: Any) -> Any:
    """The number of a line's first word."""
    return arith.muli(arith.extui(emit.integer(64), line), emit.constant(LINE, 64))


@lowers(ops.SparseMmaOp)
def sparse_mma(op: Any, c: LoweringContext) -> None:
    """A loop over the lines of a few of the warp's row blocks at a time, which carries their accumulators."""
    total = c.tiles[op.c]
    reg = Reg.of(op.result.type)
    registers = total.registers("scalar")
    places = fragment_blocks(reg.layout, MMA_M16N8_D)
    columns = sorted({column for _, column in places})
    products = _SparseProducts(op, c, columns)
    at = {place: i for i, place in enumerate(places)}
    row_blocks = sorted({row for row, _ in places})
    for first in range(0, len(row_blocks), products.ahead):
        some = row_blocks[first : first + products.ahead]
        slots = [[4 * at[row, column] + j for column in columns for j in range(4)] for row in some]
        results = products.of_blocks(some, [[registers[slot] for slot in mine] for mine in slots])
        for mine, values in zip(slots, results):
            for slot, value in zip(mine, values):
                registers[slot] = value
    c.tiles[op.result] = Fragment(reg, "scalar", registers.__getitem__)


class _SparseProducts:
    """The products of one `sparse_mma`: what does not change from line to line."""

    def __init__(self, op: Any, c: LoweringContext, columns: Sequence[int]) -> None:
        layout = Reg.of(op.result.type).layout
        self._table, x = c.places[op.outliers], c.places[op.x]
        self._element = str(x.type.element)
        self._lane_row, self._quad = c.thread_digit(8, 4), c.thread_digit(4)
        warp, rows = emit.constant(0), emit.constant(0)
        for size, divisor, dim, stride in layout.thread_digits():
            digit = arith.muli(c.threads.digit(size, divisor, layout.threads), emit.constant(stride))
            if dim == 0:
                warp = arith.addi(warp, digit)
            elif dim == 1 and divisor >= _WARP:
                rows = arith.addi(rows, digit)
        self._block = arith.addi(c.scalars[op.first_block], arith.divui(rows, emit.constant(ROWS)))
        warps = layout.shape[0]
        self._parts = emit.constant(warps * int_attr(op, "splits"))
        self._part = arith.addi(arith.muli(c.scalars[op.part], emit.constant(warps)), warp)
        self._rows_of_x = [self._row_of_x(x, 8 * column) for column in columns]
        self.ahead = max(1, _AHEAD // len(columns))

    def _row_of_x(self, x: Place, first: int) -> Any:
        """Where the token begins of this lane's column of B; tokens beyond the last read the last."""
        token = arith.addi(self._lane_row, emit.constant(first))
        token = arith.minsi(token, arith.subi(x.sizes[0], emit.constant(1)))
        nbytes = emit.constant(x.type.strides[0] * ELEMENTS[self._element].bytes, 64)
        return emit.offset_bytes(x.base, dynamic=arith.muli(arith.extui(emit.integer(64), token), nbytes))

    def of_blocks(self, row_blocks: Sequence[int], totals: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Returns the accumulators of some row blocks with the products of this part's lines added.

        A round has `ahead` lines, of as many row blocks or of fewer, all of which are on their way before the first is
        multiplied.
        """
        ends = [_lines_of(self._table, arith.addi(self._block, emit.constant(row))) for row in row_blocks]
        most = reduce(arith.maxsi, [arith.subi(end, start) for start, end in ends])
        turns = self.ahead // len(row_blocks)
        step = arith.muli(self._parts, emit.constant(turns))
        size = len(totals[0])
        loop = scf.ForOp(self._part, most, step, [value for mine in totals for value in mine])
        with ir.InsertionPoint(loop.body):
            carried = list(loop.inner_iter_args)
            sums = [carried[i * size : (i + 1) * size] for i in range(len(row_blocks))]
            beyond = [arith.muli(self._parts, emit.constant(turn)) for turn in range(turns)]
            places = [arith.addi(loop.induction_variable, more) for more in beyond]
            lines = [(i, arith.addi(start, place), end) for place in places for i, (start, end) in enumerate(ends)]
            loaded = [(i, self._load_line(line, end)) for i, line, end in lines]
            for i, outliers in loaded:
                sums[i] = self._multiply(outliers, sums[i])
            scf.YieldOp([value for mine in sums for value in mine])
        results = list(loop.results)
        return [results[i * size : (i + 1) * size] for i in range(len(row_blocks))]

    def _load_line(self, line: Any, end: Any) -> list[_Outlier]:
        """Returns this lane's outliers of a line: of one that is not before the end, nothing, which is read from the
        table."""
        zero, inside = emit.constant(0), emit.below(line, end)
        first = _first_word(arith.select(inside, line, zero))
        head = arith.select(inside, _word(self._table, first), zero)
        mine = arith.addi(first, arith.extui(emit.integer(64), arith.muli(self._quad, emit.constant(_PER_LANE))))
        vectors = [_word(self._table, mine, 4 * i, 4) for i in range(_PER_LANE // 4)]
        words = [arith.select(inside, emit.element(vector, i), zero) for vector in vectors for i in range(4)]
        is_head = arith.cmpi(arith.CmpIPredicate.eq, self._quad, zero)
        words[0] = arith.select(is_head, zero, words[0])
        return [_outlier(word, head) for word in words]

    def _multiply(self, outliers: Sequence[_Outlier], totals: list[Any]) -> list[Any]:
        """Four products for each eight tokens; two outliers of a lane in each."""
        f32, act = ir.F32Type.get(), ir.Type.parse(self._element)
        zero, size = emit.real(0.0, f32), ELEMENTS[self._element].bytes
        nbytes = emit.constant(size, 64)
        offsets = [arith.muli(arith.extui(emit.integer(64), o.column), nbytes) for o in outliers]
        upper = arith.addi(self._lane_row, emit.constant(8))

        def in_row(outlier: _Outlier, row: Any) -> Any:
            here = arith.cmpi(arith.CmpIPredicate.eq, outlier.row, row)
            return arith.select(here, outlier.value, zero)

        a = [[in_row(o, row) for row in (self._lane_row, upper)] for o in outliers]
        result = list(totals)
        for column, row in enumerate(self._rows_of_x):
            at = slice(4 * column, 4 * column + 4)
            loaded = [llvm.load(act, emit.offset_bytes(row, dynamic=offset), alignment=size) for offset in offsets]
            b = [arith.extf(f32, x) for x in loaded]
            for e in range(0, _PER_LANE, 2):
                result[at] = mma_sync([*a[e], *a[e + 1]], b[e : e + 2], result[at], ELEMENTS["f32"])
        return result


@lowers(ops.AddOutliersOp)
def add_outliers(op: Any, c: LoweringContext) -> None:
    """A warp takes a line, and a lane one of its words."""
    c.pending.finish_reads()
    table, buffer = c.places[op.outliers], c.places[op.buffer]
    lane = c.thread_digit(_WARP)
    start, end = _lines_of(table, c.scalars[op.block])
    warps = c.threads_per_block // _WARP
    warp = c.thread_digit(warps, _WARP) if warps > 1 else emit.constant(0)
    loop = scf.ForOp(arith.addi(start, warp), end, emit.constant(warps))
    with ir.InsertionPoint(loop.body):
        first = _first_word(loop.induction_variable)
        head = _word(table, first)
        word = _word(table, arith.addi(first, arith.extui(emit.integer(64), lane)))
        outlier = _outlier(word, head)
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


def _add_to(buffer: Place, outlier: _Outlier, place: Any) -> None:
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
    start, end = _lines_of(table, arith.addi(c.scalars[op.block], c.thread_digit(warps, _WARP)))
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
    everyone, kind = emit.constant(-1), ir.Attribute.parse("#nvvm<shfl_kind idx>")
    word, line = cursor.following, arith.addi(cursor.line, emit.constant(1))
    head = nvvm.shfl_sync(everyone, word, emit.constant(0), emit.constant(_WARP - 1), kind)
    following = _word_of_lane(table, arith.addi(line, emit.constant(1)), cursor.end, c)
    return cursor._replace(word=word, column=_outlier(word, head).column, following=following, line=line)


def _word_of_lane(table: Place, line: Any, end: Any, c: LoweringContext) -> Any:
    """Loads this lane's word of a line; of one that is not before the end, a word of the table."""
    first = _first_word(arith.select(emit.below(line, end), line, emit.constant(0)))
    return _word(table, arith.addi(first, arith.extui(emit.integer(64), c.thread_digit(_WARP))))


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
    outlier = _outlier(word, emit.constant(0))
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
