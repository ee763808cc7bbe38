"""Copies of boxes of a tensor by the copy engine of a multiprocessor (TMA), which one thread asks for."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import expect, in_range, verifier
from lowbit.dialect.ops.common import I1, I32
from lowbit.dialect.optional import Optional
from lowbit.dialect.types import Lowbit, Shared, SharedType

_IN_ONE_THREAD = ("lowbit.await", "lowbit.arrive", "lowbit.copy_box", "lowbit.stage")


class CopyBoxOp(Lowbit.Operation, name="copy_box"):
    """Starts to copy the box of a tensor map whose first element is at `offsets`, the last dim first, to the rows of
    `target` from `row` on. Elements outside of the tensor are zeros. Its bytes count at signals[index], where an
    `arrive` with `expected` bytes says how many are to come. Stands in a `one_thread`.

    blocks  the copy goes to the same place in so many blocks of the cluster, and counts at the signal of each
    """

    map: ext.Operand[Any]
    target: ext.Operand[SharedType]
    row: ext.Operand[I32]
    signals: ext.Operand[SharedType]
    index: ext.Operand[I32]
    offsets: Sequence[ext.Operand[I32]]
    blocks = Optional(ir.IntegerAttr, "an integer")

    @verifier
    def verify_invariants(op: Any) -> None:
        expect(str(op.map.type) == "!llvm.ptr", "map", "a parameter of kind tensor_map, !llvm.ptr", op.map.type)
        expect(len(op.offsets) == 2, "offsets", "two: column, row", len(op.offsets))
        target = Shared.of(op.target.type)
        expect(target.swizzle == 128, "swizzle of the target", 128, target.swizzle)
        parent = op.operation.parent.name
        expect(parent == "lowbit.one_thread", "parent", "lowbit.one_thread", parent)
        if op.blocks is not None:
            in_range(op.blocks, "blocks", 1, 8)


class OneThreadOp(Lowbit.Operation, name="one_thread", traits=[ir.NoTerminatorTrait]):
    """Does what is in the region in one thread of the block, if the condition holds; a product by wgmma may be under
    way."""

    condition: ext.Operand[I1]
    body: ext.Region

    @verifier
    def verify_invariants(op: Any) -> None:
        expect(len(op.body.blocks) == 1, "body", "one block", len(op.body.blocks))
        names = [inner.operation.name for inner in op.body.blocks[0].operations]
        for name in names:
            allowed = name in _IN_ONE_THREAD or name.startswith("arith.")
            expect(allowed, "body", f"scalars, {', '.join(_IN_ONE_THREAD)}", name)
