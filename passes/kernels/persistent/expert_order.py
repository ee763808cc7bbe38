"""Which tiles a block computes where a weight has several experts, and a token goes to some of them: `ExpertOrder`.

Tiles of rows of a token tile (`ExpertTiles`) follow one another, so that blocks read the same slots, and the weight of
one expert, at the same time. Short tiles, if the schedule has a shape for them, come behind all others.
"""

from __future__ import annotations

from lowbit.passes.builder import Index, Program, Scalar
from lowbit.passes.kernels.expert_tiles import ExpertTiles
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import WARPS
from lowbit.passes.kernels.persistent.tile_order import Position, Turn
from lowbit.passes.kernels.persistent.tiles import TileShape


class ExpertOrder:
    """The tiles of a block. Blocks take turns, as in `TileOrder`; every tile has all of k."""

    first_round: Index = 0

    def __init__(self, p: Program, plan: PersistentPlan, block: Scalar, blocks: Scalar) -> None:
        self.p, self.shapes, self.block, self.blocks = p, plan.tiles, block, blocks
        self._table = ExpertTiles(p)
        self.tiles = self._table.count * plan.tiles.row_tiles

    @property
    def has_tile(self) -> Scalar:
        """Whether the block has a tile."""
        return self.block < self.tiles

    def count(self) -> Scalar:
        """How many tiles the block has."""
        return self._of_block(self.tiles)

    def count_long(self) -> Scalar:
        """How many of them are not short."""
        return self._of_block(self.tiles - self._table.short() * self.shapes.row_tiles)

    def _of_block(self, tiles: Scalar) -> Scalar:
        """How many of so many tiles the block has."""
        return (tiles + self.blocks - 1 - self.block) // self.blocks

    def first(self) -> Position:
        """Where the first tile of the block is."""
        return self._position(self.block)

    def turn(self, number: Scalar, count: Scalar, shape: TileShape | None = None) -> Turn:
        """The turn of the tile of this number, of so many, counted in the block. shape: None: whole."""
        tile, rounds = self.block + number * self.blocks, self.shapes.rounds
        here, next_, has_next = self._position(tile), self._position(tile + self.blocks), number + 1 < count
        shape = shape or self.shapes.whole
        return Turn(shape, number, here, next_, has_next, 0, Scalar.of(rounds), 0, rounds, number * rounds)

    def _position(self, tile: Scalar) -> Position:
        """Where a tile is, and for one beyond the last where the last is; without tiles, a place that may be read."""
        shapes = self.shapes
        tile = tile.min(self.tiles - 1).max(0)
        token_tile, row = tile // shapes.row_tiles, tile % shapes.row_tiles * (WARPS // shapes.unit)
        expert, first, end = self._table.tile(token_tile)
        return Position(expert * (shapes.row_blocks // shapes.unit) + row, first, row, end)
