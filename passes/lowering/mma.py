"""Rules of `lower-tiles` for mma.sync: fragments by ldmatrix, products, and sums that are products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm
from lowbit.dialect.elements import ELEMENTS, OPERANDS, Element
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, Packing
from lowbit.dialect.formats.raw_codes import deferred_offset
from lowbit.dialect.formats.reals import REALS, Real
from lowbit.dialect.layouts.fragments import MMA_A, MMA_B_NK, MMA_M16N8_D, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.ops.common import constant_of
from lowbit.dialect.types import Reg, read_format
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place, ThreadIndex
from lowbit.passes.lowering.context import LoweringContext, int_attr
from lowbit.passes.lowering.fragment import Block, Fragment, fragment_blocks
from lowbit.passes.lowering.registry import lowers

_MATRIX_BYTES = 16  # of a row that ldmatrix loads: half of a row of a B fragment


def mma_sync(
    a: Sequence[Any], b: Sequence[Any], c: Sequence[Any], x: Element, a_type: Element | None = None
) -> list[Any]:
    """Returns the four sums of one mma.sync.m16n8 with operands of type x: k16 of f16 and bf16, k8 of tf32, k32 of
    bytes, of which those of a may have another type."""
    if x.mma != "f16":  # other types travel as i32
        a, b = ([emit.bitcast(emit.integer(), x) for x in operand] for operand in (a, b))
    kinds = [getattr(nvvm.MMATypes, operand.mma) for operand in (a_type or x, x)]
    sums = ELEMENTS[x.sums].mlir
    wraps = {"int_overflow_behavior": nvvm.MMAIntOverflow.wrapped} if sums == "i32" else {}
    struct = ir.Type.parse(f"!llvm.struct<({', '.join([sums] * 4)})>")
    result = nvvm.mma_sync(
        struct,
        ir.Attribute.parse(f"#nvvm.shape<m = 16, n = 8, k = {x.mma_k}>"),
        nvvm.MMALayout.row,
        nvvm.MMALayout.col,
        list(a),
        list(b),
        list(c),
        multiplicand_a_ptx_type=kinds[0],
        multiplicand_b_ptx_type=kinds[1],
        **wraps,
    )
    return [llvm.extractvalue(ir.Type.parse(sums), result, [i]) for i in range(4)]


@lowers(ops.MmaOp)
def mma(op: Any, c: LoweringContext) -> None:
    """c + a b^T: along k, then down the rows, so that a register of b serves all row blocks while it is alive."""
    a, b, total = c.tiles[op.a], c.tiles[op.b], c.tiles[op.c]
    bits = OPERANDS[str(b.reg.element)].bits
    a_at = {place: i for i, place in enumerate(fragment_blocks(a.reg.layout, MMA_A[bits]))}
    b_at = {place: i for i, place in enumerate(fragment_blocks(b.reg.layout, MMA_B_NK[bits]))}
    c_at = {place: i for i, place in enumerate(fragment_blocks(total.reg.layout, MMA_M16N8_D))}
    totals = {place: [total.scalar(4 * i + j) for j in range(4)] for place, i in c_at.items()}
    multiply = _mma_tf32 if a.reg.element == "f32" else _mma_of_pairs_or_bytes
    steps, rows, columns = ({at[d] for at in places} for places, d in ((a_at, 1), (a_at, 0), (c_at, 1)))
    for k, row, column in itertools.product(sorted(steps), sorted(rows), sorted(columns)):
        totals[row, column] = multiply(a, a_at[row, k], b, b_at[column, k], totals[row, column])
    registers = {4 * i + j: totals[place][j] for place, i in c_at.items() for j in range(4)}
    c.tiles[op.result] = Fragment(total.reg, "scalar", registers.__getitem__)


def _mma_of_pairs_or_bytes(a: Fragment, i: int, b: Fragment, j: int, total: list[Any]) -> list[Any]:
    """A step of 16 columns of f16 or bf16, or of 32 columns of bytes: fragment i of a, j of b."""
    a_registers = [a.operand(4 * i + r) for r in range(4)]
    b_registers = [b.operand(2 * j + r) for r in range(2)]
    return mma_sync(a_registers, b_registers, total, *(OPERANDS[str(f.reg.element)] for f in (b, a)))


def _mma_tf32(a: Fragment, i: int, b: Fragment, j: int, total: list[Any]) -> list[Any]:
    """A 16-column step as two m16n8k8 of tf32: the pair (2q, 2q+1) of a lane plays columns q and q+4.

    Which k a column stands for does not matter to a sum, as long as a and b agree.
    """
    f32 = ir.F32Type.get()
    for half in range(2):
        low, high = 8 * i + 4 * half, 8 * i + 4 * half + 2  # slots of rows g and g+8
        a_registers = [a.scalar(s) for s in (low, high, low + 1, high + 1)]
        b_registers = [arith.extf(f32, b.scalar(4 * j + 2 * half + e)) for e in range(2)]
        total = mma_sync(a_registers, b_registers, total, ELEMENTS["f32"])
    return total


@lowers(ops.RowSumsOp)
def row_sums(op: Any, c: LoweringContext) -> None:
    """A matrix of ones times b^T: all 16 rows of the product are the sums, of which a lane keeps row g."""
    b = c.tiles[op.source]
    element = ir.Type.parse(str(b.reg.element))
    one = emit.real(1.0, ir.VectorType.get([2], element))
    totals = _sums(b, lambda _: [one] * 4)
    registers = [totals[column][e] for column in sorted(totals) for e in range(2)]
    c.tiles[op.result] = Fragment(Reg.of(op.result.type), "scalar", registers.__getitem__)


@lowers(ops.OffsetSumsOp)
def offset_sums(op: Any, c: LoweringContext) -> None:
    """Minus the deferred offsets times b^T: one fragment of offsets serves all row blocks."""
    b, start, result = c.tiles[op.source], int_attr(op, "start") // BLOCK_K, Reg.of(op.result.type)
    offsets = _Offsets(read_format(op.format), REALS[str(b.reg.element)])
    totals = _sums_by_block(b, start, offsets, _Rows(c)) if op.by_block else _sums(b, lambda k: offsets.of(start + k))
    places = fragment_blocks(result.layout, MMA_M16N8_D)
    c.tiles[op.result] = Fragment(result, "scalar", lambda i: totals[places[i // 4][1]][i % 4])


def _sums(b: Fragment, a: Callable[[int], list[Any]]) -> dict[int, list[Any]]:
    """Accumulators by column of fragments: a(k) times b^T, summed over the fragments k."""
    x, zero = ELEMENTS[str(b.reg.element)], emit.real(0.0, ir.F32Type.get())
    totals: dict[int, list[Any]] = {}
    blocks = fragment_blocks(b.reg.layout, MMA_M16N8K16_B_NK)
    for j, (column, k) in sorted(enumerate(blocks), key=lambda item: item[1][1]):
        registers = a(k)
        pairs = [b.pair(2 * j + r) for r in range(2)]
        totals[column] = mma_sync(registers, pairs, totals.get(column, [zero] * 4), x)
    return totals


class _Offsets:
    """Minus the deferred offsets of blocks of 16 columns."""

    def __init__(self, format_: DType, real: Real) -> None:
        self._format, self._real, self._packing = format_, real, Packing(format_.bits, ROWS, 1)

    def of(self, block: int) -> list[Any]:
        """The registers of an A fragment."""
        vector = ir.VectorType.get([2], ir.Type.parse(self._real.name))
        return [emit.real(-offset, vector) for offset in self.numbers(block)]

    def numbers(self, block: int) -> tuple[float, ...]:
        place = block % (self._packing.chunk // BLOCK_K)
        registers = (self._packing.place(place, register)[1] for register in range(4))
        return tuple(deferred_offset(self._format, self._real, register) for register in registers)


def _sums_by_block(b: Fragment, start: int, offsets: _Offsets, rows: _Rows) -> dict[int, list[Any]]:
    """Accumulators where row i of fragment k of b is block start + 8 k + i: a product for all rows with the same
    offsets."""
    x, total = ELEMENTS[str(b.reg.element)], [emit.real(0.0, ir.F32Type.get())] * 4
    for j, (_, k) in enumerate(fragment_blocks(b.reg.layout, MMA_M16N8K16_B_NK)):
        alike: dict[tuple[float, ...], list[int]] = {}
        for row in range(8):
            alike.setdefault(offsets.numbers(start + 8 * k + row), []).append(row)
        for same in alike.values():
            kept = sum(1 << row for row in same)
            pairs = [rows.kept(b.pair(2 * j + r), kept) for r in range(2)]
            total = mma_sync(offsets.of(start + 8 * k + same[0]), pairs, total, x)
    return {0: total}


@lowers(ops.LoadMatrixOp)
def load_matrix(op: Any, c: LoweringContext) -> None:
    """B fragments by ldmatrix, each a register when first asked for."""
    reg = Reg.of(op.result.type)
    loads = _MatrixLoads(c.threads, c.places[op.source], reg.layout, c.scalars[op.rows])
    bytes_ = OPERANDS[str(reg.element)].bits == 8
    word = emit.integer() if bytes_ else ir.VectorType.get([2], ir.Type.parse(str(reg.element)))

    def register(i: int) -> Any:
        return emit.bitcast(word, loads.registers(*loads.blocks[i // 2])[i % 2])

    fragment = Fragment(reg, "word" if bytes_ else "pair", register)
    c.pending.add_read(fragment)
    c.tiles[op.result] = fragment


@lowers(ops.DiagonalOp)
def diagonal(op: Any, c: LoweringContext) -> None:
    """Makes eight fragments of each one of the source, with one of its eight rows each."""
    source, reg = c.tiles[op.source], Reg.of(op.result.type)
    source_at = {k: j for j, (_, k) in enumerate(fragment_blocks(source.reg.layout, MMA_M16N8K16_B_NK))}
    blocks = [k for _, k in fragment_blocks(reg.layout, MMA_M16N8K16_B_NK)]
    rows = _Rows(c)

    def register(i: int) -> Any:
        block = blocks[i // 2]
        return rows.kept(source.pair(2 * source_at[block // 8] + i % 2), 1 << block % 8)

    c.tiles[op.result] = Fragment(reg, "pair", register)


class _Rows:
    """Some rows of a B fragment, and 0 in place of the others. Rows are the bits of a number."""

    def __init__(self, c: LoweringContext) -> None:
        self._row = c.thread_digit(8, 4)
        self._factors: dict[int, Any] = {}

    def kept(self, pair: Any, rows: int) -> Any:
        if rows == 0xFF:
            return pair
        if rows not in self._factors:
            here = arith.shrui(emit.constant(rows), self._row)
            self._factors[rows] = arith.andi(here, emit.constant(1))
        # By 1 or 0 and not a selection, which takes the pipe that decoding takes. LLVM would make a selection of it.
        text, operands = "mul.lo.s32 $0, $1, $2;", [emit.bitcast(emit.integer(), pair), self._factors[rows]]
        return emit.bitcast(pair.type, llvm.inline_asm(emit.integer(), operands, text, "=r,r,r", asm_dialect=0))


class _MatrixLoads:
    """Loads of matrices of 8 rows of 16 bytes, four at a time where there are as many.

    Lane l gives the address of row l % 8 of matrix l // 8. A fragment is two matrices, side by side along k; the
    other two are the next fragment along n, or along k where n has one only. Rows from `rows` on are read as the last.
    """

    def __init__(self, threads: ThreadIndex, place: Place, layout: Layout, rows: Any) -> None:
        element = OPERANDS[str(place.type.element)]
        self.blocks = fragment_blocks(layout, MMA_B_NK[element.bits])
        n_blocks, k_blocks = (max(block[d] for block in self.blocks) + 1 for d in range(2))
        self._along_n = n_blocks % 2 == 0
        self._together = 2 if self._along_n or k_blocks % 2 == 0 else 1
        lane = threads.digit(32, 1, layout.threads)
        self._row, matrix = arith.remui(lane, emit.constant(8)), arith.divui(lane, emit.constant(8))
        strides, starts = place.type.strides, _starts_of_warp(threads, layout, MMA_B_NK[element.bits])
        self._base = place.base
        for dim, start in starts.items():
            step = arith.muli(start, emit.constant(strides[dim] * element.bytes))
            self._base = emit.offset_bytes(self._base, dynamic=step)
        half = arith.remui(matrix, emit.constant(2))  # of the columns of the fragment
        self._other = arith.divui(matrix, emit.constant(2))  # which of two fragments
        self._last = None if (constant_of(rows) or 0) >= layout.shape[-2] else arith.subi(rows, emit.constant(1))
        if self._last is not None and layout.rank - 2 in starts:
            self._last = arith.subi(self._last, starts[layout.rank - 2])  # counted from the warp's first row
        self._row_bytes = strides[-2] * element.bytes
        self._columns = arith.muli(half, emit.constant(_MATRIX_BYTES))
        if self._together == 2 and not self._along_n:
            beside = arith.muli(self._other, emit.constant(2 * _MATRIX_BYTES))
            self._columns = arith.addi(self._columns, beside)
        self._starts: dict[int, Any] = {}
        self._loaded: dict[Block, list[Any]] = {}

    def _start(self, n_block: int) -> Any:
        """Returns this lane's address for fragment rows from n_block on."""
        if n_block not in self._starts:
            token = arith.addi(self._row, emit.constant(8 * n_block))
            if self._together == 2 and self._along_n:
                token = arith.addi(token, arith.muli(self._other, emit.constant(8)))
            token = token if self._last is None else arith.minsi(token, self._last)
            step = arith.addi(arith.muli(token, emit.constant(self._row_bytes)), self._columns)
            self._starts[n_block] = emit.offset_bytes(self._base, dynamic=step)
        return self._starts[n_block]

    def registers(self, n_block: int, k_block: int) -> list[Any]:
        """Returns the two registers of a fragment."""
        if self._along_n:
            first, which = (n_block // 2 * 2, k_block), n_block % 2
        else:
            first, which = (n_block, k_block // self._together * self._together), k_block % self._together
        if first not in self._loaded:
            address = emit.offset_bytes(self._start(first[0]), static=first[1] * 2 * _MATRIX_BYTES)
            self._loaded[first] = ldmatrix(address, 2 * self._together)
        return self._loaded[first][2 * which : 2 * which + 2]


def _starts_of_warp(threads: ThreadIndex, layout: Layout, fragment: Layout) -> dict[int, Any]:
    """Returns the index at which a warp's part of a tile begins, along the dims that are spread over warps."""
    sizes = (*(1,) * (layout.rank - 2), *fragment.shape)
    starts: dict[int, Any] = {}
    for size, divisor, dim, stride in (layout / fragment.reshape(sizes)).thread_digits():
        digit = threads.digit(size, divisor * fragment.threads, layout.threads)
        part = arith.muli(digit, emit.constant(stride * sizes[dim]))
        starts[dim] = arith.addi(starts[dim], part) if dim in starts else part
    return starts


def ldmatrix(address: Any, count: int, transposed: bool = False) -> list[Any]:
    """Loads matrices of 8 rows of 16 bytes, a row from each lane's address; a register of each."""
    i32 = emit.integer()
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    result = nvvm.ldmatrix(
        address,
        count,
        nvvm.MMALayout.col if transposed else nvvm.MMALayout.row,
        ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m = 8, n = 8>"),
        nvvm.LdStMatrixEltType.B16,
        results=[struct],
    )
    return [llvm.extractvalue(i32, result, [i]) for i in range(count)]
