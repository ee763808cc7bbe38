"""Fragments of the tensor core: ldmatrix, mma.sync and what is made of them, for `lower-tiles`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowbit.dialect.bindings import arith, ir, llvm, nvvm
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, Packing
from lowbit.dialect.layouts.layout import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK, Layout
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place, ThreadIndex
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.recipes import REALS, deferred_offset

Block = tuple[int, int]


def fragment_blocks(layout: Layout, fragment: Layout) -> list[Block]:
    """For each fragment that a thread holds of a tile, in slot order, its place (row, column) in units of fragments.

    Places count within the thread's part of the tile, along the last two dims.
    """
    rows, columns = fragment.shape
    slots = np.arange(0, layout.locals, fragment.locals)
    place = np.zeros((len(slots), layout.rank), dtype=np.int64)
    for size, divisor, dim, stride in layout.local_digits():
        place[:, dim] += slots // divisor % size * stride
    return [(int(p[-2]) // rows, int(p[-1]) // columns) for p in place]


def mma_sync(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any], kind: str) -> list[Any]:
    """One mma.sync.m16n8k16 (f16, bf16) or m16n8k8 (tf32) with f32 accumulation: the four results."""
    if kind != "f16":  # other types travel as i32
        a, b = ([emit.bitcast(emit.integer(), x) for x in operand] for operand in (a, b))
    types = {"f16": nvvm.MMATypes.f16, "bf16": nvvm.MMATypes.bf16, "tf32": nvvm.MMATypes.tf32}
    k = 8 if kind == "tf32" else 16
    f32 = ir.F32Type.get()
    struct = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    result = nvvm.mma_sync(
        struct,
        ir.Attribute.parse(f"#nvvm.shape<m = 16, n = 8, k = {k}>"),
        nvvm.MMALayout.row,
        nvvm.MMALayout.col,
        list(a),
        list(b),
        list(c),
        multiplicand_a_ptx_type=types[kind],
        multiplicand_b_ptx_type=types[kind],
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(4)]


def lower_mma(a: Fragment, b: Fragment, c: Fragment) -> Fragment:
    """c + a b^T: along k, then down the rows, so that a register of b serves all row blocks while it is alive."""
    a_at = {place: i for i, place in enumerate(fragment_blocks(a.reg.layout, MMA_M16N8K16_A))}
    b_at = {place: i for i, place in enumerate(fragment_blocks(b.reg.layout, MMA_M16N8K16_B_NK))}
    c_at = {place: i for i, place in enumerate(fragment_blocks(c.reg.layout, MMA_M16N8_D))}
    totals = {place: [c.scalar(4 * i + j) for j in range(4)] for place, i in c_at.items()}
    wide = a.reg.element == "f32"
    for k in sorted({column for _, column in a_at}):
        for row in sorted({row for row, _ in a_at}):
            for column in sorted({column for _, column in c_at}):
                i, j = a_at[row, k], b_at[column, k]
                total = totals[row, column]
                if wide:
                    total = _mma_tf32(a, i, b, j, total)
                else:
                    a_registers = [a.pair(4 * i + r) for r in range(4)]
                    b_registers = [b.pair(2 * j + r) for r in range(2)]
                    total = mma_sync(a_registers, b_registers, total, str(a.reg.element))
                totals[row, column] = total
    registers = {4 * i + j: totals[place][j] for place, i in c_at.items() for j in range(4)}
    return Fragment(c.reg, "scalar", registers.__getitem__)


def _mma_tf32(a: Fragment, i: int, b: Fragment, j: int, total: list[Any]) -> list[Any]:
    """A 16-column step as two m16n8k8 of tf32: the pair (2q, 2q+1) of a lane plays columns q and q+4.

    Which k a column stands for does not matter to a sum, as long as a and b agree.
    """
    f32 = ir.F32Type.get()
    for half in range(2):
        low, high = 8 * i + 4 * half, 8 * i + 4 * half + 2  # slots of rows g and g+8
        a_registers = [a.scalar(s) for s in (low, high, low + 1, high + 1)]
        b_registers = [arith.extf(f32, b.scalar(4 * j + 2 * half + e)) for e in range(2)]
        total = mma_sync(a_registers, b_registers, total, "tf32")
    return total


def lower_row_sums(b: Fragment, result: Reg) -> Fragment:
    """A matrix of ones times b^T: all 16 rows of the product are the sums, of which a lane keeps row g."""
    element = ir.Type.parse(str(b.reg.element))
    one = emit.real(1.0, ir.VectorType.get([2], element))
    blocks = fragment_blocks(b.reg.layout, MMA_M16N8K16_B_NK)
    zero = emit.real(0.0, ir.F32Type.get())
    totals: dict[int, list[Any]] = {}
    for j, (column, _) in sorted(enumerate(blocks), key=lambda item: item[1][1]):
        pairs = [b.pair(2 * j + r) for r in range(2)]
        totals[column] = mma_sync([one] * 4, pairs, totals.get(column, [zero] * 4), str(b.reg.element))
    registers = [totals[column][e] for column in sorted(totals) for e in range(2)]
    return Fragment(result, "scalar", registers.__getitem__)


def lower_offset_sums(b: Fragment, result: Reg, format_: DType, start: int) -> Fragment:
    """Minus the deferred_offsetes times b^T: one fragment of deferred_offsetes serves all row blocks."""
    real = REALS[str(b.reg.element)]
    vector = ir.VectorType.get([2], ir.Type.parse(real.name))
    packing = Packing(format_.bits, ROWS, 1)
    zero = emit.real(0.0, ir.F32Type.get())
    totals: dict[int, list[Any]] = {}
    blocks = fragment_blocks(b.reg.layout, MMA_M16N8K16_B_NK)
    for j, (column, k) in sorted(enumerate(blocks), key=lambda item: item[1][1]):
        block = (start // BLOCK_K + k) % (packing.chunk // BLOCK_K)
        numbers = [packing.place(block, register)[1] for register in range(4)]
        deferred_offsetes = [emit.real(-deferred_offset(format_, real, number), vector) for number in numbers]
        pairs = [b.pair(2 * j + r) for r in range(2)]
        totals[column] = mma_sync(deferred_offsetes, pairs, totals.get(column, [zero] * 4), real.name)
    places = fragment_blocks(result.layout, MMA_M16N8_D)
    return Fragment(result, "scalar", lambda i: totals[places[i // 4][1]][i % 4])


def lower_load_matrix(threads: ThreadIndex, place: Place, reg: Reg, rows: Any) -> Fragment:
    """B fragments by ldmatrix, four 8 x 8 matrices at a time where there are as many.

    Lane l gives the address of row l % 8 of matrix l // 8. A fragment is two matrices, side by side along k; the
    other two are the next fragment along n, or along k where n has one only.
    """
    layout, strides = reg.layout, place.type.strides
    blocks = fragment_blocks(layout, MMA_M16N8K16_B_NK)
    n_blocks, k_blocks = (max(at[d] for at in blocks) + 1 for d in range(2))
    along_n = n_blocks % 2 == 0
    together = 2 if along_n or k_blocks % 2 == 0 else 1

    lane = threads.digit(32, 1, layout.threads)
    row, matrix = arith.remui(lane, emit.constant(8)), arith.divui(lane, emit.constant(8))
    base = place.base
    for size, divisor, dim, stride in layout.thread_digits():
        if divisor >= 32:  # warps: the lanes' own part is in `row` and `matrix`
            step = arith.muli(threads.digit(size, divisor, layout.threads), emit.constant(stride * strides[dim] * 2))
            base = emit.offset_bytes(base, dynamic=step)
    half = arith.remui(matrix, emit.constant(2))  # columns 0-7 or 8-15 of the fragment
    other = arith.divui(matrix, emit.constant(2))  # which of two fragments
    last = arith.subi(rows, emit.constant(1))
    row_bytes, column_bytes = strides[-2] * 2, strides[-1] * 2
    columns = arith.muli(half, emit.constant(8 * column_bytes))
    if together == 2 and not along_n:
        columns = arith.addi(columns, arith.muli(other, emit.constant(16 * column_bytes)))
    starts: dict[int, Any] = {}

    def start(n_block: int) -> Any:
        """This lane's address for fragment rows from n_block on."""
        if n_block not in starts:
            token = arith.addi(row, emit.constant(8 * n_block))
            if together == 2 and along_n:
                token = arith.addi(token, arith.muli(other, emit.constant(8)))
            token = arith.minsi(token, last)
            step = arith.addi(arith.muli(token, emit.constant(row_bytes)), columns)
            starts[n_block] = emit.offset_bytes(base, dynamic=step)
        return starts[n_block]

    loaded: dict[Block, list[Any]] = {}

    def registers(n_block: int, k_block: int) -> list[Any]:
        """The two registers of a fragment."""
        first = (n_block // 2 * 2, k_block) if along_n else (n_block, k_block // together * together)
        if first not in loaded:
            address = emit.offset_bytes(start(first[0]), static=first[1] * 16 * column_bytes)
            loaded[first] = _ldmatrix(address, 2 * together)
        which = n_block - first[0] if along_n else k_block - first[1]
        return loaded[first][2 * which : 2 * which + 2]

    vector = ir.VectorType.get([2], ir.Type.parse(str(reg.element)))

    def make(i: int) -> Any:
        n_block, k_block = blocks[i // 2]
        return emit.bitcast(vector, registers(n_block, k_block)[i % 2])

    return Fragment(reg, "pair", make)


def _ldmatrix(address: Any, count: int) -> list[Any]:
    i32 = emit.integer()
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    result = nvvm.ldmatrix(
        address,
        count,
        nvvm.MMALayout.row,
        ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m = 8, n = 8>"),
        nvvm.LdStMatrixEltType.B16,
        results=[struct],
    )
    return [llvm.extractvalue(i32, result, [i]) for i in range(count)]
