"""The rules of `index_outliers`, `find_outliers`, `transpose` and `sparse_step`: products of several tokens with the
outliers of a step, by mma, with the activations that the step has in shared memory.

Lines are sorted by column, and so are their first columns. A warp keeps those of its row blocks in registers, a line to
a lane: how many of them are below a step's first column tells at which line the step's outliers begin.

Operand A of a line is that of `sparse_mma`. Operand B needs no copies: where tokens stand side by side, the x of eight
tokens that an outlier meets is 16 bytes, a row of a matrix that ldmatrix loads, and each lane gives the address of the
row that its word names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm, scf
from lowbit.dialect.formats.outliers import LINE
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import LoweringContext, int_attr, when
from lowbit.passes.lowering.fragment import Fragment, fragment_blocks
from lowbit.passes.lowering.mma import ldmatrix
from lowbit.passes.lowering.outlier_lines import WORD, Outlier, first_word, lines_of, outlier_of, word
from lowbit.passes.lowering.outlier_share import WARP, Sums, place_of_warp, word_if
from lowbit.passes.lowering.registry import lowers
from lowbit.passes.lowering.sparse_mma import MATRIX_ROW, SparseOperand

_NO_COLUMN = (1 << 31) - 1  # of lanes without a line
_ROW_BYTES = 128  # of a token in a panel of activations


class _Index(NamedTuple):
    """A row block's lines: the first, that behind the last, and the first columns of those that a lane has."""

    start: Any
    end: Any
    heads: list[Any]


def _of_rows(tile: Fragment) -> list[list[Any]]:
    """Returns a tile's numbers, row block by row block."""
    count, numbers = tile.reg.shape[2], tile.registers("scalar")
    return [numbers[i : i + count] for i in range(0, len(numbers), count)]


def _indexes(tile: Fragment) -> list[_Index]:
    return [_Index(start, end, heads) for start, end, *heads in _of_rows(tile)]


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
        heads = [word_if(pointer, i * WARP, lines, _NO_COLUMN) for i in range(count - ops.INDEX_ENDS)]
        numbers += [start, end, *heads]
    c.tiles[op.result] = Fragment(reg, "scalar", numbers.__getitem__)


@lowers(ops.FindOutliersOp)
def find_outliers(op: Any, c: LoweringContext) -> None:
    """The last line that begins in front of the step, as its outliers may reach into it, and those after it."""
    reg, table, lane = Reg.of(op.result.type), c.places[op.outliers], c.thread_digit(WARP)
    column = _first_column(op, c, reg, int_attr(op, "columns"))
    numbers: list[Any] = []
    for index in _indexes(c.tiles[op.index]):
        before = _lines_before(index, column, table, lane)
        line = arith.addi(index.start, arith.maxsi(arith.subi(before, emit.constant(1)), emit.constant(0)))
        mine = arith.muli(arith.addi(first_word(line), arith.extui(emit.integer(64), lane)), emit.constant(WORD, 64))
        pointer, lines = emit.offset_bytes(table.base, dynamic=mine), arith.subi(index.end, line)
        numbers += [line, *(word_if(pointer, i, lines) for i in range(reg.shape[2] - 1))]
    c.tiles[op.result] = Fragment(reg, "scalar", numbers.__getitem__)


def _first_column(op: Any, c: LoweringContext, reg: Reg, columns: int) -> Any:
    """Returns the first column of this warp's step."""
    warp, _ = place_of_warp(c, reg.layout, ROWS)
    return arith.addi(c.scalars[op.column], arith.muli(warp, emit.constant(columns)))


def _lines_before(index: _Index, column: Any, table: Place, lane: Any) -> Any:
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


def _vote(condition: Any, kind: str) -> Any:
    return nvvm.vote_sync(emit.constant(-1), condition, ir.Attribute.parse(f"#nvvm<vote_sync_kind {kind}>"))


def _lanes(condition: Any) -> Any:
    """Counts the lanes of a warp of which something is true."""
    return emit.intrinsic("llvm.ctpop", _vote(condition, "ballot"))


@lowers(ops.TransposeOp)
def transpose(op: Any, c: LoweringContext) -> None:
    """Four matrices of 8 tokens by 8 columns at a time, half a panel."""
    c.pending.finish_reads()
    source, target = c.places[op.source], c.places[op.target]
    warps, panels, tokens, _ = source.type.shape
    sharing = c.threads_per_block // (WARP * warps)
    turn = _Transposition(c, source, target, arith.subi(c.scalars[op.rows], emit.constant(1)))
    mine, halves = c.thread_digit(sharing, WARP), 2 * panels
    for block in range(tokens // 8):
        for first in range(0, halves, sharing):
            inside = None if first + sharing <= halves else emit.below(mine, emit.constant(halves - first))
            when(inside, lambda block=block, first=first: turn.move(block, mine, first))


class _Transposition:
    """Moves eight tokens of half a panel: ldmatrix turns them, and each lane gets two tokens of a column to write. The
    places that a warp writes at a time are 128 bytes in a row."""

    def __init__(self, c: LoweringContext, source: Place, target: Place, last: Any) -> None:
        """last: of the tokens."""
        warps, self._panels, self._tokens, _ = source.type.shape
        self._source, self._target, self._last = source.base, target.base, last
        slab = arith.muli(c.thread_digit(warps, c.threads_per_block // warps), emit.constant(self._panel * self._panels))
        self._row, self._matrix, self._slab = c.thread_digit(8), c.thread_digit(4, 8), slab
        self._words = arith.addi(slab, arith.muli(c.thread_digit(WARP), emit.constant(WORD)))

    @property
    def _panel(self) -> int:
        """Bytes of a panel."""
        return self._tokens * _ROW_BYTES

    def move(self, block: int, half: Any, more: int) -> None:
        """Half a panel so many halves on, an even number."""
        to = arith.addi(self._words, arith.muli(half, emit.constant(WARP * MATRIX_ROW)))
        from_ = emit.offset_bytes(self._source, dynamic=self._place(block, half), static=more // 2 * self._panel)
        for i, two in enumerate(ldmatrix(from_, 4, True)):
            static = (block * self._panels * 64 + more * WARP + 8 * i) * MATRIX_ROW
            llvm.store(two, emit.offset_bytes(self._target, dynamic=to, static=static), alignment=WORD)

    def _place(self, block: int, half: Any) -> Any:
        """Where this lane's row is, of the matrix that it gives the address of: 8 columns of a token."""
        token = arith.minsi(arith.addi(self._row, emit.constant(8 * block)), self._last)
        matrix = arith.addi(self._matrix, arith.muli(arith.remui(half, emit.constant(2)), emit.constant(4)))
        chunk = arith.xori(matrix, arith.remui(token, emit.constant(8)))
        at = arith.addi(self._slab, arith.muli(token, emit.constant(_ROW_BYTES)))
        at = arith.addi(at, arith.muli(chunk, emit.constant(MATRIX_ROW)))
        return arith.addi(at, arith.muli(arith.divui(half, emit.constant(2)), emit.constant(self._panel)))


@lowers(ops.SparseStepOp)
def sparse_step(op: Any, c: LoweringContext) -> None:
    """The lines that have been loaded, as many at a time as `scratch` has room for, and any after them one by one."""
    c.pending.finish_reads()
    total, reg = c.tiles[op.c], Reg.of(op.result.type)
    registers = total.registers("scalar")
    at = {place: i for i, place in enumerate(fragment_blocks(reg.layout, MMA_M16N8_D))}
    rows, columns = (sorted({place[d] for place in at}) for d in range(2))
    products = _StepProducts(op, c, reg)
    indexes, words = _indexes(c.tiles[op.index]), _of_rows(c.tiles[op.words])
    for row in rows:
        slots = [4 * at[row, column] + j for column in columns for j in range(4)]
        sums = products.add(indexes[row], words[row], [registers[slot] for slot in slots])
        for slot, value in zip(slots, sums):
            registers[slot] = value
    c.tiles[op.result] = Fragment(reg, "scalar", registers.__getitem__)


class _StepProducts:
    """Products of the lines of a step: what does not change from row block to row block."""

    def __init__(self, op: Any, c: LoweringContext, reg: Reg) -> None:
        x, scratch = c.places[op.x], c.places[op.scratch]
        warps, self._blocks, self._columns, _ = x.type.shape
        self._table, self._lane, self._at_once = c.places[op.outliers], c.thread_digit(WARP), scratch.type.shape[1]
        self._a = SparseOperand(c, scratch, str(x.type.element))
        warp, _ = place_of_warp(c, reg.layout, 1)
        self._x = emit.offset_bytes(x.base, dynamic=arith.muli(warp, emit.constant(x.type.strides[0] * 2)))
        self._first = _first_column(op, c, reg, self._columns)

    def add(self, index: _Index, numbers: Sequence[Any], sums: Sums) -> Sums:
        """Adds the products of a row block, if it has any. numbers: those of `find_outliers`.

        The condition keeps the assembler from moving the wait for the words in front of the step's products."""
        first, *words = numbers

        def add_all() -> Sums:
            result = sums
            for i in range(0, len(words), self._at_once):
                result = self._add_some(words[i : i + self._at_once], result)
            return self._add_others(arith.addi(first, emit.constant(len(words))), index.end, words[-1], result)

        return _if(emit.below(first, index.end), sums, add_all)

    def _add_some(self, words: Sequence[Any], sums: Sums) -> Sums:
        """Adds lines, if any outlier of them is of this step."""
        lines = [outlier_of(word, emit.of_lane(0, word), self._lane) for word in words]
        places = [arith.subi(line.column, self._first) for line in lines]
        inside = [arith.cmpi(arith.CmpIPredicate.ult, place, emit.constant(self._columns)) for place in places]
        there = [arith.cmpi(arith.CmpIPredicate.ugt, word, emit.constant((1 << 16) - 1)) for word in words]
        mine = [arith.andi(*pair) for pair in zip(inside, there)]
        some = mine[0]
        for other in mine[1:]:
            some = arith.ori(some, other)
        return _if(_vote(some, "any"), sums, lambda: self._multiply(list(zip(lines, places, inside)), sums))

    def _multiply(self, lines: Sequence[tuple[Outlier, Any, Any]], sums: Sums) -> Sums:
        zero = emit.real(0.0, ir.F32Type.get())
        for number, (line, _, inside) in enumerate(lines):
            self._a.write(number, line.row, arith.select(inside, line.value, zero))
        nvvm.bar_warp_sync(emit.constant(-1))
        for number, (_, place, _) in enumerate(lines):
            sums = self._a.multiply(number, self._fragments_of_x(place), sums)
        nvvm.bar_warp_sync(emit.constant(-1))
        for number, (line, _, _) in enumerate(lines):
            self._a.erase(number, line.row)
        nvvm.bar_warp_sync(emit.constant(-1))
        return sums

    def _fragments_of_x(self, place: Any) -> Iterator[list[Any]]:
        """Operand B of 32 words for each eight tokens. An outlier of no column of the step is 0, whatever it meets."""
        row = arith.muli(emit.mask(place, self._columns - 1), emit.constant(MATRIX_ROW))
        mine = emit.offset_bytes(self._x, dynamic=row)
        for block in range(self._blocks):
            yield ldmatrix(emit.offset_bytes(mine, static=block * self._columns * MATRIX_ROW), 4, True)

    def _add_others(self, line: Any, end: Any, last: Any, sums: Sums) -> Sums:
        """Adds lines in memory from `line` on, as long as they begin in the step, if the line before does."""
        limit = arith.addi(self._first, emit.constant(self._columns))
        there = arith.cmpi(arith.CmpIPredicate.ne, emit.of_lane(1, last), emit.constant(0))
        goes_on = arith.andi(there, emit.below(emit.of_lane(0, last), limit))
        return _if(goes_on, sums, lambda: self._walk(line, end, limit, sums))

    def _walk(self, line: Any, end: Any, limit: Any, sums: Sums) -> Sums:
        types = [emit.integer(), *(value.type for value in sums)]
        loop = scf.WhileOp([*types, emit.integer()], [line, *sums])
        before = loop.regions[0].blocks.append(*types)
        after = loop.regions[1].blocks.append(*types, emit.integer())
        with ir.InsertionPoint(before):
            number, *carried = before.arguments
            found = self._load(number, end)
            begins = emit.below(emit.of_lane(0, found), limit)
            scf.ConditionOp(arith.andi(emit.below(number, end), begins), [number, *carried, found])
        with ir.InsertionPoint(after):
            number, *carried, found = after.arguments
            scf.YieldOp([arith.addi(number, emit.constant(1)), *self._add_some([found], list(carried))])
        return list(loop.results)[1:-1]

    def _load(self, line: Any, end: Any) -> Any:
        """This lane's word of a line, or 0 behind the last."""
        lane = arith.extui(emit.integer(64), self._lane)
        mine = arith.muli(arith.addi(first_word(line), lane), emit.constant(WORD, 64))
        return word_if(emit.offset_bytes(self._table.base, dynamic=mine), 0, arith.subi(end, line))


def _if(condition: Any, sums: Sums, action: Callable[[], Sums]) -> Sums:
    """Returns what `action` does on a condition of all lanes; else `sums`."""
    branch = scf.IfOp(condition, [value.type for value in sums], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp(action())
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp(list(sums))
    return list(branch.results)
