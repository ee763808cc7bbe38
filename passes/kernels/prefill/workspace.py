"""Blocks that split k and add up their sums through device memory: `PrefillSchedule.exchange`.

Clusters of two and four blocks do so through shared memory (`exchange`). Where two to a tile leave many multiprocessors
idle, and clusters of four do not all find room, any number can: each writes its sums to a workspace, and the last to
come, whichever it is, reads those of all, adds them up in the order of their parts of k and stores the tile. Nobody
waits for a block that may not have started.

There is room for the tiles of one wave. A launch with more of them does not split k: every block has all of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.prefill.exchange import COLUMN, THREADS, in_register_order
from lowbit.passes.kernels.prefill.plan import PrefillPlan
from lowbit.passes.kernels.prefill.schedule import ROWS_OF_TILE

_AT_ONCE = 112  # tokens whose sums are read together, at most: of three blocks, they take 168 registers of a thread


class Workspace:
    """The parts of k and their sums in program `p`: in a block of a launch of so many blocks for so many tokens.

    splits         whether blocks split k; `whole`: whether they do not
    block, blocks  the number of the block, or where they split k of those that share a tile, and how many there are
    first_round    the first round of the block's part of k, which has `rounds`
    """

    def __init__(self, p: Program, plan: PrefillPlan, tokens: Scalar, block: Scalar, blocks: Scalar) -> None:
        self.p, self.plan, split_k = p, plan, plan.schedule.split_k
        tiles = (tokens + (plan.schedule.tokens - 1)) // plan.schedule.tokens * plan.row_tiles
        at_once = (blocks // split_k).min(plan.places)
        self.splits, self.whole = tiles < at_once + 1, at_once < tiles
        self._tile, self._part = block // split_k, block % split_k
        self.block, self.blocks = self.splits.select(self._tile, block), self.splits.select(blocks // split_k, blocks)
        self.first_round = self.splits.select(self._part * plan.rounds, 0)
        self.rounds = self.splits.select(Scalar.of(plan.rounds), plan.rounds * split_k)
        self._columns = plan.schedule.tokens // COLUMN
        sizes = (plan.places, split_k, self._columns, THREADS, 4)
        self._sums = p.global_view(p["workspace"], "f32", sizes)
        words = plan.places * split_k * plan.schedule.tokens * ROWS_OF_TILE
        self._first_counter = words
        self._counters = p.global_view(p["workspace"], "i32", (words + plan.places,))

    def write(self, parts: Sequence[Tile]) -> Scalar:
        """Writes a block's sums, of one part of the tokens after the other. Returns whether it is the last to do so."""
        column = 0
        for part in parts:
            self.p.store(self._flat(part), self._sums, (self._tile, self._part, column, 0, 0))
            column += part.shape[1] // COLUMN
        return self.p.last_arrival(self._counters, self._tile + self._first_counter, self.plan.schedule.split_k)

    def read(self, parts: Sequence[Tile]) -> Iterator[Tile]:
        """Yields the sums over all of k for the tokens of these parts, some at a time."""
        column = 0
        for part in parts:
            tokens = part.shape[1]
            size = next(n for n in range(_AT_ONCE, 0, -COLUMN) if tokens % n == 0)
            for first in range(0, tokens, size):
                yield self._total(self.p.slice(part, 1, first, size), column + first // COLUMN)
            column += tokens // COLUMN

    def _total(self, own: Tile, column: int) -> Tile:
        """Sums over all of k, laid out like a block's own."""
        p, flat = self.p, self._flat(own).layout
        parts_of_k = range(self.plan.schedule.split_k)
        total = reduce(p.add, [p.load(self._sums, (self._tile, i, column, 0, 0), flat) for i in parts_of_k])
        return p.view(p.reshape(total, flat.shape[2:]), "f32", own.layout)

    def _flat(self, sums: Tile) -> Tile:
        """The registers of sums [rows, tokens] in their order: [1, 1, tokens / 8, threads, 4]."""
        flat = in_register_order(self.p, sums)
        return self.p.reshape(flat, (1, 1, *flat.shape))
