"""Which tiles a block computes, and where they are.

Blocks take turns: of B blocks, block b has the tiles b, b + B, b + 2 B and so on. GROUP_TILES token tiles, side by
side, go through all rows before the next ones do: so the L2 cache serves what blocks read at the same time.

A last wave with few tiles would take as long as a full one. With `PrefillSchedule.last_tokens` its tiles are cut along
tokens into slices, of which every block has one at most, after its whole tiles. If there would be more slices than
blocks, or if the last wave is the only one, no tile is cut. With `last_split_k`, the blocks of a cluster have not a
slice of their own rows each, but the same slice of the rows of one of them, and a part of k each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lowbit.passes.builder import Index, Scalar
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import GROUP_TILES
from lowbit.passes.kernels.persistent.tiles import TileShape


@dataclass(frozen=True)
class Position:
    """Where a tile or a slice is.

    row_tile  its first row in the weight, in units of `Tiles.unit` row blocks: the number of its tile of rows, where
              every row of the weight is one of y
    token     its first token
    of_y      the same as row_tile for its rows in y, where several experts have the same; None: they are equal
    end       the token before which it ends; None: where y ends
    """

    row_tile: Scalar
    token: Scalar
    of_y: Scalar | None = None
    end: Scalar | None = None

    @property
    def y_tile(self) -> Scalar:
        """Its first row in y, in the units of `row_tile`."""
        return self.row_tile if self.of_y is None else self.of_y


@dataclass(frozen=True)
class Turn:
    """A whole tile or a slice.

    number         of a whole tile, counted in the block; 0 for a slice
    here           where it is
    next           where the tile or slice is that comes after it; where `has_next` is false, one that is there
    has_next       whether a whole tile comes after it
    first_round    the first round of this block's part of k
    rounds         how many that part has
    next_round     the same of what comes after it
    to_next        how much less the number of a round is, counted in what comes after it
    rounds_before  how many rounds the block has behind it, less `first_round`
    """

    shape: TileShape
    number: Scalar
    here: Position
    next: Position
    has_next: Scalar
    first_round: Index
    rounds: Index
    next_round: Index
    to_next: Index
    rounds_before: Scalar

    def coming(self, index: Scalar) -> tuple[Scalar, Scalar]:
        """Returns the round after this one, or the next tile's first: its tile of rows, and its number."""
        inside = index + 1 < self.first_round + self.rounds
        row_tile = inside.select(self.here.row_tile, self.next.row_tile)
        return row_tile, inside.select(index + 1, self.next_round)

    def end_of(self, inside: Scalar) -> Scalar | None:
        """Returns where the tokens of this tile end, if a condition holds, or else of the next; None: where y ends."""
        here, there = self.here.end, self.next.end
        return None if here is None or there is None else inside.select(here, there)

    def first_stored(self, rank: Scalar) -> Scalar:
        """Returns the first token of the tile that a block of this rank in its cluster stores."""
        return self.here.token + rank * self.shape.share if self.shape.split_k > 1 else self.here.token


class Order(Protocol):
    """The tiles of a block, one after the other.

    first_round  the first round that the block computes of its first tile
    """

    first_round: Index

    @property
    def has_tile(self) -> Scalar:
        """Whether the block has a tile."""
        ...

    def count(self) -> Scalar:
        """How many whole tiles, or parts of tiles, the block has."""
        ...

    def first(self) -> Position:
        """Where the first tile of the block is."""
        ...

    def turn(self, number: Scalar, count: Scalar) -> Turn:
        """The turn of the whole tile of this number, of so many, counted in the block."""
        ...


def first_round(shape: TileShape, rank: Scalar) -> Index:
    """Returns the first round of a block's part of a tile or slice. rank: of the block in its cluster."""
    return rank * shape.rounds if shape.split_k > 1 else 0


class TileOrder:
    """The tiles of a block, in a launch for so many tokens.

    block        the number of the block, or of its cluster
    blocks       how many blocks there are, or clusters
    rank         the number of the block in its cluster
    first_round  the first round that the block computes
    """

    first_round: Index

    def __init__(self, plan: PersistentPlan, tokens: Scalar, block: Scalar, blocks: Scalar, rank: Scalar) -> None:
        self.shapes, self.schedule, self.block, self.blocks, self.rank = plan.tiles, plan.schedule, block, blocks, rank
        self._own_row = rank if plan.schedule.split_k == 1 else Scalar.of(0)
        self.token_tiles = (tokens + (plan.schedule.tokens - 1)) // plan.schedule.tokens
        self.tiles = self.whole = self.token_tiles * plan.tiles.row_tiles
        self.first_round = first_round(plan.tiles.whole, rank)
        if self.schedule.last_tokens:
            self._cut()

    def _cut(self) -> None:
        """Notes how many tiles are whole, of which tile this block has a slice, if it has one, of which rows of a pair,
        and from which token of the tile on. `Tiles.waves` has the same arithmetic."""
        s, left, slices = self.schedule, self.tiles % self.blocks, self.shapes.slices
        not_cut = (self.blocks < left * slices) | (self.tiles < self.blocks)
        self.whole = not_cut.select(self.tiles, self.tiles - left)
        self.cut_tile = self.whole + self.block // slices
        of_rows = s.tokens // s.last_tokens
        self.slice_token = self.block % of_rows * s.last_tokens
        self.slice_row = self.block % slices // of_rows if s.last_split_k > 1 else self._own_row

    @property
    def has_tile(self) -> Scalar:
        """Whether the block has a tile. It is a whole one: only blocks that have one may have a slice."""
        return self.block < self.tiles

    @property
    def has_slice(self) -> Scalar:
        """Whether the block has a slice."""
        return self.cut_tile < self.tiles

    def slice_unless(self, whole: Scalar) -> Scalar:
        """Whether the block has a slice, and a condition is false: that a whole tile comes before."""
        return whole.select(self.tiles, self.cut_tile) < self.tiles

    def count(self) -> Scalar:
        """How many whole tiles the block has."""
        return (self.whole + self.blocks - 1 - self.block) // self.blocks

    def first(self) -> Position:
        """Where the first tile of the block is."""
        return self.whole_at(self.block)

    def turn(self, number: Scalar, count: Scalar) -> Turn:
        """The turn of the whole tile of this number, of so many, counted in the block."""
        tile = self.block + number * self.blocks
        here, next_ = self.whole_at(tile), self._after(tile)
        has_next = number + 1 < count
        first, rounds, next_round = self.first_round, self.shapes.rounds, self._first_round_of_next(has_next)
        before = number * rounds - first
        return Turn(self.shapes.whole, number, here, next_, has_next, first, rounds, next_round, rounds, before)

    def turn_of_slice(self, slice_: TileShape, count: Scalar) -> Turn:
        """The turn of the block's slice, after so many whole tiles. Nothing comes after it."""
        none, tile = Scalar.of(0), self._position(self.cut_tile, self.slice_row)
        here, has_next = Position(tile.row_tile, tile.token + self.slice_token), none < 0
        first, rounds = first_round(slice_, self.rank), slice_.rounds
        before = count * self.shapes.rounds - first
        return Turn(slice_, none, here, tile, has_next, first, rounds, first, rounds, before)

    def whole_at(self, tile: Scalar) -> Position:
        """Where a whole tile of this block is."""
        return self._position(tile, self._own_row)

    def _first_round_of_next(self, has_next: Scalar) -> Index:
        """The first round of the next whole tile, if there is one, or else of this block's slice."""
        slice_ = self.shapes.slice
        if slice_ and slice_.split_k > 1:
            return has_next.select(self.first_round, first_round(slice_, self.rank))
        return self.first_round

    def _after(self, tile: Scalar) -> Position:
        """Where the tile is that the block computes after this one, which may be the one that it has a slice of."""
        tile = tile + self.blocks
        if not self.schedule.last_tokens:
            return self.whole_at(tile)
        is_whole, row = tile < self.whole, self._own_row
        if self.schedule.last_split_k > 1:
            row = is_whole.select(row, self.slice_row)
        return self._position(is_whole.select(tile, self.cut_tile), row)

    def _position(self, tile: Scalar, row: Scalar) -> Position:
        """Where a tile is, and for one beyond the last where the last is; row: the tile of rows of those of a cluster
        that is meant."""
        s, per_group = self.schedule, GROUP_TILES * self.shapes.row_tiles
        tile = tile.min(self.tiles - 1)
        group, within = tile // per_group, tile % per_group
        side_by_side = (self.token_tiles - group * GROUP_TILES).min(GROUP_TILES)
        token_tile = group * GROUP_TILES + within % side_by_side
        return Position(within // side_by_side * s.cluster + row, token_tile * s.tokens)
