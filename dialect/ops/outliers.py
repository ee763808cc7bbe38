"""Outliers: a sparse matrix in lines (`dialect.formats.outliers`) that is added to products and to weights.

To weights in registers they are added panel by panel: a warp walks the lines of its row block, and a *cursor* says how
far it has come.

    %cursor = lowbit.first_outliers %outliers, %block
    loop over panels of columns, whose buffer is all zeros:
        %cursor = lowbit.scatter_outliers %outliers, %buffer, %column, %cursor
        lowbit.barrier
        %sparse = lowbit.load %buffer       fragments
        lowbit.barrier
        lowbit.erase_outliers %buffer, %cursor
"""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import accumulator, activation, expect, fragments, in_range, verifier
from lowbit.dialect.formats.outliers import INDEX_ENDS, LANE_SUMS, LINE, SPARE, scratch_words
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.layouts.layout import local, spatial
from lowbit.dialect.ops.common import I32
from lowbit.dialect.types import Global, GlobalType, Lowbit, Reg, RegType, Shared, SharedType, read_layout, row_major


def _check_table(value: Any) -> None:
    """The view of outliers is that of the table at their head: a word for every row block, and one more."""
    table = Global.of(value.type)
    dense = table.element == "i32" and len(table.shape) == 1 and table.strides == (1,)
    expect(dense and table.shape[0] > 1, "outliers", "the table, [row blocks + 1] of i32", value.type)


def _check_lines(buffer: Any) -> Shared:
    """The buffer of a block's first lines: [warps, row blocks, lines, 32]."""
    lines = Shared.of(buffer.type)
    dense = lines.element == "i32" and len(lines.shape) == 4 and lines.strides == row_major(lines.shape)
    expect(dense and lines.shape[3] == LINE, "buffer", f"[warps, row blocks, lines, {LINE}] of i32, dense", buffer.type)
    return lines


class CopyOutliersOp(Lowbit.Operation, name="copy_outliers"):
    """Starts to copy the first lines of some row blocks from `first_block` on to a buffer [warps, row blocks, lines,
    32] in shared memory, laid out as `layout`; zeros where there are fewer.

    Lines of a row block are dealt out to parts: each index along dim 0 of the buffer is one of `splits` times as many,
    of which this block has those of `part`. A warp copies what it reads. Among the copies of a `pipeline` it is done
    once, behind the first of them.
    """

    outliers: ext.Operand[GlobalType]
    buffer: ext.Operand[SharedType]
    first_block: ext.Operand[I32]
    part: ext.Operand[I32]
    layout: ir.StringAttr
    splits: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_table(op.outliers)
        lines, layout = _check_lines(op.buffer), read_layout(op.layout)
        expect(layout.shape == lines.shape, "shape of the layout", f"the buffer's, {lines.shape}", layout.shape)
        expect(lines.shape[2] % 4 == 0, "lines of the buffer", "a multiple of 4", lines.shape[2])
        in_range(op.splits, "splits", 1)


class LoadOutliersOp(Lowbit.Operation, name="load_outliers"):
    """Words of the first lines of some row blocks from `first_block` on, a word for each lane: [warps, row blocks,
    lines, 32] of i32; zeros where there are fewer lines.

    Lines are dealt out to parts as by `copy_outliers`. In front of a loop with a `pipeline` they are loaded behind the
    first copies that are started there.
    """

    outliers: ext.Operand[GlobalType]
    first_block: ext.Operand[I32]
    part: ext.Operand[I32]
    splits: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_table(op.outliers)
        _check_words(op.result)
        in_range(op.splits, "splits", 1)


def _check_words(value: Any) -> list[int]:
    """Words of lines, one for each lane; returns the number of warps that have different ones, and of row blocks."""
    reg = Reg.of(value.type)
    lanes = len(reg.shape) == 4 and reg.layout.thread_digits()[-1:] == [(LINE, 1, 3, 1)]
    expect(reg.element == "i32" and lanes, "words", f"[warps, row blocks, lines, {LINE}] of i32 by lane", value.type)
    return list(reg.shape[:2])


def _check_products(op: Any, warps: int, row_blocks: int) -> Reg:
    """Checks what products with outliers have in common, and returns the type of the accumulator.

    warps, row_blocks   those that the first lines are of
    """
    x, c, d = Global.of(op.x.type), Reg.of(op.c.type), Reg.of(op.result.type)
    _check_table(op.outliers)
    activation(x.element, "element of x")
    expect(len(x.shape) == 2 and x.strides[1] == 1, "x", "[m, k], dense along k", op.x.type)
    expect(c == d, "result", c, d)
    accumulator(c.element, x.element, "element of c")
    expect(len(c.shape) == 3, "c", "[warps, rows, tokens]", list(c.shape))
    fragments(c.layout, MMA_M16N8_D, "c")
    expected = [c.shape[0], c.shape[1] // ROWS]
    expect([warps, row_blocks] == expected, "warps and row blocks of the lines", expected, [warps, row_blocks])
    in_range(op.splits, "splits", 1)
    return c


def _check_scratch(op: Any, element: str, shape: tuple[int, ...]) -> None:
    """The place that warps need meanwhile."""
    scratch = Shared.of(op.scratch.type)
    dense = scratch.element == element and scratch.shape == shape and scratch.strides == row_major(shape)
    expect(dense, "scratch", f"{list(shape)} of {element}, dense", op.scratch.type)


class SparseMmaOp(Lowbit.Operation, name="sparse_mma"):
    """c + S x^T for the outliers S of some row blocks from `first_block` on: x [m, k] in device memory, c [warps, rows,
    tokens] an accumulator of mma.

    Each index along dim 0 of c has the lines of a part, the first of which `copy_outliers` has copied to the buffer.
    The sum over all parts has each outlier once. Products are exact. In `scratch` [warps of the block, lines, words]
    each warp has so many lines at a time as operands (`dialect.formats.outliers.scratch_words`).
    """

    outliers: ext.Operand[GlobalType]
    buffer: ext.Operand[SharedType]
    scratch: ext.Operand[SharedType]
    x: ext.Operand[GlobalType]
    first_block: ext.Operand[I32]
    part: ext.Operand[I32]
    c: ext.Operand[RegType]
    splits: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        warps, row_blocks, *_ = _check_lines(op.buffer).shape
        c, lines = _check_products(op, warps, row_blocks), Shared.of(op.scratch.type).shape[1]
        words = scratch_words(str(Global.of(op.x.type).element), c.shape[2])
        _check_scratch(op, "i32", (c.layout.threads // 32, lines, words))


class IndexOutliersOp(Lowbit.Operation, name="index_outliers"):
    """Where the outliers of each warp's row blocks from `first_block` on are: [warps, row blocks, numbers, 32] of i32.

    The first number is the first line of the row block and the second the line behind its last, for all lanes; each
    other number is the first column of a line, a line for each lane. In front of a loop with a `pipeline` it is made
    behind the first copies that are started there.
    """

    outliers: ext.Operand[GlobalType]
    first_block: ext.Operand[I32]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_table(op.outliers)
        _check_words(op.result)
        expect(Reg.of(op.result.type).shape[2] > INDEX_ENDS, "numbers of the index", "at least 3", op.result.type)


class CopyLinesOp(Lowbit.Operation, name="copy_lines"):
    """Starts to copy the first lines with outliers of a step to a buffer [warps, row blocks, lines, 32]: the last line
    that begins in front of the step, and those after it; zeros where there is none. A warp copies what it reads.

    index: of the row blocks. The steps of all warps begin at `column` and are `columns` wide, side by side. Among the
    copies of a `pipeline` it is apart: only `sparse_step` waits for it.
    """

    outliers: ext.Operand[GlobalType]
    index: ext.Operand[RegType]
    target: ext.Operand[SharedType]
    column: ext.Operand[I32]
    columns: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_table(op.outliers)
        lines = _check_lines(op.target)
        expect(lines.shape[2] % 4 == 0, "lines of the target", "a multiple of 4", lines.shape[2])
        expected, found = _check_words(op.index), list(lines.shape[:2])
        expect(found == expected, "warps and row blocks of the target", expected, found)
        in_range(op.columns, "columns", 1)


class TransposeOp(Lowbit.Operation, name="transpose"):
    """target[w, t / 8, c, t mod 8] = source[w, c / 64, t, c mod 64]: tokens side by side, from a step's activations as
    wgmma reads them. Tokens from `rows` on are written as the last before it. The warps that share a step share the
    work: all of them meet at barriers, before and after."""

    source: ext.Operand[SharedType]
    target: ext.Operand[SharedType]
    rows: ext.Operand[I32]

    @verifier
    def verify_invariants(op: Any) -> None:
        source, target = Shared.of(op.source.type), Shared.of(op.target.type)
        activation(source.element, "element of the source")
        panels = len(source.shape) == 4 and source.shape[3] == 64 and source.swizzle == 128
        expect(panels and source.shape[2] % 8 == 0, "source", "[warps, panels, tokens, 64], swizzled", op.source.type)
        warps, count, tokens, width = source.shape
        shape = (warps, tokens // 8, count * width + SPARE, 8)
        same = target.element == source.element and target.shape == shape and target.strides == row_major(shape)
        expect(same, "target", f"{list(shape)} of {source.element}, dense", op.target.type)


class SparseStepOp(Lowbit.Operation, name="sparse_step"):
    """c + S x^T for the outliers S of a step: `lines` has the first lines of them, from `copy_lines`, and those behind
    them are read where they lie. c [warps, rows, tokens] is an accumulator of mma. Products are exact.

    x is in shared memory, as `transpose` writes it: [warps, tokens / 8, columns + 8, 8], where the last eight columns
    are zeros for what is of other steps.
    """

    outliers: ext.Operand[GlobalType]
    index: ext.Operand[RegType]
    lines: ext.Operand[SharedType]
    x: ext.Operand[SharedType]
    column: ext.Operand[I32]
    c: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        x, c, d = Shared.of(op.x.type), Reg.of(op.c.type), Reg.of(op.result.type)
        _check_table(op.outliers)
        activation(x.element, "element of x")
        expect(c == d, "result", c, d)
        accumulator(c.element, x.element, "element of c")
        expect(len(c.shape) == 3, "c", "[warps, rows, tokens]", list(c.shape))
        fragments(c.layout, MMA_M16N8_D, "c")
        expected = [c.shape[0], c.shape[1] // ROWS]
        for name, found in (("lines", _check_lines(op.lines).shape[:2]), ("index", _check_words(op.index))):
            expect(list(found) == expected, f"warps and row blocks of the {name}", expected, list(found))
        dense = len(x.shape) == 4 and x.strides == row_major(x.shape) and x.shape[2] > SPARE
        tokens = x.shape[0] == c.shape[0] and 8 * x.shape[1] == c.shape[2] and x.shape[3] == 8
        expect(dense and tokens, "x", "[warps, tokens / 8, columns + 8, 8], dense", op.x.type)


class SparseVectorOp(Lowbit.Operation, name="sparse_vector"):
    """The same for one token x, the first row of [m, k], whose products are spread over the eight columns of c: the sum
    over columns, too, has each outlier once.

    The first lines are those that `load_outliers` has loaded. `scratch` is any dense buffer that has room for [16, 32]
    of f32 for every warp of the block. In front of a loop with a `pipeline` it is done behind all copies that are
    started there, while they are on their way. There `scratch` can be a buffer that the loop copies to: that stage of
    it is meant to which no copy has been started, and each warp has its own part of it.
    """

    outliers: ext.Operand[GlobalType]
    words: ext.Operand[RegType]
    scratch: ext.Operand[SharedType]
    x: ext.Operand[GlobalType]
    first_block: ext.Operand[I32]
    part: ext.Operand[I32]
    c: ext.Operand[RegType]
    splits: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        c = _check_products(op, *_check_words(op.words))
        expect(c.shape[2] == 8, "columns of c", 8, c.shape[2])
        scratch, warps = Shared.of(op.scratch.type), c.layout.threads // 32
        dense = scratch.strides == row_major(scratch.shape) and scratch.bytes % (warps * 16) == 0
        room = dense and scratch.bytes >= warps * LANE_SUMS
        expect(room, "scratch", f"a dense buffer of {LANE_SUMS} bytes for each of {warps} warps", op.scratch.type)


class AddOutliersOp(Lowbit.Operation, name="add_outliers"):
    """buffer[row, c - first_column] += value for every outlier of row block `block` whose column c in memory is in the
    buffer [16, columns] of f32.

    `group` columns take `padded` in memory. All threads of the block take part; barriers come before and after.
    """

    outliers: ext.Operand[GlobalType]
    buffer: ext.Operand[SharedType]
    block: ext.Operand[I32]
    first_column: ext.Operand[I32]
    group: ir.IntegerAttr
    padded: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        buffer = Shared.of(op.buffer.type)
        _check_table(op.outliers)
        expect(buffer.element == "f32", "element of the buffer", "f32", buffer.element)
        expect(len(buffer.shape) == 2 and buffer.shape[0] == ROWS, "buffer", [ROWS, "columns"], list(buffer.shape))
        in_range(op.group, "group", 1, in_range(op.padded, "padded", 1))


CURSOR = 9  # numbers of a thread; `passes.lowering.outliers` says what they are


def _check_cursor(value: Any) -> int:
    """A cursor is [warps, 32, 9] of i32, nine numbers in each thread; returns the number of warps."""
    reg = Reg.of(value.type)
    layout = spatial(reg.shape[0], 32, 1) * local(1, 1, CURSOR)
    expect(reg.element == "i32" and reg.layout == layout, "cursor", f"i32 in {layout}", value.type)
    return reg.shape[0]


def _check_fragments(value: Any, warps: int) -> None:
    """A buffer of fragments, a row block for each warp."""
    buffer = Shared.of(value.type)
    activation(buffer.element, "element of the buffer")
    fragments = len(buffer.shape) == 4 and (buffer.shape[0], *buffer.shape[2:]) == (warps, 32, 8)
    dense = buffer.strides == row_major(buffer.shape)
    expect(fragments and dense, "buffer", f"[{warps}, blocks, 32, 8], dense", value.type)


class FirstOutliersOp(Lowbit.Operation, name="first_outliers"):
    """The cursor before the first outlier of row blocks `block` and on, one for each warp. A row block beyond the last
    has the last one's outliers."""

    outliers: ext.Operand[GlobalType]
    block: ext.Operand[I32]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_table(op.outliers)
        _check_cursor(op.result)


class ScatterOutliersOp(Lowbit.Operation, name="scatter_outliers"):
    """buffer[warp, c] = value for every outlier from the cursor on whose column less `first_column` is a column c of
    the buffer; the cursor behind them.

    The buffer [warps, columns / 16, 32, 8] has a row block for each warp, in the order of fragments of
    mma.m16n8k16: eight elements of each lane. Values are rounded to its type. Each warp writes its part of it: barriers
    of a warp are enough, before and after.
    """

    outliers: ext.Operand[GlobalType]
    buffer: ext.Operand[SharedType]
    first_column: ext.Operand[I32]
    cursor: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_table(op.outliers)
        _check_fragments(op.buffer, _check_cursor(op.cursor))
        expect(op.cursor.type == op.result.type, "result", op.cursor.type, op.result.type)


class EraseOutliersOp(Lowbit.Operation, name="erase_outliers"):
    """Writes 0 where the `scatter_outliers` that gave the cursor has written outliers: the buffer is all zeros again.
    Barriers of a warp are enough, before and after."""

    buffer: ext.Operand[SharedType]
    cursor: ext.Operand[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_fragments(op.buffer, _check_cursor(op.cursor))
