"""The kernel that sorts the slots of tokens by expert, and cuts them into token tiles: it makes a `Routing`
(`pylib.experts.routing`).

A *place* is one of the k experts of a token. Its slot follows from all places, without sorting:

    slot[i] = #{j: expert[j] < expert[i]} + #{j < i: expert[j] == expert[i]}

Every block counts the places of each expert for itself, those before its own apart from the others, so that no block
waits for another, and one launch is enough. Then it takes its own places, 64 at a time. Eight threads for each add up
the counts of lesser experts, and look for the same expert among the places before it.

Counts are the only atomics, in shared memory. Integers do not depend on the order in which they are added up, so the
result depends on no order of threads or blocks.

    for each round of places:        counts[before mine or not, expert] += 1
    for each expert:                 all = both counts; tiles = all / T, rounded up, short ones apart
    for each piece of my places:     begin, row = sums of all, tiles over lesser experts; short tiles are the last
                                     position   = counts[before, expert] + those before it in the piece
                                     slots, rows, and the table's row of a tile that begins here
                                     counts[before, expert] += 1

Shared memory: counts [2, experts + 1], all and tiles [experts + 1].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import Layout, local

if TYPE_CHECKING:
    from lowbit.passes.builder import Memory, Program, Scalar, Tile

_THREADS = 512
_PIECE = 64  # places of a block that are taken at once
_LANES = _THREADS // _PIECE  # threads of a place
_ROUND = 8 * _THREADS  # places that are counted at once
_VECTOR = 4  # numbers of 32 bits that a thread reads at once
_COLUMNS = 3  # of the table of tiles
_SHORT = 1 << 20  # what a short tile counts beside the others, of which there are fewer


def route_program(top_k: int, experts: int, words: int) -> Program:
    """Returns the program for tokens of `top_k` of so many experts.

    words   32-bit words of an id in memory, 1 or 2

    Parameters: ids [m, top_k]; rows, numbers, tiles and slots of a `Routing`; the number of tokens, m; `tile`, the most
    slots of a token tile; and `short`, the most of a short one.
    """
    from lowbit.passes.builder import Program

    names: dict[str, str] = dict.fromkeys(("ids", "rows", "numbers", "slots", "tiles"), "pointer")
    names |= {"m": "i32", "tile": "i32", "short": "i32"}
    p = Program("route", _THREADS, ("sm_count * 1", 1, 1), names)
    with p:
        p.grid_launch_dependents()
        places, at_once = p["m"] * top_k, p.block_count(0) * _PIECE
        share = (places + at_once - 1) // at_once * _PIECE
        first = p.block_id(0) * share
        with p.when(first < places):
            p.grid_wait()
            _Block(p, top_k, experts, words, places, first).route(share)
    return p


class _Block:
    """What one block does for the places from `first` on."""

    def __init__(self, p: Program, top_k: int, experts: int, words: int, places: Scalar, first: Scalar) -> None:
        self.p, self.top_k, self.experts, self.words, self.places, self.first = p, top_k, experts, words, places, first
        width = _LANES * _VECTOR
        self.width = -(-(experts + 1) // width) * width  # those elsewhere have a count of their own, the last
        self.of_experts = local(1, -(-experts // width)).spatial(_PIECE, _LANES).local(1, _VECTOR)
        self.of_piece = local(1, _PIECE // width).spatial(_PIECE, _LANES).local(1, _VECTOR)
        self.mine = self.of_piece.reduce((1,))
        self.counts = p.alloc_shared("i32", (1, 2 * self.width))
        self.all, self.tiles = (p.alloc_shared("i32", (1, self.width)) for _ in range(2))
        self.table = p.global_view(p["tiles"], "i32", (_COLUMNS, -1), (1, _COLUMNS), sizes=[places + 1])

    def route(self, share: Scalar) -> None:
        p = self.p
        self._count()
        self._add_up()
        every = p.iota(1, self.of_experts.reduce((0,))) < self.experts
        long, short = _long_and_short(self._sum_over_experts(self.tiles, every))
        with p.when(p.block_id(0) == 0):
            for column, number in enumerate((long + short, self._sum_over_experts(self.all, every), short)):
                p.store(number, self.table, (column, 0))
        mine = share.min(self.places - self.first)
        with p.loop(0, (mine + _PIECE - 1) // _PIECE) as loop:
            self._place(self.first + loop.index * _PIECE, long, long + short)

    # -- counts

    def _count(self) -> None:
        """Counts the places of each expert: those before the block's own, and behind them the others."""
        p = self.p
        zeros = p.constant(0, "i32", _over(2 * self.width))
        p.store(zeros, self.counts, (0, 0), ("none", "skip"))
        p.barrier()
        layout = local(_ROUND // _THREADS, 1).spatial(_THREADS, 1)
        with p.loop(0, (self.places + _ROUND - 1) // _ROUND) as loop:
            start = loop.index * _ROUND
            place, expert = self._numbers(start, layout), self._experts(start, layout)
            half = p.select(place < p.splat(self.first, "i32", layout), 0, p.constant(self.width, "i32", layout))
            self._count_up(place, expert + half)
        p.barrier()

    def _count_up(self, place: Tile, index: Tile) -> None:
        """Adds one to the counts at the indices of places that there are."""
        ones = self.p.constant(1, "i32", place.layout)
        self.p.scatter(ones, self.counts, (0,), self._of_places(place, index), "add")

    def _add_up(self) -> None:
        """Writes how many places each expert has, and how many tiles: those with few slots count `_SHORT`."""
        p, layout = self.p, _over(self.width)
        before, others = (p.load(self.counts, (0, at), layout, ("none", "zero")) for at in (0, self.width))
        number, tile, short = before + others, p.splat(p["tile"], "i32", layout), p.splat(p["short"], "i32", layout)
        p.store(number, self.all, (0, 0), ("none", "skip"))
        rest = number - number // tile * tile
        last = p.select(short < rest, p.constant(1, "i32", layout), p.min(rest, 1) * _SHORT)
        p.store(number // tile + last, self.tiles, (0, 0), ("none", "skip"))
        p.barrier()

    def _sum_over_experts(self, numbers: Memory, taken: Tile) -> Tile:
        """Returns the sum of the numbers of experts for which a condition holds."""
        p = self.p
        each = p.load(numbers, (0, 0), self.of_experts.reduce((0,)))
        return p.reduce(p.select(taken, each, 0), 1)

    # -- places

    def _numbers(self, start: Scalar, layout: Layout) -> Tile:
        """Returns the numbers of the places from `start` on, along dim 0."""
        return self.p.iota(0, layout) + self.p.splat(start, "i32", layout)

    def _experts(self, start: Scalar, layout: Layout) -> Tile:
        """Returns the experts of the places from `start` on, along the dim of several; elsewhere counts as the last.

        Beyond the last place is the last again: no load waits for a branch.
        """
        p, experts, words = self.p, self.experts, self.words
        if layout.shape[1] == 1:
            dim, shape, strides, offsets, boundary = 1, (-1, words), (words, 1), (start, 0), ("clamp", "none")
        else:
            dim, shape, strides, offsets, boundary = 0, (words, -1), (1, words), (0, start), ("none", "clamp")
        ids = p.global_view(p["ids"], "i32", shape, strides, sizes=[self.places])
        both = p.load(ids, offsets, layout * local(*(words if d == dim else 1 for d in range(2))), boundary)
        low, *high = (p.slice(both, dim, word, 1) for word in range(words))
        expert = p.select(low < 0, experts, p.min(low, experts))
        return p.select(high[0] == 0, expert, experts) if high else expert

    def _place(self, start: Scalar, long: Tile, total: Tile) -> None:
        """Writes what a piece of the block's places is in the routing.

        long   token tiles that are not short, of so many in all
        """
        p = self.p
        place, expert = self._numbers(start, self.mine), self._experts(start, self.mine)
        position = p.gather(self.counts, (0,), expert) + self._before_in_piece(start, expert)
        lesser = p.iota(1, self.of_experts) < expert
        begin, row = (self._sum_over_experts(numbers, lesser) for numbers in (self.all, self.tiles))
        self._write_slots(start, place, begin + position)
        self._write_tiles(place, expert, begin, position, row, long)
        empty = p.select(place < total, -1, place + 1)  # a row of the table that no tile has
        for column in range(_COLUMNS):
            p.scatter(p.constant(0, "i32", self.mine), self.table, (column,), empty)
        p.barrier()
        self._count_up(place, expert)
        p.barrier()

    def _before_in_piece(self, start: Scalar, expert: Tile) -> Tile:
        """Returns how many places of the piece are before each and have the same expert."""
        p = self.p
        others = p.constant(0, "i32", self.of_piece) + self._experts(start, self.of_piece.reduce((0,)))
        before = p.iota(1, self.of_piece) < p.iota(0, self.mine)
        return p.reduce(p.select(others == expert, p.select(before, p.constant(1, "i32", self.of_piece), 0), 0), 1)

    def _write_slots(self, start: Scalar, place: Tile, slot: Tile) -> None:
        """Writes the slots of places, and the rows of slots."""
        p, places = self.p, self.places
        for name, number in (("slots", slot), ("numbers", place)):
            view = p.global_view(p[name], "i32", (-1, 1), sizes=[places])
            p.store(number, view, (start, 0), ("skip", "none"))
        rows = p.global_view(p["rows"], "i32", (-1,), sizes=[places])
        p.scatter(place // self.top_k, rows, (), self._of_places(place, slot))

    def _of_places(self, place: Tile, index: Tile) -> Tile:
        """Returns an index that leaves out what is no place."""
        return self.p.select(place < self.p.splat(self.places, "i32", place.layout), index, -1)

    def _write_tiles(
        self, place: Tile, expert: Tile, begin: Tile, position: Tile, tiles: Tile, every_long: Tile
    ) -> None:
        """Writes the rows of the token tiles that begin with these places.

        tiles        those of lesser experts
        every_long   how many of all experts are not short
        """
        p = self.p
        tile, short = (p.splat(p[name], "i32", place.layout) for name in ("tile", "short"))
        number, slot, (before, short_before) = position // tile, begin + position, _long_and_short(tiles)
        size = p.min(tile, p.gather(self.all, (0,), expert) - position)
        row = p.select(short < size, before + number, every_long + short_before)
        begins = p.select(number * tile == position, row + 1, -1)
        index = self._of_places(place, p.select(expert < self.experts, begins, -1))
        end = slot + size
        for column, value in enumerate((expert, slot, end)):
            p.scatter(value, self.table, (column,), index)


def _long_and_short(tiles: Tile) -> tuple[Tile, Tile]:
    """Returns how many tiles a count has that are not short, and how many that are."""
    short = tiles // _SHORT
    return tiles - short * _SHORT, short


def _over(size: int) -> Layout:
    """Returns a layout of so many numbers in a row, or some more."""
    return local(1, -(-size // _THREADS)).spatial(1, _THREADS)
