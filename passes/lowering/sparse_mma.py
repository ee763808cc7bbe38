"""The rule of `sparse_mma`: products of several tokens with outliers, by mma.

A line is 32 columns of a sparse operand A, one for each of its words, with one number in each column: in the row that
the word names. Operand B has, in the row of that column of A, the x that the outlier meets. That makes two mma.m16n8k16
of a line, for eight tokens each. Where x is bf16, an outlier is the sum of two numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.outliers import A_ROW, LINE, scratch_terms
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import LoweringContext
from lowbit.passes.lowering.fragment import Fragment, fragment_blocks
from lowbit.passes.lowering.mma import ldmatrix, mma_sync
from lowbit.passes.lowering.outlier_lines import WORD, Outlier
from lowbit.passes.lowering.outlier_share import WARP, Line, StagedShare, Sums
from lowbit.passes.lowering.registry import lowers

_MATRIX_ROW = 16  # bytes of a row that ldmatrix loads


@lowers(ops.SparseMmaOp)
def sparse_mma(op: Any, c: LoweringContext) -> None:
    """A loop over the lines of a few of the warp's row blocks at a time, which carries their accumulators."""
    c.pending.finish_reads()
    total, reg = c.tiles[op.c], Reg.of(op.result.type)
    registers = total.registers("scalar")
    at = {place: i for i, place in enumerate(fragment_blocks(reg.layout, MMA_M16N8_D))}
    rows, columns = (sorted({place[d] for place in at}) for d in range(2))
    products, share = _Products(op, c, len(columns)), StagedShare(op, c, reg.layout, 1)
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
        self._lane = c.thread_digit(WARP)
        self._terms = scratch_terms(self._element)
        warp = c.thread_digit(c.threads_per_block // WARP, WARP)
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
            for at in range(0, self._terms * ROWS * A_ROW, 8 * WARP):
                place = emit.offset_bytes(mine, static=line * self._line_bytes + at)
                llvm.store(llvm.mlir_zero(two), place, alignment=8)
        nvvm.bar_warp_sync(emit.constant(-1))

    def add(self, turns: list[list[Line]], sums: Sums) -> Sums:
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

    def _load(self, line: Line) -> tuple[Outlier, list[Any]]:
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
