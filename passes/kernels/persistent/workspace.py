"""Blocks that have parts of a tile's rounds and add up their sums through device memory: `PrefillSchedule.stream_k`.

Each writes its sums to a workspace, and the last to come, whichever it is, reads those of all, adds them up in the
order of their rounds and stores the tile. Nobody waits for a block that may not have started. The block that begins a
tile does so at the end of its share, and most others at the beginning of theirs: if all of them have been there, it
adds their sums to its own, which it need not write.

A block has two parts of tiles that it shares with others, at most: the one that its share begins with, whose tile
another block has begun, and the one that it ends with, whose tile it begins. Each has a place of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lowbit.dialect.layouts.layout import Layout
from lowbit.passes.builder import Index, Program, Scalar, Tile
from lowbit.passes.kernels.persistent.exchange import COLUMN, THREADS, in_register_order
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.stream_order import StreamOrder
from lowbit.passes.kernels.persistent.tiles import MOST_BLOCKS
from lowbit.passes.launch import COUNTERS

_FIRST_COLUMN = COUNTERS // (4 * THREADS)
_AT_ONCE = 64  # tokens whose sums are read together, at most: of three blocks, they take 96 registers of a thread


class Workspace:
    """The sums of parts of tiles in program `p`, in a block whose tiles are those of an order."""

    def __init__(self, p: Program, plan: PersistentPlan, order: StreamOrder) -> None:
        self.p, self.schedule, self.order = p, plan.schedule, order
        self._columns = plan.schedule.tokens // COLUMN
        places = _FIRST_COLUMN + MOST_BLOCKS * 2 * self._columns
        self._sums = p.global_view(p["workspace"], "f32", (places, THREADS, 4))
        self._counters = p.global_view(p["workspace"], "i32", (COUNTERS,))

    def begin(self, number: Scalar) -> Scalar:
        """Tells whether the block can add up the tile of this number, counted in the block, from its own sums: if it
        begins the tile, and all others that have a part, if any, have written theirs."""
        self._first, self._last = self.order.blocks_of(number)
        self._counter, begins = self._place(self._first), self.order.block < self._first + 1
        self._which = begins.select(1, 0)
        return self.p.others_arrived(self._counters, self._counter, begins.select(self._last - self._first, -1))

    def write(self, parts: Sequence[Tile]) -> Scalar:
        """Writes a block's sums, of one part of the tokens after the other. Returns whether it is the last to do so."""
        column = 0
        for part in parts:
            place = self._column(self.order.block, self._which, column)
            self.p.store(in_register_order(self.p, part), self._sums, place)
            column += part.shape[1] // COLUMN
        return self.p.last_arrival(self._counters, self._counter, self._last - self._first + 1)

    def read(self, parts: Sequence[Tile], own: bool) -> Iterator[Tile]:
        """Yields the sums over all of k for the tokens of these parts, some at a time. own: whether these are the sums
        that a tile begins with, or else what was written is."""
        column, total = 0, self._plus_others if own else self._total
        for part in parts:
            tokens = part.shape[1]
            size = COLUMN * math.ceil(tokens / COLUMN / math.ceil(tokens / _AT_ONCE))  # as equal as may be
            for first in range(0, tokens, size):
                some = self.p.slice(part, 1, first, min(size, tokens - first))
                flat = total(in_register_order(self.p, some), column + first // COLUMN)
                yield self.p.view(flat, "f32", some.layout)
            column += part.shape[1] // COLUMN

    def _plus_others(self, own: Tile, column: int) -> Tile:
        """A block's own sums and those of the blocks behind it, of which there may be none."""
        with self.p.loop(self._first + 1, self._last - self._first, [own]) as loop:
            loop.results = [self.p.add(loop.carried[0], self._load(loop.index, 0, column, own.layout))]
        return loop.carried[0]

    def _total(self, own: Tile, column: int) -> Tile:
        """The sums of all blocks that have a part, two at least. While one's are added, the next one's are coming."""
        p, flat = self.p, own.layout
        carried = [self._load(self._first, 1, column, flat), self._load(self._first + 1, 0, column, flat)]
        with p.loop(self._first + 2, self._last - self._first - 1, carried) as loop:
            total, coming = loop.carried
            following = self._load(loop.index, 0, column, flat)
            loop.results = [p.add(total, coming), following]
        return p.add(*loop.carried)

    def _load(self, block: Scalar, which: int, column: int, layout: Layout) -> Tile:
        """Sums of a block, for some tokens from this column on."""
        return self.p.load(self._sums, self._column(block, which, column), layout)

    def _place(self, block: Scalar) -> Scalar:
        """The number of a block, or in a cluster of the one that has the rows of this block."""
        return block * self.schedule.cluster + self.order.rank

    def _column(self, block: Scalar, which: Index, column: int) -> tuple[Scalar, int, int]:
        """Where the sums of some tokens are, of one of a block's two parts."""
        return ((self._place(block) * 2 + which) * self._columns + (column + _FIRST_COLUMN), 0, 0)
