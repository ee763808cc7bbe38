"""Tiles that go to the shared memory of another block of the cluster."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext
from lowbit.dialect.checks import expect, same_element, verifier
from lowbit.dialect.ops.common import I32
from lowbit.dialect.types import Lowbit, Reg, RegType, Shared, SharedType


class SendOp(Lowbit.Operation, name="send"):
    """Starts to write a tile to target[offsets + index] of block `rank` of the cluster (PTX st.async).

    Its bytes count at signals[index] of this thread's group in that block, where an `arrive` with `expected` bytes says
    how many are to come; who waits there sees them. Both buffers are named as this block's own. Before the first one, a
    barrier of the cluster says that the other block has started.
    """

    value: ext.Operand[RegType]
    target: ext.Operand[SharedType]
    rank: ext.Operand[I32]
    signals: ext.Operand[SharedType]
    index: ext.Operand[I32]
    offsets: Sequence[ext.Operand[I32]]

    @verifier
    def verify_invariants(op: Any) -> None:
        target, tile = Shared.of(op.target.type), Reg.of(op.value.type)
        expect(target.element in ("f32", "i32"), "element of the target", "f32 or i32", target.element)
        same_element(target.element, tile.element, "element of the tile")
        rank = len(target.shape)
        expect(len(tile.shape) == rank, "rank of the tile", f"{rank} as the memory", len(tile.shape))
        expect(len(op.offsets) == rank, "offsets", f"one per dim ({rank})", len(op.offsets))
