"""Products on tensor cores, and the sums that go with them."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import (
    accumulator,
    activation,
    expect,
    factors,
    fragments,
    in_range,
    same_warps,
    verifier,
    within_warp,
)
from lowbit.dialect.elements import OPERANDS
from lowbit.dialect.layouts.fragments import MMA_A, MMA_B_NK, MMA_M16N8_D, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.optional import Flag
from lowbit.dialect.types import FormatAttr, Lowbit, Reg, RegType, Shared, SharedType


class MmaOp(Lowbit.Operation, name="mma", traits=[ext.Pure]):
    """c + a b^T on tensor cores: a [.., m, k], b [.., n, k], c [.., m, n]; leading dims are a batch.

    a and b of f16 or bf16 make mma.m16n8k16; a of f32 (with b of f16 or bf16) makes two mma.m16n8k8.tf32 of the
    same fragments, whose k columns are merely paired otherwise. a and b of f8E4M3FN, and a of i8 or ui8 with b of i8,
    make mma.m16n8k32. Sums are in f32, those of integers in i32.
    """

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    c: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b, c, d = (Reg.of(v.type) for v in (op.a, op.b, op.c, op.result))
        expect(c == d, "result", c, d)
        factors(a.element, b.element, c.element, wide=True)
        rank = len(a.shape)
        expect(rank >= 2 and len(b.shape) == rank, "ranks", "equal and at least 2", (rank, len(b.shape)))
        *batch, m, k = a.shape
        n = b.shape[-2]
        expect(list(b.shape) == [*batch, n, k], "b", [*batch, n, k], list(b.shape))
        expect(list(c.shape) == [*batch, m, n], "c", [*batch, m, n], list(c.shape))
        bits = OPERANDS[str(b.element)].bits
        a_blocks = fragments(a.layout, MMA_A[bits], "a")
        b_blocks = fragments(b.layout, MMA_B_NK[bits], "b")
        c_blocks = fragments(c.layout, MMA_M16N8_D, "c")
        within_warp(a_blocks, rank - 1, "k of a")
        within_warp(b_blocks, rank - 1, "k of b")
        columns = b_blocks.reduce((-1,)).permute((*range(rank - 2), rank - 1, rank - 2))
        same_warps(a_blocks.reduce((-1,)), c_blocks.reduce((-1,)), "a")
        same_warps(columns, c_blocks.reduce((-2,)), "b")


def check_warpgroup(op: Any, layout: Layout, columns: int, row: int | None = None) -> None:
    """b is [.., k / 64, n, 64] in shared memory (128 for bytes), swizzled, of which columns start .. start + columns
    are used; and of n as many as the result has, from `row` on, or else all.

    All four warps of a warpgroup have the same index, and one only, along the leading dims.
    """
    b = Shared.of(op.b.type)
    x = OPERANDS[str(b.element)]
    expect(b.swizzle == 128, "swizzle of b", 128, b.swizzle)
    expect(len(b.shape) == layout.rank + 1, "rank of b", layout.rank + 1, len(b.shape))
    *batch, panels, n, width = b.shape
    panel = x.per_panel
    expect(width == panel, "b", f"rows of {panel} columns: [.., k / {panel}, n, {panel}]", list(b.shape))
    if row is not None:
        expect(row % 8 == 0 and row + layout.shape[-1] <= n, "row", f"a multiple of 8 inside of {n}", row)
        n = layout.shape[-1]
    expect(n % 8 == 0 and n <= 256, "n", "a multiple of 8 up to 256", n)
    expect([*layout.shape[:-2], layout.shape[-1]] == [*batch, n], "result", f"{[*batch, 'm', n]}", list(layout.shape))
    start = in_range(op.start, "start", 0, panel * panels - columns)
    whole = start % x.mma_k == 0 and columns % x.mma_k == 0
    expect(whole, "start and columns", f"multiples of {x.mma_k}", (start, columns))
    inside = [digit for digit in layout.thread_digits() if digit.divisor < 128] + list(layout.local_digits())
    for digit in inside:
        expect(digit.dim >= layout.rank - 2, f"dim {digit.dim} of the result", "the same in all of a warpgroup", layout)


class WarpgroupMmaOp(Lowbit.Operation, name="warpgroup_mma"):
    """c + a b^T by wgmma: a [.., m, k] in registers as for `mma`, b columns start .. start + k of shared memory.

    Its four warps bring 16 rows each of a 64-row instruction and share b [.., k / 64, n, 64] (PTX ISA 9.7.15). With
    `overlap` it may be begun before the last such product has ended; c is zero then.
    """

    a: ext.Operand[RegType]
    b: ext.Operand[SharedType]
    c: ext.Operand[RegType]
    start: ir.IntegerAttr
    overlap = Flag()
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b, c, d = Reg.of(op.a.type), Shared.of(op.b.type), Reg.of(op.c.type), Reg.of(op.result.type)
        expect(c == d, "result", c, d)
        factors(a.element, b.element, c.element, wide=False)
        check_warpgroup(op, c.layout, a.shape[-1])
        expect(list(a.shape[:-1]) == list(c.shape[:-1]), "a", [*c.shape[:-1], "k"], list(a.shape))
        fragment = MMA_A[OPERANDS[str(b.element)].bits]
        a_blocks, c_blocks = fragments(a.layout, fragment, "a"), fragments(c.layout, MMA_M16N8_D, "c")
        within_warp(a_blocks, len(a.shape) - 1, "k of a")
        within_warp(c_blocks, len(a.shape) - 1, "columns of c")
        same_warps(a_blocks.reduce((-1,)), c_blocks.reduce((-1,)), "a")


class WarpgroupRowSumsOp(Lowbit.Operation, name="warpgroup_row_sums"):
    """Sums of b over columns start .. start + columns, as `row_sums` makes them of registers: ones times b^T."""

    b: ext.Operand[SharedType]
    start: ir.IntegerAttr
    columns: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        d = Reg.of(op.result.type)
        activation(Shared.of(op.b.type).element, "element of b")
        check_warpgroup(op, d.layout, in_range(op.columns, "columns", 16))
        accumulator(d.element, Shared.of(op.b.type).element, "element of the result")


def _check_sums(b: Reg, sums: Reg) -> Layout:
    """Sums in f32 of B fragments in registers: b's layout in fragments."""
    activation(b.element, "element of the source")
    accumulator(sums.element, b.element, "element of the result")
    return fragments(b.layout, MMA_M16N8K16_B_NK, "source")


class RowSumsOp(Lowbit.Operation, name="row_sums", traits=[ext.Pure]):
    """Sums along k of b [.., n, k], as [.., 1, n] in f32, laid out as a row of mma's accumulator.

    Made with tensor cores (a matrix of ones times b), so that the sums land where an accumulator needs them.
    """

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        b, d = Reg.of(op.source.type), Reg.of(op.result.type)
        blocks = _check_sums(b, d)
        *batch, n, _ = b.shape
        expect(list(d.shape) == [*batch, 1, n], "result", [*batch, 1, n], list(d.shape))
        rank = len(b.shape)
        within_warp(blocks, rank - 1, "k of the source")
        columns = blocks.reduce((-1,)).permute((*range(rank - 2), rank - 1, rank - 2))
        sums = MMA_M16N8_D.reduce((0,)).reshape((*(1,) * (rank - 1), 8))
        expect(d.layout == columns * sums, "layout of the result", columns * sums, d.layout)


class OffsetSumsOp(Lowbit.Operation, name="offset_sums", traits=[ext.Pure]):
    """-sum_k offset(row, k) b[.., n, k], an accumulator [.., m, n] for mma to start from when a is decoded with
    deferred offsets.

    The offsets of a 16 x 16 block of `format` depend on its place in a chunk (`dialect.formats.packing`) and repeat
    down the rows; `start` is the column of the packed weight, modulo the chunk, that column 0 of b meets. With
    `by_block`, b has eight rows, as the source of `diagonal` has them: row i meets blocks i, i + 8, .. of 16 columns
    from there on.
    """

    source: ext.Operand[RegType]
    format: FormatAttr
    start: ir.IntegerAttr
    by_block = Flag()
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        b, d = Reg.of(op.source.type), Reg.of(op.result.type)
        _check_sums(b, d)
        fragments(d.layout, MMA_M16N8_D, "result")
        *batch, n, _ = b.shape
        expect([*d.shape[:-2], d.shape[-1]] == [*batch, n], "result", f"{[*batch, 'm', n]}", list(d.shape))
        start = int(ir.IntegerAttr(op.start).value)
        expect(start >= 0 and start % 16 == 0, "start", "a multiple of 16", start)
        expect(not op.by_block or n == 8, "rows of the source", 8, n)
