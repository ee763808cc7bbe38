"""Equal shares of the rounds of tiles that do not come out even (Stream-K: Osama et al., PPoPP 2023):
`PrefillSchedule.stream_k`.

Every block has whole tiles first, as in `tile_order`, as long as there are more than one for every block left. The
rounds of those last tiles are counted through, and every block has as many of them as any other, one after the other,
wherever its share begins and ends: the last rounds of a tile, perhaps a whole one, and the first rounds of another.
Where there are fewer tiles than blocks, several share one. Parts of a tile are added up in `workspace`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.passes.builder import Scalar
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.tile_order import Position, TileOrder, Turn


@dataclass(frozen=True)
class Part:
    """What a block has of a tile: the tile's number, and the rounds from `first` to before `end`."""

    tile: Scalar
    first: Scalar
    end: Scalar


class StreamOrder(TileOrder):
    """The tiles and parts of tiles of a block."""

    def __init__(self, plan: PersistentPlan, tokens: Scalar, block: Scalar, blocks: Scalar, rank: Scalar) -> None:
        super().__init__(plan, tokens, block, blocks, rank)
        self.rounds = plan.tiles.rounds
        full, left = self.tiles // blocks, self.tiles % blocks
        self.full = (left < 1).select(full, (full - 1).max(0))  # turns of whole tiles
        self.shared = (self.tiles - self.full * blocks) * self.rounds  # rounds in shares
        self.sharing = self._sharing()
        self._begin, self._end = self._begin_of(block), self._begin_of(block + 1)
        self.first_round = self.part(Scalar.of(0)).first

    @property
    def has_tile(self) -> Scalar:
        return Scalar.of(0) < self.count()

    def count(self) -> Scalar:
        """How many tiles and parts of tiles the block has."""
        tiles = (self._end + (self.rounds - 1)) // self.rounds - self._begin // self.rounds
        return self.full + (self._begin < self._end).select(tiles, 0)

    def first(self) -> Position:
        return self.whole_at(self.part(Scalar.of(0)).tile)

    def turn(self, number: Scalar, count: Scalar) -> Turn:
        part, next_ = self.part(number), self.part(number + 1)
        here, there = self.whole_at(part.tile), self.whole_at(next_.tile)
        whole = number < self.full
        lacking = whole.select(0, self._begin % self.rounds)  # rounds of the first part's tile, before it
        before = number * self.rounds - lacking
        return Turn(
            self.shapes.whole,
            number,
            here,
            there,
            number + 1 < count,
            part.first,
            part.end - part.first,
            next_.first,
            part.end - next_.first,
            before,
        )

    def part(self, number: Scalar) -> Part:
        """What the block has of its tile of this number."""
        whole, tile = number < self.full, self._tile_of(number)
        before = tile * self.rounds
        first = whole.select(0, (self._begin - before).max(0))
        end = whole.select(self.rounds, (self._end - before).min(self.rounds))
        return Part(whole.select(self.block + number * self.blocks, self.full * self.blocks + tile), first, end)

    def blocks_of(self, number: Scalar) -> tuple[Scalar, Scalar]:
        """The first and the last block that have a part of the block's tile of this number."""
        before, whole = self._tile_of(number) * self.rounds, number < self.full
        first, last = self._block_of(before), self._block_of(before + (self.rounds - 1))
        return whole.select(self.block, first), whole.select(self.block, last)

    def _sharing(self) -> Scalar:
        """How many blocks have a share, at least one."""
        sharing = self.blocks.min(self.shared).max(1)
        if self.schedule.stream_k == "all":
            return sharing
        return (self.tiles < sharing).select(sharing - sharing % self.tiles.max(1), sharing)

    def _tile_of(self, number: Scalar) -> Scalar:
        """The number of a tile of the block among those whose rounds are shared."""
        return self._begin // self.rounds + number - self.full

    def _begin_of(self, block: Scalar) -> Scalar:
        """The first of the rounds that a block has."""
        return (block * self.shared // self.sharing).min(self.shared)

    def _block_of(self, round_: Scalar) -> Scalar:
        """The block that has a round."""
        return ((round_ + 1) * self.sharing - 1) // self.shared.max(1)
