"""The rules of `index_outliers`, `copy_lines`, `transpose` and `sparse_step`: products of several tokens with the
outliers of a step, by mma, with the activations that the step has in shared memory.

Lines are sorted by column, and so are their first columns. A warp keeps those of its row blocks in registers, a line to
a lane: how many of them are below a step's first column tells at which line the step's outliers begin.

Operand A of a line is that of `sparse_mma`. Operand B needs no copies: where tokens stand side by side, the x of eight
tokens that an outlier meets is 16 bytes, a row of a matrix that ldmatrix loads, and each lane gives the address of the
row that its word names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm, scf
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.outliers import INDEX_ENDS, LINE, ROW_BITS, SPAN, SPARE, scratch_terms
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import LoweringContext, either, int_attr, when
from lowbit.passes.lowering.fragment import Fragment, fragment_blocks
from lowbit.passes.lowering.mma import ldmatrix, mma_sync
from lowbit.passes.lowering.outlier_lines import WORD, first_word, lines_of, word
from lowbit.passes.lowering.outlier_share import PIECE, WARP, Sums, place_of_warp, word_if
from lowbit.passes.lowering.registry import lowers

_NO_COLUMN = (1 << 30) - 1  # of lanes without a line: more than any
_PER_COPY = WARP * PIECE // LINE  # lines that a warp copies at a time
_USUAL = 2  # lines that outliers of a step are in at least, if there are as many as usual
_MATRIX_ROW = 16  # bytes of a row that ldmatrix loads
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
        heads = [word_if(pointer, i * WARP, lines, _NO_COLUMN) for i in range(count - INDEX_ENDS)]
        numbers += [start, end, *heads]
    c.tiles[op.result] = Fragment(reg, "scalar", numbers.__getitem__)


@lowers(ops.CopyLinesOp)
def copy_lines(op: Any, c: LoweringContext) -> None:
    """A lane copies a piece of 16 bytes of every fourth line; zeros where there is no line."""
    index, target = c.tiles[op.index], c.places[op.target]
    lane, lines = c.thread_digit(WARP), target.type.shape[2]
    column = _first_column(op, c, index.reg.layout, int_attr(op, "columns"))
    own, table = _own_lines(c, target, index.reg.layout, ROWS), c.places[op.outliers]
    piece = arith.muli(lane, emit.constant(PIECE * WORD))
    for row, numbers in enumerate(_indexes(index)):
        line = _first_line(numbers, column, table, lane)
        mine = arith.addi(line, arith.divui(lane, emit.constant(LINE // PIECE)))
        offset = arith.muli(first_word(line), emit.constant(WORD, 64))
        from_ = emit.offset_bytes(table.base, dynamic=arith.addi(offset, arith.extui(emit.integer(64), piece)))
        to = emit.offset_bytes(own, dynamic=piece, static=row * lines * LINE * WORD)
        for first in range(0, lines, _PER_COPY):
            static, there = first * LINE * WORD, emit.below(arith.addi(mine, emit.constant(first)), numbers.end)
            taken = arith.select(there, emit.constant(PIECE * WORD), emit.constant(0))
            places = emit.offset_bytes(to, static=static), emit.offset_bytes(from_, static=static)
            nvvm.cp_async_shared_global(*places, PIECE * WORD, nvvm.LoadCacheModifierKind.CG, cp_size=taken)


def _own_lines(c: LoweringContext, lines: Place, layout: Layout, unit: int) -> Any:
    """Where the lines of this warp's first row block are in a buffer."""
    warp, row_block = place_of_warp(c, layout, unit)
    place = arith.muli(warp, emit.constant(WORD * lines.type.strides[0]))
    place = arith.addi(place, arith.muli(row_block, emit.constant(WORD * lines.type.strides[1])))
    return emit.offset_bytes(lines.base, dynamic=place)


def _first_line(index: _Index, column: Any, table: Place, lane: Any) -> Any:
    """Returns the last line that begins in front of a column, as its outliers may reach beyond it."""
    before = _lines_before(index, column, table, lane)
    return arith.addi(index.start, arith.maxsi(arith.subi(before, emit.constant(1)), emit.constant(0)))


def _first_column(op: Any, c: LoweringContext, layout: Layout, columns: int) -> Any:
    """Returns the first column of this warp's step."""
    warp, _ = place_of_warp(c, layout, ROWS)
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


def _lanes(condition: Any) -> Any:
    """Counts the lanes of a warp of which something is true."""
    kind = ir.Attribute.parse("#nvvm<vote_sync_kind ballot>")
    return emit.intrinsic("llvm.ctpop", nvvm.vote_sync(emit.constant(-1), condition, kind))


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
        step = c.thread_digit(warps, c.threads_per_block // warps)
        self._row, self._matrix = c.thread_digit(8), c.thread_digit(4, 8)
        self._slab = arith.muli(step, emit.constant(self._panel * self._panels))
        words = arith.muli(step, emit.constant(2 * target.type.strides[0]))
        self._words = arith.addi(words, arith.muli(c.thread_digit(WARP), emit.constant(WORD)))

    @property
    def _panel(self) -> int:
        """Bytes of a panel."""
        return self._tokens * _ROW_BYTES

    def move(self, block: int, half: Any, more: int) -> None:
        """Half a panel so many halves on, an even number."""
        to = arith.addi(self._words, arith.muli(half, emit.constant(WARP * _MATRIX_ROW)))
        from_ = emit.offset_bytes(self._source, dynamic=self._place(block, half), static=more // 2 * self._panel)
        for i, two in enumerate(ldmatrix(from_, 4, True)):
            static = (block * (self._panels * 64 + SPARE) + more * WARP + 8 * i) * _MATRIX_ROW
            llvm.store(two, emit.offset_bytes(self._target, dynamic=to, static=static), alignment=WORD)

    def _place(self, block: int, half: Any) -> Any:
        """Where this lane's row is, of the matrix that it gives the address of: 8 columns of a token."""
        token = arith.minsi(arith.addi(self._row, emit.constant(8 * block)), self._last)
        matrix = arith.addi(self._matrix, arith.muli(arith.remui(half, emit.constant(2)), emit.constant(4)))
        chunk = arith.xori(matrix, arith.remui(token, emit.constant(8)))
        at = arith.addi(self._slab, arith.muli(token, emit.constant(_ROW_BYTES)))
        at = arith.addi(at, arith.muli(chunk, emit.constant(_MATRIX_ROW)))
        return arith.addi(at, arith.muli(arith.divui(half, emit.constant(2)), emit.constant(self._panel)))


@lowers(ops.SparseStepOp)
def sparse_step(op: Any, c: LoweringContext) -> None:
    """The lines that have been copied, and any after them."""
    c.pending.finish_reads()
    nvvm.bar_warp_sync(emit.constant(-1))
    total, reg = c.tiles[op.c], Reg.of(op.result.type)
    registers = total.registers("scalar")
    at = {place: i for i, place in enumerate(fragment_blocks(reg.layout, MMA_M16N8_D))}
    rows, columns = (sorted({place[d] for place in at}) for d in range(2))
    products = _StepProducts(op, c, reg)
    for row, index in zip(rows, _indexes(c.tiles[op.index])):
        slots = [4 * at[row, column] + j for column in columns for j in range(4)]
        sums = products.add(row, index, [registers[slot] for slot in slots])
        for slot, value in zip(slots, sums):
            registers[slot] = value
    c.tiles[op.result] = Fragment(reg, "scalar", registers.__getitem__)


class _StepProducts:
    """Products of the lines of a step: what does not change from row block to row block."""

    def __init__(self, op: Any, c: LoweringContext, reg: Reg) -> None:
        x = c.places[op.x]
        _, self._blocks, stored, _ = x.type.shape
        self._columns, self._block_bytes = stored - SPARE, stored * _MATRIX_ROW
        self._table, self._lane, self._lines = c.places[op.outliers], c.thread_digit(WARP), c.places[op.lines]
        self._own = _own_lines(c, self._lines, reg.layout, 1)
        self._element = str(x.type.element)
        warp, _ = place_of_warp(c, reg.layout, 1)
        self._x = emit.offset_bytes(x.base, dynamic=arith.muli(warp, emit.constant(x.type.strides[0] * 2)))
        self._first = arith.addi(c.scalars[op.column], arith.muli(warp, emit.constant(self._columns)))
        self._limit = arith.addi(self._first, emit.constant(self._columns))
        is_head = arith.cmpi(arith.CmpIPredicate.eq, self._lane, emit.constant(0))
        self._from = arith.select(is_head, emit.constant(_NO_COLUMN), arith.subi(emit.constant(0), self._first))
        self._pairs = arith.muli(c.thread_digit(4), emit.constant(2 * WORD))
        row = c.thread_digit(8, 4)
        self._rows = [arith.muli(arith.addi(row, emit.constant(8 * i)), emit.constant(0x10001)) for i in range(2)]

    def add(self, row: int, index: _Index, sums: Sums) -> Sums:
        """Adds the products of a row block."""
        count = self._lines.type.shape[2]
        own = emit.offset_bytes(self._own, static=row * count * LINE * WORD)

        def from_line(number: int, sums: Sums) -> Sums:
            """Adds lines from one on, if it has outliers of the step: the usual number of lines unasked."""
            if number == count:
                return self._walk(index, sums)
            line = emit.offset_bytes(own, static=number * LINE * WORD)
            if number < _USUAL:
                return from_line(number + 1, self._add_line(line, sums))
            head, first = _load(line, 2)
            there = arith.cmpi(arith.CmpIPredicate.ne, first, emit.constant(0))
            begins = arith.andi(there, emit.below(head, self._limit))
            types = [value.type for value in sums]
            return either(begins, types, lambda: from_line(number + 1, self._add_line(line, sums)), lambda: sums)

        return from_line(0, sums)

    def _add_line(self, line: Any, sums: Sums) -> Sums:
        """Adds a line: as it is sorted, its words are 32 columns of operand A, and x at their columns are B."""
        mine = emit.offset_bytes(line, dynamic=arith.muli(self._lane, emit.constant(WORD)))
        (word,), (head,) = _load(mine, 1), _load(line, 1)
        beyond = emit.mask(emit.shift_right(word, ROW_BITS), SPAN - 1)
        column = arith.addi(arith.addi(head, self._from), beyond)
        place = arith.minui(column, emit.constant(self._columns))
        x = emit.offset_bytes(self._x, dynamic=arith.muli(place, emit.constant(_MATRIX_ROW)))
        pairs = emit.offset_bytes(line, dynamic=self._pairs)
        a = [self._operand(_load(emit.offset_bytes(pairs, static=8 * WORD * i), 2)) for i in range(4)]
        result = list(sums)
        for block in range(self._blocks):
            b = self._bits(ldmatrix(emit.offset_bytes(x, static=block * self._block_bytes), 4, True))
            at = slice(4 * block, 4 * block + 4)
            for term in range(scratch_terms(self._element)):
                for half in range(2):
                    (low, low_8), (high, high_8) = (a[2 * half + i][term] for i in range(2))
                    registers = self._bits([low, low_8, high, high_8])
                    result[at] = mma_sync(registers, b[2 * half : 2 * half + 2], result[at], ELEMENTS[self._element])
        return result

    def _bits(self, words: Sequence[Any]) -> list[Any]:
        pair = ir.VectorType.get([2], ir.Type.parse(self._element))
        return [emit.bitcast(pair, word) for word in words]

    def _operand(self, words: Sequence[Any]) -> list[list[Any]]:
        """Two words as registers of operand A: of each term those for this lane's two rows, g and g + 8, where a value
        is 0 but in the row that its word names."""
        first, second = words
        values = emit.permute_bytes(first, second, 0x7632)
        rows = emit.mask(emit.permute_bytes(first, second, 0x5410), 0xF000F)
        here = [_equal_halves(rows, row) for row in self._rows]
        return [[arith.andi(term, mask) for mask in here] for term in self._terms(values)]

    def _terms(self, values: Any) -> list[Any]:
        """Two values as numbers of x's type, or as two whose sums they are."""
        if self._element == "f16":
            return [values]
        halves, f32 = emit.bitcast(ir.VectorType.get([2], ir.F16Type.get()), values), ir.F32Type.get()
        left = [arith.extf(f32, emit.element(halves, i)) for i in range(2)]
        found: list[Any] = []
        for _ in range(2):
            rounded = [arith.truncf(ir.BF16Type.get(), value) for value in left]
            found.append(emit.bitcast(emit.integer(), emit.pair(*rounded)))
            left = [arith.subf(value, arith.extf(f32, r)) for value, r in zip(left, rounded)]
        return found

    def _walk(self, index: _Index, sums: Sums) -> Sums:
        """Adds the lines behind those that have been copied, as long as they begin in the step. Each takes the place
        of the last line."""
        count = self._lines.type.shape[2]
        first = arith.addi(_first_line(index, self._first, self._table, self._lane), emit.constant(count))
        types = [emit.integer(), *(value.type for value in sums)]
        loop = scf.WhileOp([*types, emit.integer()], [first, *sums])
        before = loop.regions[0].blocks.append(*types)
        after = loop.regions[1].blocks.append(*types, emit.integer())
        with ir.InsertionPoint(before):
            line, *carried = before.arguments
            word = self._word(line, index.end)
            begins = emit.below(emit.of_lane(0, word), self._limit)
            scf.ConditionOp(arith.andi(emit.below(line, index.end), begins), [line, *carried, word])
        with ir.InsertionPoint(after):
            line, *carried, word = after.arguments
            scf.YieldOp([arith.addi(line, emit.constant(1)), *self._add_word(word, list(carried))])
        return list(loop.results)[1:-1]

    def _add_word(self, word: Any, sums: Sums) -> Sums:
        """Adds a line of which each lane has a word."""
        place = emit.offset_bytes(self._own, dynamic=arith.muli(self._lane, emit.constant(WORD)))
        nvvm.bar_warp_sync(emit.constant(-1))
        llvm.store(word, place, alignment=WORD)
        nvvm.bar_warp_sync(emit.constant(-1))
        return self._add_line(self._own, sums)

    def _word(self, line: Any, end: Any) -> Any:
        """This lane's word of a line, or 0 behind the last."""
        lane = arith.extui(emit.integer(64), self._lane)
        mine = arith.muli(arith.addi(first_word(line), lane), emit.constant(WORD, 64))
        return word_if(emit.offset_bytes(self._table.base, dynamic=mine), 0, arith.subi(end, line))


def _load(place: Any, count: int) -> list[Any]:
    """Loads words from shared memory."""
    if count == 1:
        return [llvm.load(emit.integer(), place, alignment=WORD)]
    found = llvm.load(ir.VectorType.get([count], emit.integer()), place, alignment=WORD * count)
    return [emit.element(found, i) for i in range(count)]


def _equal_halves(a: Any, b: Any) -> Any:
    """All ones in each half in which two registers agree: small numbers, compared as subnormals of f16."""
    text = "set.eq.u32.f16x2 $0, $1, $2;"
    return llvm.inline_asm(emit.integer(), [a, b], text, "=r,r,r", asm_dialect=0)
