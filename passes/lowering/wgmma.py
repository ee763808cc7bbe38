"""Rules of `lower-tiles` for products by wgmma; `passes.lowering.warpgroup` writes the instructions."""

from __future__ import annotations

from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.types import Reg
from lowbit.passes.lowering.context import WGMMA, LoweringContext, int_attr
from lowbit.passes.lowering.registry import lowers
from lowbit.passes.lowering.warpgroup import Products, RowSums


@lowers(ops.WarpgroupMmaOp, needs=WGMMA)
def warpgroup_mma(op: Any, c: LoweringContext) -> None:
    """A product extends the last one, runs beside it, or begins when that has been used."""
    total, b, reg = c.tiles[op.c], c.places[op.b], Reg.of(op.result.type)
    operands = [(c.tiles[op.a], int_attr(op, "start"))]
    if op.overlap:
        products = Products(c.threads, operands, b, None, reg, bank=c.pending.other_bank())
        if not _is_zero(op.c) or products.rows > 1:
            raise PassError("lower-tiles: products overlap that start from zero and have one row of fragments")
        c.pending.start_overlapping(products)
    elif last := c.pending.extended(total, b):
        products = Products(c.threads, [*last.operands, *operands], b, last.c, reg, written=last.written)
    else:
        c.pending.finish_product()
        products = Products(c.threads, operands, b, None if _is_zero(op.c) else total, reg)
    c.pending.add_product(products)
    c.tiles[op.result] = products


@lowers(ops.WarpgroupRowSumsOp, needs=WGMMA)
def warpgroup_row_sums(op: Any, c: LoweringContext) -> None:
    c.pending.before_row_sums()
    reg, columns = Reg.of(op.result.type), int_attr(op, "columns")
    sums = RowSums(c.threads, c.places[op.b], int_attr(op, "start"), columns, reg)
    c.pending.add_row_sums(sums)
    c.tiles[op.result] = sums


def _is_zero(value: Any) -> bool:
    """Whether a tile is the constant 0."""
    owner = value.owner
    return (
        not isinstance(owner, ir.Block)
        and owner.name == "lowbit.constant"
        and ir.FloatAttr(owner.attributes["value"]).value == 0.0
    )
