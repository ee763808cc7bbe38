"""Outliers: a sparse matrix that is added to products and to weights (`dialect.ops.outliers`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.types import Reg
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Index, Memory, Scalar, as_i32, i64, text


@dataclass(frozen=True)
class OutlierShare:
    """The outliers that a block multiplies: part `part` of `splits` of the lines of row blocks `first_block` and on.

    table: the view of all outliers.
    """

    table: Memory
    first_block: Scalar
    part: Scalar
    splits: int

    @property
    def place(self) -> tuple[Any, Any]:
        return self.first_block.value, self.part.value


class Outliers(Operations):
    """Outliers added to products, to numbers in shared memory, and to weights in registers."""

    def copy_outliers(self, share: OutlierShare, lines: Memory, layout: Layout) -> None:
        """Starts to copy the share's first lines, cut once more among warps, to a buffer."""
        ops.CopyOutliersOp(share.table.value, lines.value, *share.place, text(str(layout)), i64(share.splits))

    def sparse_mma(self, share: OutlierShare, lines: Memory, scratch: Memory, x: Memory, total: Tile) -> Tile:
        """total + S x^T for the share's outliers, whose first lines are copied to `lines`, [warps, row blocks, lines,
        32]; warps need `scratch` meanwhile."""
        return self._sparse_products(ops.SparseMmaOp, share, lines.value, scratch, x, total)

    def index_outliers(self, share: OutlierShare, layout: Layout) -> Tile:
        """Where the outliers of each warp's row blocks are: [warps, row blocks, numbers, 32]."""
        reg = Reg("i32", layout)
        return Tile(ops.IndexOutliersOp(share.table.value, share.first_block.value, reg.type).result)

    def copy_lines(self, outliers: Memory, index: Tile, lines: Memory, column: Scalar, columns: int) -> None:
        """Starts to copy the first lines of every warp's step, `columns` wide, of steps that begin at `column`."""
        ops.CopyLinesOp(outliers.value, index.value, lines.value, column.value, i64(columns))

    def transpose(self, source: Memory, target: Memory, rows: Index) -> None:
        """Writes the activations of a step, of so many tokens, with tokens side by side; barriers come before and
        after."""
        ops.TransposeOp(source.value, target.value, as_i32(rows))

    def sparse_step(
        self, outliers: Memory, index: Tile, lines: Memory, x: Memory, column: Scalar, total: Tile
    ) -> Tile:
        """total + S x^T for the outliers of every warp's step, the first lines of which are in a buffer."""
        memory = outliers.value, index.value, lines.value, x.value
        return Tile(ops.SparseStepOp(*memory, column.value, total.value, total.reg.type).result)

    def load_outliers(self, share: OutlierShare, layout: Layout) -> Tile:
        """The words of the share's first lines, cut once more among warps, a word for each lane."""
        reg = Reg("i32", layout)
        return Tile(ops.LoadOutliersOp(share.table.value, *share.place, i64(share.splits), reg.type).result)

    def sparse_vector(self, share: OutlierShare, words: Tile, scratch: Memory, x: Memory, total: Tile) -> Tile:
        """The same for one token, spread over eight columns; the first lines are loaded to `words`."""
        return self._sparse_products(ops.SparseVectorOp, share, words.value, scratch, x, total)

    def _sparse_products(
        self, operation: Any, share: OutlierShare, lines: Any, scratch: Memory, x: Memory, total: Tile
    ) -> Tile:
        memory = share.table.value, lines, scratch.value, x.value
        return Tile(operation(*memory, *share.place, total.value, i64(share.splits), total.reg.type).result)

    def add_outliers(
        self, outliers: Memory, buffer: Memory, block: Index, first_column: Index, group: int, padded: int
    ) -> None:
        """Adds the outliers of a row block that lie in a buffer of f32; `group` columns take `padded` in memory."""
        place = as_i32(block), as_i32(first_column)
        ops.AddOutliersOp(outliers.value, buffer.value, *place, i64(group), i64(padded))

    def first_outliers(self, outliers: Memory, block: Index, warps: int) -> Tile:
        """Where the outliers of row blocks `block` and on begin, one for each warp; goes to `scatter_outliers`."""
        reg = Reg("i32", spatial(warps, 32, 1) * local(1, 1, ops.CURSOR))
        return Tile(ops.FirstOutliersOp(outliers.value, as_i32(block), reg.type).result)

    def scatter_outliers(self, outliers: Memory, buffer: Memory, first_column: Index, cursor: Tile) -> Tile:
        """Writes the outliers from `cursor` on that lie in a buffer of fragments; returns where they go on."""
        memory = outliers.value, buffer.value
        return Tile(ops.ScatterOutliersOp(*memory, as_i32(first_column), cursor.value, cursor.reg.type).result)

    def erase_outliers(self, buffer: Memory, cursor: Tile) -> None:
        """Writes 0 where the `scatter_outliers` with this result has written."""
        ops.EraseOutliersOp(buffer.value, cursor.value)
