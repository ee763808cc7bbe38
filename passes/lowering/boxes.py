"""Rules of `lower-tiles` for copies of boxes by the copy engine (TMA)."""

from __future__ import annotations

from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, scf
from lowbit.dialect.types import element_bits
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import CLUSTERS, LoweringContext, int_attr
from lowbit.passes.lowering.registry import lower_block, lowers


@lowers(ops.OneThreadOp)
def one_thread(op: Any, c: LoweringContext) -> None:
    """A branch that leaves products and reads under way."""
    first = arith.cmpi(arith.CmpIPredicate.eq, c.thread_digit(c.threads_per_block), emit.constant(0))
    branch = scf.IfOp(arith.andi(first, c.scalars[op.condition]))
    with ir.InsertionPoint(branch.then_block):
        lower_block(op.body.blocks[0], c)
        scf.YieldOp([])


@lowers(ops.CopyBoxOp, needs=CLUSTERS)
def copy_box(op: Any, c: LoweringContext) -> None:
    target, signals = c.places[op.target], c.places[op.signals]
    row_bytes = emit.constant(target.type.strides[-2] * element_bits(target.type.element) // 8)
    to = emit.offset_bytes(target.base, dynamic=arith.muli(c.scalars[op.row], row_bytes))
    signal = emit.offset_bytes(signals.base, dynamic=arith.muli(c.scalars[op.index], emit.constant(8)))
    operands = [to, c.scalars[op.map], *c.offsets(op), signal]
    several = 1 if op.blocks is None else int_attr(op, "blocks")
    kind = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    to_all = ".multicast::cluster" if several > 1 else ""
    mask = f", {(1 << several) - 1}" if several > 1 else ""
    text = f"{kind}{to_all} [$0], [$1, {{$2, $3}}], [$4]{mask};"
    llvm.inline_asm(None, operands, text, "r,l,r,r,r,~{memory}", has_side_effects=True, asm_dialect=0)
