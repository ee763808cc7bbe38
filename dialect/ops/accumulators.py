"""Sums of products by wgmma that stay in their registers while the program goes on.

`warpgroup_mma` has a result, so whatever uses it waits for the product. Here the program says itself when it waits:

    %sums = lowbit.accumulator            registers of their own, for the whole program
    lowbit.clear_accumulator %sums
    loop:
        lowbit.accumulate %a, %b, %sums   begins a product and goes on
        lowbit.await_products, pending 1  all but the last one have ended: their a and b are free
    %total = lowbit.read_accumulator %sums

Sums that products are added to only when they have ended, since each has a scale of its own, are an accumulator, too:

    lowbit.accumulate %a, %b, %product, fresh
    lowbit.add_scaled %product, %scale, %sums, pending 0
    lowbit.add_outer %offset, %sums_of_x, %sums
"""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import expect, factors, fragments, in_range, same_warps, verifier, within_warp
from lowbit.dialect.elements import OPERANDS
from lowbit.dialect.layouts.fragments import MMA_A, MMA_M16N8_D
from lowbit.dialect.ops.products import check_warpgroup
from lowbit.dialect.optional import Flag, Optional
from lowbit.dialect.types import Lowbit, Reg, RegType, Shared, SharedType


def _check_accumulator(value: Any) -> Reg:
    """A value must come from `accumulator`: any other tile has registers that the compiler may move."""
    owner = value.owner
    made = "a block's argument" if isinstance(owner, ir.Block) else owner.name
    expect(made == "lowbit.accumulator", "sums", "the result of lowbit.accumulator", made)
    return Reg.of(value.type)


class AccumulatorOp(Lowbit.Operation, name="accumulator"):
    """Registers for the sums of products by wgmma [.., m, n], in f32, of integers in i32. What is in them at first is
    unknown."""

    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        reg = Reg.of(op.result.type)
        expect(reg.element in ("f32", "i32"), "element of the result", "f32 or i32", reg.element)
        within_warp(fragments(reg.layout, MMA_M16N8_D, "the result"), reg.layout.rank - 1, "columns of the result")


class ClearAccumulatorOp(Lowbit.Operation, name="clear_accumulator"):
    """Sets sums to zero. No product may be under way."""

    sums: ext.Operand[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_accumulator(op.sums)


class AccumulateOp(Lowbit.Operation, name="accumulate"):
    """Begins sums += a b^T by wgmma: a [.., m, k] in registers as for `mma`, b columns start .. start + k of shared
    memory [.., k / 64, n, 64] (128 for bytes). Neither may change before `await_products` or `read_accumulator` has
    waited.

    row      of b's n, the first that is used; as many are as the sums have
    more     the next `accumulate` belongs to the same product: they are waited for together
    held     the same, and this one is begun with the next
    fresh    sums = a b^T: what was in the sums does not count
    block    of the blocks of 16 rows that a warp has of a and of the sums, the one that is multiplied; all if absent
    pending  of the last products, how many may still be under way afterwards, so that registers of a are free; any if
             absent
    """

    a: ext.Operand[RegType]
    b: ext.Operand[SharedType]
    sums: ext.Operand[RegType]
    start: ir.IntegerAttr
    row = Optional(ir.IntegerAttr, "an integer")
    block = Optional(ir.IntegerAttr, "an integer")
    pending = Optional(ir.IntegerAttr, "an integer")
    more = Flag()
    held = Flag()
    fresh = Flag()

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b, sums = Reg.of(op.a.type), Shared.of(op.b.type), _check_accumulator(op.sums)
        factors(a.element, b.element, sums.element, wide=False)
        row = None if op.row is None else in_range(op.row, "row", 0)
        check_warpgroup(op, sums.layout, a.shape[-1], row)
        expect(list(a.shape[:-1]) == list(sums.shape[:-1]), "a", [*sums.shape[:-1], "k"], list(a.shape))
        fragment = MMA_A[OPERANDS[str(b.element)].bits]
        a_blocks, blocks = fragments(a.layout, fragment, "a"), fragments(sums.layout, MMA_M16N8_D, "sums")
        within_warp(a_blocks, len(a.shape) - 1, "k of a")
        same_warps(a_blocks.reduce((-1,)), blocks.reduce((-1,)), "a")
        if op.block is not None:
            in_range(op.block, "block", 0, blocks.reduce((-1,)).locals - 1)
        if op.pending is not None:
            in_range(op.pending, "pending", 0, 7)


class AwaitProductsOp(Lowbit.Operation, name="await_products"):
    """Waits until at most the last `pending` products of `accumulate` are under way."""

    pending: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.pending, "pending", 0, 7)


class AddScaledOp(Lowbit.Operation, name="add_scaled"):
    """Waits until at most the last `pending` products of `accumulate` are under way, and adds one that has ended to
    other sums, in f32: sums += scale * product, rounded once, or sums += product. Before, an outer product may be added
    to the product, which is rounded once for that: product + column * row.

    scale        one tile [.., m, 1] in f32, or none
    column, row  one tile [.., m, 1] and one [.., 1, n] in f32, or none
    """

    product: ext.Operand[RegType]
    scale: Sequence[ext.Operand[RegType]]
    sums: ext.Operand[RegType]
    column: Sequence[ext.Operand[RegType]]
    row: Sequence[ext.Operand[RegType]]
    pending: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        product, sums = _check_accumulator(op.product), _check_accumulator(op.sums)
        expect(op.product != op.sums, "sums", "another accumulator than the product", "the same")
        expect(sums.element == "f32", "element of the sums", "f32", sums.element)
        expect(product.layout == sums.layout, "layout of the product", sums.layout, product.layout)
        in_range(op.pending, "pending", 0, 7)
        expect(len(op.scale) <= 1, "scale", "one at most", len(op.scale))
        expect(len(op.column) <= 1, "column", "one at most", len(op.column))
        expect(len(op.row) == len(op.column), "number of rows", len(op.column), len(op.row))
        rank = sums.layout.rank
        rows, columns = sums.layout.reduce((rank - 1,)), sums.layout.reduce((rank - 2,))
        for name, tiles, layout in (("scale", op.scale, rows), ("column", op.column, rows), ("row", op.row, columns)):
            for reg in (Reg.of(tile.type) for tile in tiles):
                expect((reg.element, reg.layout) == ("f32", layout), name, f"f32 in {layout}", reg)


class AddOuterOp(Lowbit.Operation, name="add_outer"):
    """Adds the outer product of a column and a row to sums that no product is under way to: sums += column * row in
    f32, each rounded once.

    column  a tile [.., m, 1] in f32
    row     a tile [.., 1, n] in f32
    """

    column: ext.Operand[RegType]
    row: ext.Operand[RegType]
    sums: ext.Operand[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        sums = _check_accumulator(op.sums)
        expect(sums.element == "f32", "element of the sums", "f32", sums.element)
        rank = sums.layout.rank
        for name, value, reduced in (("column", op.column, rank - 1), ("row", op.row, rank - 2)):
            reg, layout = Reg.of(value.type), sums.layout.reduce((reduced,))
            expect((reg.element, reg.layout) == ("f32", layout), name, f"f32 in {layout}", reg)


class ReadAccumulatorOp(Lowbit.Operation, name="read_accumulator"):
    """Waits for all products and gives the sums as a tile."""

    sums: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        sums = _check_accumulator(op.sums)
        expect(Reg.of(op.result.type) == sums, "result", sums, Reg.of(op.result.type))
