"""Outliers: a sparse matrix in lines (`dialect.formats.outliers`) that is added to products and to weights."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import accumulator, activation, expect, fragments, in_range, verifier
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import MMA_M16N8_D
from lowbit.dialect.ops.common import I32
from lowbit.dialect.types import Global, GlobalType, Lowbit, Reg, RegType, Shared, SharedType


def _check_table(value: Any) -> None:
    """The view of outliers is that of the table at their head: a word for every row block, and one more."""
    table = Global.of(value.type)
    dense = table.element == "i32" and len(table.shape) == 1 and table.strides == (1,)
    expect(dense and table.shape[0] > 1, "outliers", "the table, [row blocks + 1] of i32", value.type)


class SparseMmaOp(Lowbit.Operation, name="sparse_mma"):
    """c + S x^T for the outliers S of some row blocks from `first_block` on: x [m, k] in device memory, c [warps, rows,
    tokens] an accumulator of mma.

    Lines of a row block are dealt out to parts: each index along dim 0 of c is one of `splits` times as many, of which
    this block has those of `part`. The sum over all parts has each outlier once. Values and x are multiplied as tf32,
    which holds both exactly.
    """

    outliers: ext.Operand[GlobalType]
    x: ext.Operand[GlobalType]
    first_block: ext.Operand[I32]
    part: ext.Operand[I32]
    c: ext.Operand[RegType]
    splits: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        x, c, d = Global.of(op.x.type), Reg.of(op.c.type), Reg.of(op.result.type)
        _check_table(op.outliers)
        activation(x.element, "element of x")
        expect(len(x.shape) == 2 and x.strides[1] == 1, "x", "[m, k], dense along k", op.x.type)
        expect(c == d, "result", c, d)
        accumulator(c.element, x.element, "element of c")
        expect(len(c.shape) == 3, "c", "[warps, rows, tokens]", list(c.shape))
        fragments(c.layout, MMA_M16N8_D, "c")
        in_range(op.splits, "splits", 1)


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
