"""Tiles: where they come from, where they go, and other views of them."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Element, Reg
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Index, Memory, Scalar, as_i32, boundary_of, i64, indices


class Tiles(Operations):
    """Loads and stores of tiles, constants, and tiles of another shape."""

    def load(
        self, source: Memory, offsets: Sequence[Index], layout: Layout, boundary: Sequence[str] | None = None
    ) -> Tile:
        """Returns source[offsets + index] for each element of a tile with this layout.

        source: device or shared memory, with as many dims. boundary: for each dim what is read beyond its end: nothing
        is there ("none", the default), the last element ("clamp"), or zero ("zero").
        """
        words = boundary_of(boundary, layout)
        return Tile(ops.LoadOp(source.value, indices(offsets), words, Reg(source.type.element, layout).type).result)

    def gather(self, source: Memory, offsets: Sequence[Index], index: Tile) -> Tile:
        """Returns source[offsets, i] for each i of a tile of i32, which must be a place in the last dim.

        source: numbers or i32 in device or shared memory; offsets: one for each other dim.
        """
        result = Reg(source.type.element, index.layout).type
        return Tile(ops.GatherOp(source.value, index.value, indices(offsets), result).result)

    def scatter(
        self, value: Tile, target: Memory, offsets: Sequence[Index], index: Tile, combine: str = "replace"
    ) -> None:
        """Writes target[offsets, i] = value for each i of a tile of i32; those outside of the last dim are left out.

        target: numbers or i32 in device or shared memory; offsets: one for each other dim. combine: "replace", for
        which no two elements may have the same index, or "add", to i32 in shared memory.
        """
        op = ops.ScatterOp(value.value, target.value, index.value, indices(offsets))
        op.combine = combine

    def read_index(self, source: Memory, offsets: Sequence[Index]) -> Scalar:
        """Returns source[offsets], an i32 of device memory that the kernel does not write, as a scalar."""
        return Scalar(ops.ReadIndexOp(source.value, indices(offsets)).result)

    def load_matrix(self, source: Memory, rows: Index, layout: Layout) -> Tile:
        """Returns operand b of `mma` [.., n, k], of a buffer of 16-bit or 8-bit elements, by ldmatrix.

        rows: how many rows there are; those beyond are read as the last of these.
        """
        return Tile(ops.LoadMatrixOp(source.value, as_i32(rows), Reg(source.type.element, layout).type).result)

    def store(
        self, value: Tile, target: Memory, offsets: Sequence[Index], boundary: Sequence[str] | None = None
    ) -> None:
        """Writes target[offsets + index] = value, to device or shared memory.

        boundary: for each dim whether all of the tile is within its end ("none", the default), or elements beyond are
        left out ("skip"). Of several threads that hold an element, the first writes it.
        """
        words = boundary_of(boundary, value.layout)
        ops.StoreOp(value.value, target.value, indices(offsets), words)

    def constant(self, value: float, element: Element, layout: Layout, lower: float | None = None) -> Tile:
        """A tile of one value; of another in the lower half of every 16 rows, if given."""
        op = ops.ConstantOp(ir.FloatAttr.get(ir.F32Type.get(), value), Reg(element, layout).type)
        if lower is not None:
            op.lower = ir.FloatAttr.get(ir.F32Type.get(), lower)
        return Tile(op.result)

    def splat(self, value: Scalar, element: str, layout: Layout) -> Tile:
        """A tile of one value that is known when the kernel runs: an f32 parameter, rounded to `element`, or an i32."""
        return Tile(ops.SplatOp(value.value, Reg(element, layout).type).result)

    def iota(self, dim: int, layout: Layout) -> Tile:
        """The place of each element along a dim: 0, 1, 2 .. in i32."""
        return Tile(ops.IotaOp(i64(dim), Reg("i32", layout).type).result)

    def view(self, tile: Tile, element: Element, layout: Layout) -> Tile:
        """Returns the same registers as a tile of another type and layout: the bits of each thread stay where they are.

        It makes codes of units of packed words, and units of codes; otherwise the element is the same.
        """
        return Tile(ops.ViewOp(tile.value, Reg(element, layout).type).result)

    def slice(self, tile: Tile, dim: int, start: int, size: int) -> Tile:
        """Returns elements start .. start + size of a dim. Raises LayoutError where these are not slots of every
        thread."""
        layout, _ = tile.layout.restrict(dim, start, size)
        return Tile(ops.SliceOp(tile.value, i64(dim), i64(start), Reg(tile.reg.element, layout).type).result)

    def reshape(self, tile: Tile, shape: tuple[int, ...]) -> Tile:
        """Returns the elements in row-major order as a tile of another shape; nothing moves. Raises LayoutError where
        the layout can't be cut so."""
        reg = Reg(tile.reg.element, tile.layout.reshape(shape))
        return Tile(ops.ReshapeOp(tile.value, reg.type).result)

    def diagonal(self, tile: Tile, layout: Layout) -> Tile:
        """Rows of blocks of 16 columns [.., 8, k / 8] side by side [.., 8, k]: row i has blocks i, i + 8, .. and 0
        elsewhere."""
        return Tile(ops.DiagonalOp(tile.value, Reg(tile.reg.element, layout).type).result)

    def materialize(self, tile: Tile, by_all: bool = False) -> None:
        """Compute a tile here, not where it is first used. by_all: nor where a compiler would have it, which may put
        what a warp makes together to where only some of its lanes are."""
        ops.MaterializeOp(tile.value).by_all = by_all

    def reduce(self, tile: Tile, dim: int, combine: str = "sum") -> Tile:
        """The sum over a dim, or the largest element ("max")."""
        reg = Reg(tile.reg.element, tile.layout.reduce((dim,)))
        op = ops.ReduceOp(tile.value, i64(dim), reg.type)
        op.combine = combine
        return Tile(op.result)
