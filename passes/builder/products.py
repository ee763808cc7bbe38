"""Products of the tensor cores whose sums are tiles, and sums of rows that go with them.

Those of one token in integers multiply x as limbs (`dialect.formats.integer_limbs`).
"""

from __future__ import annotations

from lowbit.dialect import ops
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.types import Reg, format_attr
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Memory, i64


class Products(Operations):
    """mma and wgmma, sums of the rows of their operands, and products of limbs."""

    def mma(self, a: Tile, b: Tile, c: Tile) -> Tile:
        """Returns c + a b^T by mma.sync: a [.., m, k], b [.., n, k] and c [.., m, n], each laid out as its fragment.

        a and b are both f16, bf16 or f8E4M3FN; or a is f32 and b f16 or bf16, which multiplies as tf32; or a is i8 or
        ui8 and b i8. c is f32, of integers i32.
        """
        return Tile(ops.MmaOp(a.value, b.value, c.value, c.reg.type).result)

    def row_sums(self, tile: Tile, layout: Layout) -> Tile:
        """Returns the sums of b [.., n, k] over k as [.., 1, n] in f32, laid out as a row of an accumulator: a product
        of ones and b."""
        return Tile(ops.RowSumsOp(tile.value, Reg("f32", layout).type).result)

    def offset_sums(self, tile: Tile, format: DType, start: int, layout: Layout, by_block: bool = False) -> Tile:
        """Returns what an accumulator starts from when its weights were decoded with a deferred offset. by_block: the
        rows of the tile are blocks of columns, as those of the source of `diagonal`."""
        op = ops.OffsetSumsOp(tile.value, format_attr(format), i64(start), Reg("f32", layout).type)
        op.by_block = by_block
        return Tile(op.result)

    def warpgroup_mma(self, a: Tile, b: Memory, start: int, c: Tile, overlap: bool = False) -> Tile:
        """c + a b^T, with columns start .. of b [.., k / 64, n, 64] in shared memory. overlap: the product before may
        still be under way when this one is begun; c is zero, and there is one row of fragments."""
        op = ops.WarpgroupMmaOp(a.value, b.value, c.value, i64(start), c.reg.type)
        op.overlap = overlap
        return Tile(op.result)

    def warpgroup_row_sums(self, b: Memory, start: int, columns: int, layout: Layout) -> Tile:
        """Returns the same sums of columns start .. start + columns of b, which `warpgroup_mma` reads from shared
        memory."""
        return Tile(ops.WarpgroupRowSumsOp(b.value, i64(start), i64(columns), Reg("f32", layout).type).result)

    def split_limbs(self, x: Memory, limbs: Memory, format: DType) -> Tile:
        """Write x [warps, 1, k] as limbs; the units of its pieces."""
        warps, pieces = limbs.type.shape[:2]
        reg = Reg("f32", spatial(warps, 1, 1).local(1, 1, pieces).replicated(32))
        return Tile(ops.SplitLimbsOp(x.value, limbs.value, format_attr(format), reg.type).result)

    def limb_mma(self, a: Tile, limbs: Memory, unit: Tile, start: int, columns: int, layout: Layout) -> Tile:
        """Columns start .. of codes times those of x; see `join_limbs`."""
        place = i64(start), i64(columns)
        return Tile(ops.LimbMmaOp(a.value, limbs.value, unit.value, *place, Reg("f32", layout).type).result)

    def limb_sums(self, limbs: Memory, unit: Tile, format: DType, start: int, columns: int, layout: Layout) -> Tile:
        """Returns the sums of x over columns start .. start + columns, [warps, 1, 2] in f32: what `limb_mma` gives for
        a row of ones."""
        about = format_attr(format), i64(start), i64(columns)
        return Tile(ops.LimbSumsOp(limbs.value, unit.value, *about, Reg("f32", layout).type).result)

    def join_limbs(self, tile: Tile) -> Tile:
        """The number that the two columns of a sum of `limb_mma` stand for."""
        reg = Reg("f32", tile.layout.reduce((tile.layout.rank - 1,)))
        return Tile(ops.JoinLimbsOp(tile.value, reg.type).result)
