"""Products of one token in integers (`dialect.formats.integer_limbs`)."""

from __future__ import annotations

from lowbit.dialect import ops
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.types import Reg, format_attr
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Memory, i64


class IntegerProducts(Operations):
    """x as limbs, and products of codes with them."""

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
