"""Accumulators: registers in which products of wgmma that are not waited for add up."""

from __future__ import annotations

from lowbit.dialect import ops
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Reg
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Memory, i64


class Accumulators(Operations):
    """Products that are begun in one place and waited for in another."""

    def accumulator(self, layout: Layout, element: str = "f32") -> Tile:
        """Registers for sums of `accumulate`, which stay in place."""
        return Tile(ops.AccumulatorOp(Reg(element, layout).type).result)

    def clear(self, sums: Tile) -> None:
        """Sets sums to zero. No product may be under way."""
        ops.ClearAccumulatorOp(sums.value)

    def accumulate(
        self,
        a: Tile,
        b: Memory,
        start: int,
        sums: Tile,
        row: int | None = None,
        more: bool = False,
        held: bool = False,
        fresh: bool = False,
        block: int | None = None,
        pending: int | None = None,
    ) -> None:
        """Begins sums += a b^T, with columns start .. of b in shared memory. row: the first of b's that is used, of
        all if None; more: the next is of the same product; held: and begun with it; fresh: sums = a b^T;
        block: of 16 rows of every warp, the one that is multiplied, all if None; pending: of the last
        products, as many may still be under way afterwards."""
        op = ops.AccumulateOp(a.value, b.value, sums.value, i64(start))
        op.row = None if row is None else i64(row)
        op.block = None if block is None else i64(block)
        op.pending = None if pending is None else i64(pending)
        op.more, op.held, op.fresh = more, held, fresh

    def await_products(self, pending: int) -> None:
        """Waits until at most the last `pending` products are under way, 0 to 7."""
        ops.AwaitProductsOp(i64(pending))

    def add_scaled(
        self, product: Tile, scale: Tile | None, sums: Tile, pending: int = 0, outer: tuple[Tile, Tile] | None = None
    ) -> None:
        """sums += scale * product, once all products but the last `pending` have ended. outer: a column [rows, 1] and a
        row [1, tokens] in f32, whose outer product is added to the product before it is scaled."""
        scales = [] if scale is None else [scale.value]
        column, row = ([tile.value] for tile in outer) if outer else ([], [])
        ops.AddScaledOp(product.value, scales, sums.value, column, row, i64(pending))

    def add_outer(self, column: Tile, row: Tile, sums: Tile) -> None:
        """sums += column * row: [rows, 1] and [1, tokens] in f32, of sums that no product is under way to."""
        ops.AddOuterOp(column.value, row.value, sums.value)

    def read(self, sums: Tile) -> Tile:
        """The sums, once all products have ended."""
        return Tile(ops.ReadAccumulatorOp(sums.value, sums.value.type).result)
