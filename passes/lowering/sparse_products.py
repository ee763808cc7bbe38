"""Rules of `lower-tiles` for products with outliers (`dialect.formats.outliers` has the lines they lie in).

The lines of a row block are dealt out to warps. The first few of a warp are copied to shared memory long before they
are needed; those for which there is no room there, in row blocks with many outliers, are read where they lie.

*Several tokens, by mma.* A line is 32 columns of a sparse operand A, one for each of its words, with one number in each
column: in the row that the word names. Operand B has, in the row of that column of A, the x that the outlier meets.
That makes two mma.m16n8k16 of a line, for eight tokens each. Where x is bf16, an outlier is the sum of two numbers.

*One token, without.* A lane takes a word, and adds its product to a sum of its own, of which it has one for each of the
16 rows in shared memory. That is an eighth of the instructions, as no two lanes look at one word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm, scf
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.outliers import A_ROW, LINE, scratch_terms
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import MMA_M16N8_D, Layout
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import LoweringContext, int_attr, text_attr
from lowbit.passes.lowering.fragment import Fragment, fragment_blocks
from lowbit.passes.lowering.mma import ldmatrix, mma_sync
from lowbit.passes.lowering.outlier_lines import WORD, Outlier, first_word, lines_of, outlier
from lowbit.passes.lowering.registry import lowers

_MATRIX_ROW = 16  # bytes of a row that ldmatrix loads
_WARP = 32
_PIECE = 4  # words of an asynchronous copy
_AHEAD = 16  # lines of one token that are on their way at once

Sums = list[Any]
"""The accumulators of one row block."""


class _Line(NamedTuple):
    """Where a line is, in device memory or in shared memory, and whether there is one; None: there is."""

    pointer: Any
    inside: Any | None = None

    def words(self, first: Any, count: int, static: int = 0) -> list[Any]:
        """Loads words from `first` on, four at a time; of no line zeros."""
        wide = min(count, _PIECE)
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
        is_head = arith.cmpi(arith.CmpIPredicate.eq, lane, emit.constant(0))
        return outlier(arith.select(is_head, emit.constant(0), word), self.word(0))


_Add = Callable[[list[list[_Line]], Sums], Sums]
"""Adds lines: of each turn one of each row block."""


class _Share:
    """The lines of a warp, whose rows and part are those that it has in a layout [warps, rows, ..]."""

    def __init__(self, op: Any, c: LoweringContext, layout: Layout, unit: int) -> None:
        """unit: rows of dim 1 of the layout for each of its indices."""
        self.table, self.buffer = c.places[op.outliers], c.places[op.buffer]
        warp, rows = emit.constant(0), emit.constant(0)
        for size, divisor, dim, stride in layout.thread_digits():
            if divisor >= _WARP and dim in (0, 1):
                digit = c.threads.digit(size, divisor, layout.threads)
                digit = arith.muli(digit, emit.constant(stride * (unit if dim else 1)))
                warp, rows = (warp, arith.addi(rows, digit)) if dim else (arith.addi(warp, digit), rows)
        self.warp, self._row_block = warp, arith.divui(rows, emit.constant(ROWS))
        self._block = arith.addi(c.scalars[op.first_block], self._row_block)
        warps, _, self.staged, _ = self.buffer.type.shape
        self.parts = emit.constant(warps * int_attr(op, "splits"))
        self.part = arith.addi(arith.muli(c.scalars[op.part], emit.constant(warps)), warp)

    def ends(self, row_block: int) -> tuple[Any, Any]:
        """Loads where the lines of one of the warp's row blocks begin and end."""
        return lines_of(self.table, arith.addi(self._block, emit.constant(row_block)))

    def in_memory(self, line: Any, end: Any) -> _Line:
        """A line in device memory; of one that is not before the end, the table is read in its place."""
        inside = emit.below(line, end)
        first = first_word(arith.select(inside, line, emit.constant(0)))
        offset = arith.muli(first, emit.constant(WORD, 64))
        return _Line(emit.offset_bytes(self.table.base, dynamic=offset), inside)

    def in_shared(self, row_block: int, number: Any) -> _Line:
        """A line of this warp in shared memory, by its number there."""
        warps, blocks, *_ = (stride * WORD for stride in self.buffer.type.strides)
        place = arith.addi(
            arith.muli(self.warp, emit.constant(warps)),
            arith.muli(arith.addi(self._row_block, emit.constant(row_block)), emit.constant(blocks)),
        )
        place = arith.addi(place, arith.muli(number, emit.constant(LINE * WORD)))
        return _Line(emit.offset_bytes(self.buffer.base, dynamic=place))

    def fold(self, row_blocks: Sequence[int], turns: int, sums: Sums, add: _Add) -> Sums:
        """Returns the sums of some row blocks after all their lines. add: adds `turns` lines of each row block."""

        def staged(number: Any, sums: Sums) -> Sums:
            lines = [
                [self.in_shared(row, arith.addi(number, emit.constant(turn))) for row in row_blocks]
                for turn in range(turns)
            ]
            return _if(_any_filled(lines[0]), sums, lambda: add(lines, sums))

        sums = _loop(emit.constant(0), emit.constant(self.staged), emit.constant(turns), sums, staged)
        return self.fold_others(row_blocks, turns, sums, add)

    def all_in_shared(self, row_block: int) -> list[_Line]:
        return [self.in_shared(row_block, emit.constant(number)) for number in range(self.staged)]

    def fold_others(self, row_blocks: Sequence[int], turns: int, sums: Sums, add: _Add) -> Sums:
        """The same for lines beyond those in shared memory, if the last there is one."""
        last = [self.in_shared(row, emit.constant(self.staged - 1)) for row in row_blocks]
        return _if(_any_filled(last), sums, lambda: self._fold_in_memory(row_blocks, turns, sums, add))

    def _fold_in_memory(self, row_blocks: Sequence[int], turns: int, sums: Sums, add: _Add) -> Sums:
        ends = [self.ends(row) for row in row_blocks]
        most = reduce(arith.maxsi, [arith.subi(end, start) for start, end in ends])
        first = arith.addi(self.part, arith.muli(self.parts, emit.constant(self.staged)))

        def others(number: Any, sums: Sums) -> Sums:
            numbers = [arith.addi(number, arith.muli(self.parts, emit.constant(turn))) for turn in range(turns)]
            lines = [[self.in_memory(arith.addi(start, n), end) for start, end in ends] for n in numbers]
            return add(lines, sums)

        return _loop(first, most, arith.muli(self.parts, emit.constant(turns)), sums, others)


def _any_filled(lines: Sequence[_Line]) -> Any:
    """Whether one of these lines has an outlier: none is 0, so its first is not."""
    some = reduce(arith.ori, [line.word(1) for line in lines])
    return arith.cmpi(arith.CmpIPredicate.ne, some, emit.constant(0))


def _loop(start: Any, end: Any, step: Any, sums: Sums, body: Callable[[Any, Sums], Sums]) -> Sums:
    loop = scf.ForOp(start, end, step, list(sums))
    with ir.InsertionPoint(loop.body):
        scf.YieldOp(body(loop.induction_variable, list(loop.inner_iter_args)))
    return list(loop.results)


def _if(condition: Any, sums: Sums, action: Callable[[], Sums]) -> Sums:
    branch = scf.IfOp(condition, [value.type for value in sums], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp(action())
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp(list(sums))
    return list(branch.results)


@lowers(ops.CopyOutliersOp)
def copy_outliers(op: Any, c: LoweringContext) -> None:
    """A lane copies a piece of 16 bytes of every fourth line; zeros where there is no line."""
    layout = Layout.parse(text_attr(op, "layout"))
    share = _Share(op, c, layout, ROWS)
    _, row_blocks, lines, _ = layout.restrict(1, 0, layout.shape[1])[0].shape
    own = row_blocks // max(1, _warps_along(layout, 1))
    lane = c.thread_digit(_WARP)
    piece = arith.muli(arith.remui(lane, emit.constant(LINE // _PIECE)), emit.constant(_PIECE * WORD))
    mine = arith.divui(lane, emit.constant(LINE // _PIECE))
    per_copy = _WARP * _PIECE // LINE
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
            taken = arith.select(source.inside, emit.constant(_PIECE * WORD), emit.constant(0))
            nvvm.cp_async_shared_global(to, from_, _PIECE * WORD, modifier, cp_size=taken)


def _warps_along(layout: Layout, dim: int) -> int:
    """How many warps a layout has side by side along a dim."""
    count = 1
    for size, divisor, d, _ in layout.thread_digits():
        count *= size if d == dim and divisor >= _WARP else 1
    return count


@lowers(ops.SparseMmaOp)
def sparse_mma(op: Any, c: LoweringContext) -> None:
    """A loop over the lines of a few of the warp's row blocks at a time, which carries their accumulators."""
    c.pending.finish_reads()
    total, reg = c.tiles[op.c], Reg.of(op.result.type)
    registers = total.registers("scalar")
    at = {place: i for i, place in enumerate(fragment_blocks(reg.layout, MMA_M16N8_D))}
    rows, columns = (sorted({place[d] for place in at}) for d in range(2))
    products, share = _Products(op, c, len(columns)), _Share(op, c, reg.layout, 1)
    ahead = c.places[op.scratch].type.shape[1]
    for first in range(0, len(rows), ahead):
        some = rows[first : first + ahead]
        slots = [4 * at[row, column] + j for row in some for column in columns for j in range(4)]
        results = share.fold(some, ahead // len(some), [registers[slot] for slot in slots], products.add)
        for slot, value in zip(slots, results):
            registers[slot] = value
    c.tiles[op.result] = Fragment(reg, "scalar", registers.__getitem__)


class _Products:
    """Products of lines by mma: what does not change from line to line.

    A lane has a word. It writes the word's value into operand A in shared memory, a column of its own, and x of all
    tokens into a row of its own of operand B; ldmatrix makes fragments of them. Columns of a line are sorted, so lanes
    that read x of one token read neighbours. A is zero elsewhere: a lane takes back what it has written.
    """

    def __init__(self, op: Any, c: LoweringContext, columns: int) -> None:
        x, scratch = c.places[op.x], c.places[op.scratch]
        self._columns, self._element = columns, str(x.type.element)
        self._lane = c.thread_digit(_WARP)
        self._terms = scratch_terms(self._element)
        warp = c.thread_digit(c.threads_per_block // _WARP, _WARP)
        warp_bytes = arith.muli(warp, emit.constant(WORD * scratch.type.strides[0]))
        self._base = emit.offset_bytes(scratch.base, dynamic=warp_bytes)
        self._line_bytes = WORD * scratch.type.strides[1]
        self._tokens = [self._token(x, i) for i in range(8 * columns)]
        self._a_rows, self._b_rows = self._matrix_rows(c)
        self._clear(scratch.type.shape[1])

    def _token(self, x: Place, number: int) -> Any:
        """Where a token begins; tokens beyond the last read the last."""
        token = arith.minsi(emit.constant(number), arith.subi(x.sizes[0], emit.constant(1)))
        nbytes = emit.constant(x.type.strides[0] * ELEMENTS[self._element].bytes, 64)
        return emit.offset_bytes(x.base, dynamic=arith.muli(arith.extui(emit.integer(64), token), nbytes))

    def _matrix_rows(self, c: LoweringContext) -> tuple[Any, Any]:
        """Where this lane's row of 16 bytes is in A and in B, for ldmatrix."""
        eight, row = c.thread_digit(4, 8), c.thread_digit(8)
        half = arith.remui(eight, emit.constant(2))
        row = arith.addi(row, arith.muli(half, emit.constant(8)))
        column = arith.divui(eight, emit.constant(2))
        a = arith.addi(arith.muli(row, emit.constant(A_ROW)), arith.muli(column, emit.constant(_MATRIX_ROW)))
        b = arith.muli(self._lane, emit.constant(_MATRIX_ROW))
        return emit.offset_bytes(self._base, dynamic=a), emit.offset_bytes(self._base, dynamic=b)

    def _clear(self, lines: int) -> None:
        two = ir.VectorType.get([2], emit.integer())
        mine = emit.offset_bytes(self._base, dynamic=arith.muli(self._lane, emit.constant(8)))
        for line in range(lines):
            for at in range(0, self._terms * ROWS * A_ROW, 8 * _WARP):
                place = emit.offset_bytes(mine, static=line * self._line_bytes + at)
                llvm.store(llvm.mlir_zero(two), place, alignment=8)
        nvvm.bar_warp_sync(emit.constant(-1))

    def add(self, turns: list[list[_Line]], sums: Sums) -> Sums:
        """Adds the lines of several turns, all of which are loaded before the first is multiplied."""
        lines = [(i, line) for lines in turns for i, line in enumerate(lines)]
        loaded = [self._load(line) for _, line in lines]
        for number, (mine, x) in enumerate(loaded):
            self._write_b(number, x)
            self._write_a(number, mine, self._values(mine))
        nvvm.bar_warp_sync(emit.constant(-1))
        size, result = 4 * self._columns, list(sums)
        for number, (i, _) in enumerate(lines):
            at = slice(i * size, (i + 1) * size)
            result[at] = self._multiply(number, result[at])
        nvvm.bar_warp_sync(emit.constant(-1))
        zero = arith.constant(emit.integer(16), 0)
        for number, (mine, _) in enumerate(loaded):
            self._write_a(number, mine, [zero] * self._terms)
        return result

    def _load(self, line: _Line) -> tuple[Outlier, list[Any]]:
        """This lane's outlier, and x of every token that it meets, as bits."""
        mine = line.outlier(self._lane)
        size = ELEMENTS[self._element].bytes
        offset = arith.muli(arith.extui(emit.integer(64), mine.column), emit.constant(size, 64))
        half = emit.integer(16)
        return mine, [llvm.load(half, emit.offset_bytes(row, dynamic=offset), alignment=size) for row in self._tokens]

    def _values(self, mine: Outlier) -> list[Any]:
        """The value as one number of x's type, or as two whose sum it is."""
        type_, f32, half = ir.Type.parse(self._element), ir.F32Type.get(), emit.integer(16)
        first = arith.truncf(type_, mine.value)
        terms = [first]
        if self._terms == 2:
            terms.append(arith.truncf(type_, arith.subf(mine.value, arith.extf(f32, first))))
        return [emit.bitcast(half, term) for term in terms]

    def _write_a(self, number: int, mine: Outlier, values: Sequence[Any]) -> None:
        column = arith.muli(self._lane, emit.constant(2))
        place = arith.addi(arith.muli(mine.row, emit.constant(A_ROW)), column)
        for term, value in enumerate(values):
            static = number * self._line_bytes + term * ROWS * A_ROW
            llvm.store(value, emit.offset_bytes(self._base, dynamic=place, static=static), alignment=2)

    def _b_at(self, number: int, column: int) -> int:
        """Where operand B of eight tokens begins, behind those of A."""
        return number * self._line_bytes + self._terms * ROWS * A_ROW + column * LINE * _MATRIX_ROW

    def _write_b(self, number: int, x: Sequence[Any]) -> None:
        eight = ir.VectorType.get([8], emit.integer(16))
        for column in range(self._columns):
            vector = llvm.mlir_undef(eight)
            for i in range(8):
                vector = llvm.insertelement(vector, x[8 * column + i], emit.constant(i))
            place = emit.offset_bytes(self._b_rows, static=self._b_at(number, column))
            llvm.store(vector, place, alignment=_MATRIX_ROW)

    def _multiply(self, number: int, totals: Sums) -> Sums:
        """Two products for each term and eight tokens: of 16 words each."""
        element, result = ELEMENTS[self._element], list(totals)
        pair = ir.VectorType.get([2], ir.Type.parse(self._element))

        def fragment(place: Any, static: int, transposed: bool = False) -> list[Any]:
            words = ldmatrix(emit.offset_bytes(place, static=static), 4, transposed)
            return [emit.bitcast(pair, word) for word in words]

        start = number * self._line_bytes
        a = [
            [fragment(self._a_rows, start + term * ROWS * A_ROW + 2 * _MATRIX_ROW * half) for half in range(2)]
            for term in range(self._terms)
        ]
        for column in range(self._columns):
            b, at = fragment(self._b_rows, self._b_at(number, column), True), slice(4 * column, 4 * column + 4)
            for halves in a:
                for half, registers in enumerate(halves):
                    result[at] = mma_sync(registers, b[2 * half : 2 * half + 2], result[at], element)
        return result


@lowers(ops.SparseVectorOp)
def sparse_vector(op: Any, c: LoweringContext) -> None:
    """The lines of a few row blocks are loaded at once. Then, row block by row block, each lane adds up its products in
    shared memory, and those of a row are added to its accumulators."""
    c.pending.finish_reads()
    total, reg = c.tiles[op.c], Reg.of(op.result.type)
    registers = total.registers("scalar")
    share, lanes = _Share(op, c, reg.layout, 1), _LaneSums(op, c)
    rows = [row for row, _ in fragment_blocks(reg.layout, MMA_M16N8_D)]
    at_once = max(1, _AHEAD // share.staged)
    for first in range(0, len(rows), at_once):
        some = range(first, min(first + at_once, len(rows)))
        loaded = [lanes.load(share.all_in_shared(rows[i])) for i in some]
        for i, products in zip(some, loaded):
            lanes.clear()
            lanes.add(products)
            share.fold_others([rows[i]], _AHEAD, [], lanes.add_lines)
            for slot, value in zip((4 * i, 4 * i + 2), lanes.of_rows()):
                registers[slot] = arith.addf(registers[slot], value)
    c.tiles[op.result] = Fragment(reg, "scalar", registers.__getitem__)


class _LaneSums:
    """A sum of every lane for each of 16 rows: [16, 32] f32 of a warp in shared memory."""

    def __init__(self, op: Any, c: LoweringContext) -> None:
        self._x, sums = c.places[op.x], c.places[op.scratch]
        self._lane = c.thread_digit(_WARP)
        warp = arith.muli(c.thread_digit(c.threads_per_block // _WARP, _WARP), emit.constant(ROWS * _WARP * WORD))
        self._warp = emit.offset_bytes(sums.base, dynamic=warp)
        self._mine = emit.offset_bytes(self._warp, dynamic=arith.muli(self._lane, emit.constant(WORD)))
        row = arith.muli(c.thread_digit(8, 4), emit.constant(_WARP))
        eight = arith.muli(c.thread_digit(4), emit.constant(8))
        self._quad = emit.offset_bytes(self._warp, dynamic=arith.muli(arith.addi(row, eight), emit.constant(WORD)))

    def clear(self) -> None:
        for row in range(ROWS):
            place = emit.offset_bytes(self._mine, static=row * _WARP * WORD)
            llvm.store(emit.real(0.0, ir.F32Type.get()), place, alignment=WORD)

    def load(self, lines: Sequence[_Line]) -> list[tuple[Outlier, Any]]:
        """This lane's outlier of each line, and the x that it meets."""
        element = str(self._x.type.element)
        size = ELEMENTS[element].bytes
        found: list[tuple[Outlier, Any]] = []
        for line in lines:
            mine = line.outlier(self._lane)
            offset = arith.muli(arith.extui(emit.integer(64), mine.column), emit.constant(size, 64))
            address = emit.offset_bytes(self._x.base, dynamic=offset)
            found.append((mine, llvm.load(ir.Type.parse(element), address, alignment=size)))
        return found

    def add(self, products: Sequence[tuple[Outlier, Any]]) -> None:
        f32 = ir.F32Type.get()
        for mine, x in products:
            place = emit.offset_bytes(self._mine, dynamic=arith.muli(mine.row, emit.constant(_WARP * WORD)))
            old = llvm.load(f32, place, alignment=WORD)
            llvm.store(emit.fma(mine.value, arith.extf(f32, x), old), place, alignment=WORD)

    def add_lines(self, turns: list[list[_Line]], sums: Sums) -> Sums:
        self.add(self.load([line for (line,) in turns]))
        return sums

    def of_rows(self) -> list[Any]:
        """The sums of eight lanes for this lane's rows g and g + 8, when all lanes have theirs."""
        nvvm.bar_warp_sync(emit.constant(-1))
        four = ir.VectorType.get([4], ir.F32Type.get())
        result: list[Any] = []
        for half in range(2):
            at = [emit.offset_bytes(self._quad, static=(8 * half * _WARP + 4 * i) * WORD) for i in range(2)]
            vectors = [llvm.load(four, address, alignment=16) for address in at]
            result.append(reduce(arith.addf, [emit.element(v, i) for v in vectors for i in range(4)]))
        nvvm.bar_warp_sync(emit.constant(-1))
        return result
