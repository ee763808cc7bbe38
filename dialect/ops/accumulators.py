"""Sums of products by wgmma that stay in their registers while the program goes on.

`warpgroup_mma` has a result, so whatever uses it waits for the product. Here the program says itself when it waits:

    %sums = lowbit.accumulator            registers of their own, for the whole program
    lowbit.clear_accumulator %sums
    loop:
        lowbit.accumulate %a, %b, %sums   begins a product and goes on
        lowbit.await_products, pending 1  all but the last one have ended: their a and b are free
    %total = lowbit.read_accumulator %sums
"""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import expect, fragments, in_range, same_element, same_warps, verifier, within_warp
from lowbit.dialect.layouts.layout import MMA_M16N8_D, MMA_M16N8K16_A
from lowbit.dialect.ops.products import check_warpgroup
from lowbit.dialect.optional import Flag
from lowbit.dialect.types import Lowbit, Reg, RegType, Shared, SharedType


def _check_accumulator(value: Any) -> Reg:
    """A value must come from `accumulator`: any other tile has registers that the compiler may move."""
    owner = value.owner
    made = "a block's argument" if isinstance(owner, ir.Block) else owner.name
    expect(made == "lowbit.accumulator", "sums", "the result of lowbit.accumulator", made)
    return Reg.of(value.type)


class AccumulatorOp(Lowbit.Operation, name="accumulator"):
    """Registers for the sums of products by wgmma [.., m, n], in f32. What is in them at first is unknown."""

    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        reg = Reg.of(op.result.type)
        expect(reg.element == "f32", "element of the result", "f32", reg.element)
        within_warp(fragments(reg.layout, MMA_M16N8_D, "the result"), reg.layout.rank - 1, "columns of the result")


class ClearAccumulatorOp(Lowbit.Operation, name="clear_accumulator"):
    """Sets sums to zero. No product may be under way."""

    sums: ext.Operand[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_accumulator(op.sums)


class AccumulateOp(Lowbit.Operation, name="accumulate"):
    """Begins sums += a b^T by wgmma: a [.., m, k] in registers as for `mma`, b columns start .. start + k of shared
    memory [.., k / 64, n, 64]. Neither may change before `await_products` or `read_accumulator` has waited.

    more  the next `accumulate` belongs to the same product: they are waited for together
    """

    a: ext.Operand[RegType]
    b: ext.Operand[SharedType]
    sums: ext.Operand[RegType]
    start: ir.IntegerAttr
    more = Flag()

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b, sums = Reg.of(op.a.type), Shared.of(op.b.type), _check_accumulator(op.sums)
        same_element(b.element, a.element, "element of a")
        check_warpgroup(op, sums.layout, a.shape[-1])
        expect(list(a.shape[:-1]) == list(sums.shape[:-1]), "a", [*sums.shape[:-1], "k"], list(a.shape))
        a_blocks, blocks = fragments(a.layout, MMA_M16N8K16_A, "a"), fragments(sums.layout, MMA_M16N8_D, "sums")
        within_warp(a_blocks, len(a.shape) - 1, "k of a")
        same_warps(a_blocks.reduce((-1,)), blocks.reduce((-1,)), "a")


class AwaitProductsOp(Lowbit.Operation, name="await_products"):
    """Waits until at most the last `pending` products of `accumulate` are under way."""

    pending: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.pending, "pending", 0, 7)


class ReadAccumulatorOp(Lowbit.Operation, name="read_accumulator"):
    """Waits for all products and gives the sums as a tile."""

    sums: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        sums = _check_accumulator(op.sums)
        expect(Reg.of(op.result.type) == sums, "result", sums, Reg.of(op.result.type))
