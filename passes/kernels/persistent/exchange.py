"""The end of a tile or a slice whose k is split over the blocks of a cluster: they add up their sums.

Each block stores a share of the tile's tokens. It has its own share first among its tokens, then that of the next rank
(`BoxPanels._boxes_of_tokens`): so what a block keeps is in the same registers in all of them. It sends the other
shares' sums to the blocks that store them, and adds what it gets to its own. A thread gets the sums of the thread of
its number in the other blocks, so they travel in the order of registers, 16 bytes at a time, and a warp waits for those
that are its own, not for a block. What is added, and in which order, depends on nothing but the rank.

Signals say who may go on. `received`, one for each warp, counts the bytes of a tile; `read`, one for a block, that all
warps of the cluster have read what they got, after which the next tile's sums may come. A barrier of the cluster for
the same would wait for all loads under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import local
from lowbit.passes.builder import Program, Scalar, Tile
from lowbit.passes.kernels.persistent.schedule import WARPS
from lowbit.passes.kernels.persistent.tiles import TileShape

COLUMN = 8  # tokens, of which a thread has four sums: 16 bytes
THREADS = 32 * WARPS


def in_register_order(p: Program, sums: Tile) -> Tile:
    """Returns the registers of sums [rows, tokens] in their order: [tokens / 8, threads, 4]."""
    layout = local(sums.shape[1] // COLUMN, 1, 1).spatial(1, THREADS, 1).local(1, 1, 4)
    return p.view(sums, "f32", layout)


class Exchange:
    """Adds up the sums of the blocks of a cluster in program `p`. shape: what they split; rank: the number of this
    block in the cluster. Blocks have to know that the signals of the others are there."""

    def __init__(self, p: Program, shape: TileShape, rank: Scalar) -> None:
        self.p, self.rank, self.blocks, self.share = p, rank, shape.split_k, shape.share
        self._places = (self.blocks - 1) * self.share // COLUMN
        self._buffer = p.alloc_shared("f32", (self._places, THREADS, 4))
        self._received, self._read = p.signals(1, 1, groups=WARPS), p.signals(1, WARPS * self.blocks)

    def add_up(self, parts: Sequence[Tile], number: Scalar) -> list[Tile]:
        """Returns the sums over all blocks of this block's share of the tokens, cut like `parts`, its own sums of all
        tokens in order. number: how many tiles or slices were added up before."""
        p = self.p
        cut = [piece for part in parts for piece in self._cut(part)]
        own = len(cut) // self.blocks
        self._await_read(number)
        for i, piece in enumerate(cut[own:]):
            to, place = (self.rank + (i // own + 1)) % self.blocks, i * piece.shape[1] // COLUMN
            p.send(in_register_order(p, piece), self._buffer, to, self._received, 0, (place, 0, 0))
        p.expect(self._received, 0, self._places * COLUMN * ROWS * 4, each_warp=True)
        p.await_signal(self._received, 0, number % 2)
        total = [self._plus_received(piece, i * piece.shape[1]) for i, piece in enumerate(cut[:own])]
        p.barrier("warps", 1)
        p.arrive(self._read, 0, self.blocks)
        return total

    def leave(self, tiles: Scalar) -> None:
        """Nobody leaves before all have read what came last, which they say here. tiles: how many were added up."""
        self._await_read(tiles)

    def _await_read(self, number: Scalar) -> None:
        """Waits until all blocks have read what they got for the tile before this number; for none before the first."""
        self.p.await_signal(self._read, 0, (number + 1) % 2)

    def _cut(self, part: Tile) -> list[Tile]:
        """Cuts sums of tokens where a share ends."""
        size = min(part.shape[1], self.share)
        return [self.p.slice(part, 1, first, size) for first in range(0, part.shape[1], size)]

    def _plus_received(self, own: Tile, token: int) -> Tile:
        """Sums that begin with a token of the share, and what the other blocks have sent for them."""
        total = in_register_order(self.p, own)
        for turn in range(self.blocks - 1):
            place = ((turn * self.share + token) // COLUMN, 0, 0)
            total = self.p.add(total, self.p.load(self._buffer, place, total.layout))
        return self.p.view(total, "f32", own.layout)
