"""Copies of loops that run ahead of what is computed with them, and what runs beside a product."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import expect, in_range, text, verifier
from lowbit.dialect.ops.common import I1, constant_of
from lowbit.dialect.optional import Choice, Flag, Optional
from lowbit.dialect.types import Lowbit

_COPIES = ("lowbit.copy_async", "lowbit.copy_rows", "lowbit.copy_padded")
_IN_COPIES = (*_COPIES, "lowbit.copy_lines", "lowbit.copy_outliers", "lowbit.fill_table", "lowbit.grid_wait")
_IN_CONCURRENT = (*_COPIES, "lowbit.commit", "lowbit.stage", "lowbit.await", "lowbit.arrive")
_MOST_STAGES = 4096  # each has a copy of its own in front of the loop


class PipelineOp(Lowbit.Operation, name="pipeline", traits=[ir.NoTerminatorTrait]):
    """Copies at the head of a loop (an scf.for), of which several rounds are under way while one computes.

    The region `copies` fills buffers of `alloc_shared` for a round; a barrier shows them to all, the rest of the loop
    computes with them, and after it they may be filled again. `grid_wait` among the copies divides them into those that
    may start before the previous kernel has ended and those that may not, and `fill_table` is done once.

    num_stages       rounds that have a stage of the buffers: one computes while the others are copied; at most 4096
    prefetch_limit   rounds whose first copies may be under way before `grid_wait`; without it, as many as have a stage
    refill           when a round starts the copies of a later one: "before_mma", in front of what it computes;
                     "after_first_mma", once its first product by wgmma is under way; "per_warp", there too, with
                     signals in place of the barrier, so that warps can be in different rounds
    scope, warps,    the barrier of a round, as in `barrier`
    async_proxy
    """

    num_stages: ir.IntegerAttr
    scope: ir.StringAttr
    warps: ir.IntegerAttr
    prefetch_limit = Optional(ir.IntegerAttr, "an integer")
    refill = Choice("before_mma", "after_first_mma", "per_warp")
    async_proxy = Flag()
    copies: ext.Region

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.num_stages, "num_stages", 1, _MOST_STAGES)
        if op.prefetch_limit is not None:
            in_range(op.prefetch_limit, "prefetch_limit", 1)
        scope = text(op.scope, "scope")
        expect(scope in ("warps", "block"), "scope", "one of warps, block", repr(scope))
        in_range(op.warps, "warps", 1, 32)
        _check_block(op.copies, "copies")

    @verifier
    def verify_region_invariants(op: Any) -> None:
        _check_copies(op.copies.blocks[0].operations)
        loop = op.operation.parent
        expect(loop.name == "scf.for", "parent", "scf.for", loop.name)
        step = constant_of(loop.operands[2])
        expect(step == 1, "step of the loop", "the constant 1", "no constant" if step is None else step)
        names = [inner.operation.name for inner in loop.regions[0].blocks[0].operations]
        expect(names.index("lowbit.pipeline") == 0, "place", "the head of the loop", f"behind {names[0]}")
        expect(names.count("lowbit.pipeline") == 1, "pipelines in a loop", "one", names.count("lowbit.pipeline"))
        has_product = op.refill == "before_mma" or not {"lowbit.warpgroup_mma", "lowbit.accumulate"}.isdisjoint(names)
        expected = "a lowbit.warpgroup_mma or lowbit.accumulate in the loop"
        expect(has_product, f'refill "{op.refill}"', expected, "none")


class ConcurrentOp(Lowbit.Operation, name="concurrent", traits=[ir.NoTerminatorTrait]):
    """Does what is in the region if the condition holds, while the last product by wgmma is under way.

    Nothing in the region can touch what is being multiplied, so the product need not be finished before.
    """

    condition: ext.Operand[I1]
    body: ext.Region

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_block(op.body, "body")

    @verifier
    def verify_region_invariants(op: Any) -> None:
        _check_names(op.body.blocks[0].operations, "body", _IN_CONCURRENT)
        for inner in op.body.blocks[0].operations:
            touches = inner.operation.name == "lowbit.arrive" and not inner.copies
            expect(not touches, "lowbit.arrive", "copies, which need no reads to be finished", "none")


def _check_block(region: Any, name: str) -> None:
    expect(len(region.blocks) == 1, name, "one block", len(region.blocks))
    arguments = region.blocks[0].arguments
    expect(len(arguments) == 0, f"arguments of {name}", "none", len(arguments))


def _check_names(operations: Any, region: str, allowed: Sequence[str]) -> None:
    """A region may have scalars and some operations."""
    names = [inner.operation.name for inner in operations]
    for name in names:
        expect(name in allowed or name.startswith("arith."), region, f"scalars, {', '.join(allowed)}", name)


def _check_copies(operations: Any) -> None:
    _check_names(operations, "copies", _IN_COPIES)
    waits = [inner for inner in operations if inner.operation.name == "lowbit.grid_wait"]
    expect(len(waits) <= 1, "lowbit.grid_wait among copies", "one at most", len(waits))
    for inner in operations:
        if inner.operation.name in _COPIES:
            owner = inner.target.owner
            made = "a block's argument" if isinstance(owner, ir.Block) else owner.name
            expect(made == "lowbit.alloc_shared", f"target of {inner.operation.name}", "lowbit.alloc_shared", made)
