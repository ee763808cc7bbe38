"""The kernel that sorts the slots of tokens by expert, and cuts them into token tiles: it makes a `Routing`
(`pylib.experts.routing`).

A *place* is one of the k experts of a token. Its slot follows from all places, without sorting:

    slot[i] = #{j: expert[j] < expert[i]} + #{j < i: expert[j] == expert[i]}

A block has a share of the places, and counts those of each expert: before its share, in it, and after it. For few
places every block counts all. For many, the blocks of a cluster count a part each, and read one another's counts in
shared memory; clusters do not wait for each other. So one launch is enough, and nothing is kept in device memory.

Counts are the only atomics, in shared memory. Integers do not depend on the order in which they are added up, so the
result depends on no order of threads or blocks.

    for each round of places:        counts[before, mine or after, expert] += 1
    for each expert:                 before, all = sums over the blocks of the cluster; tiles = all / T, rounded up,
                                     short ones apart; begins, rows = all and tiles of lesser experts
    for each piece of my places:     starts[part, expert] = before + those in lesser parts of the piece
                                     position = starts[my part, expert] + those before it in its part
                                     slots, rows, and the table's row of a tile that begins here

Eight threads for each place, or two where there are many, look for the same expert among the places before it in its
part, which has 64.

Shared memory: three counts, before, all, tiles, begins and rows [experts + 1]; counts and starts of parts
[parts, experts + 1]; the experts of a piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import Layout, local, replicated, spatial

if TYPE_CHECKING:
    from lowbit.passes.builder import Memory, Program, Scalar, Tile

CLUSTER = 2  # blocks that count many places together, where a GPU has clusters
_THREADS = 512
_PART = 64  # places of which each is compared with all
_PARTS = 4  # of a piece, of many places
_ROUND = 8 * _THREADS  # places that are counted at once
_GROUP = 32  # experts that are added up at once
_WARP = 32
_VECTOR = 4  # numbers of 32 bits that a thread reads at once
_COLUMNS = 3  # of the table of tiles
_SHORT = 1 << 20  # what a short tile counts beside the others, of which there are fewer


def route_program(top_k: int, experts: int, words: int, cluster: int = 1) -> Program:
    """Returns the program for tokens of `top_k` of so many experts.

    words    32-bit words of an id in memory, 1 or 2
    cluster  blocks that count together; 1: every block counts all

    Parameters: ids [m, top_k]; rows, numbers, tiles and slots of a `Routing`; the number of tokens, m; `tile`, the most
    slots of a token tile; and `short`, the most of a short one.
    """
    from lowbit.passes.builder import Program

    names: dict[str, str] = dict.fromkeys(("ids", "rows", "numbers", "slots", "tiles"), "pointer")
    names |= {"m": "i32", "tile": "i32", "short": "i32"}
    grid = ("sm_count * 1", 1, 1) if cluster == 1 else (cluster, f"sm_count / {cluster}", 1)
    p = Program("route", _THREADS, grid, names, cluster=(cluster, 1, 1))
    with p:
        p.grid_launch_dependents()
        places = p["m"] * top_k
        rank, group = (p.block_id(0), p.block_id(1)) if cluster > 1 else (None, p.block_id(0))
        at_once = p.block_count(1 if cluster > 1 else 0) * cluster * _PART
        share = (places + at_once - 1) // at_once * _PART
        with p.when(group * cluster * share < places):
            p.grid_wait()
            _Block(p, top_k, experts, words, cluster, places, share).route(group, rank)
    return p


class _Block:
    """What one block does for its share of the places."""

    def __init__(
        self, p: Program, top_k: int, experts: int, words: int, cluster: int, places: Scalar, share: Scalar
    ) -> None:
        self.p, self.top_k, self.experts, self.words, self.places, self.share = p, top_k, experts, words, places, share
        self.cluster, self.parts = cluster, _PARTS if cluster > 1 else 1
        self.piece = self.parts * _PART
        self.width = (experts // _THREADS + 1) * _THREADS  # those elsewhere have a count of their own, the last
        counted = (experts // _WARP + 1) * _WARP  # which other blocks read
        lanes = _THREADS // self.piece
        at_once = local(1, 1, _PART // (lanes * _VECTOR)).spatial(self.parts, _PART, lanes)
        self.of_parts = at_once.local(1, 1, _VECTOR)  # [parts, places, places]
        self.mine = self.of_parts.reduce((2,))
        self.earlier, self.own, self.later = (p.alloc_shared("i32", (1, counted)) for _ in range(3))
        self.before, self.all, self.tiles, self.begins, self.rows = (
            p.alloc_shared("i32", (1, self.width)) for _ in range(5)
        )
        self.of_part, self.starts = (p.alloc_shared("i32", (1, self.parts * self.width)) for _ in range(2))
        self.of_piece = p.alloc_shared("i32", (1, self.piece))
        self.table = p.global_view(p["tiles"], "i32", (_COLUMNS, -1), (1, _COLUMNS), sizes=[places + 1])

    def route(self, group: Scalar, rank: Scalar | None) -> None:
        """Writes what the share's places are in the routing.

        group   which cluster of blocks this one is in, or which block it is
        rank    the block's place in its cluster; None without clusters
        """
        p = self.p
        first = (group * self.cluster + (0 if rank is None else rank)) * self.share
        mine = self.share.min(self.places - first).max(0)
        self._clear()
        self._count(group, rank, first, first + mine)
        p.barrier("block" if rank is None else "cluster")
        self._add_up(rank)
        if rank is not None:
            p.barrier("cluster_arrive")
        p.barrier()
        self._sum_over_lesser()
        p.barrier()
        one = replicated(_THREADS, 2)
        beyond = p.constant(self.experts, "i32", one)
        long, short = _long_and_short(p.gather(self.rows, (0,), beyond))
        with p.when(first == 0):
            for column, number in enumerate((long + short, p.gather(self.begins, (0,), beyond), short)):
                p.store(number, self.table, (column, 0))
        with p.loop(0, (mine + self.piece - 1) // self.piece) as loop:
            self._place(first + loop.index * self.piece, first + mine)
        if rank is not None:
            p.barrier("cluster_wait")  # nobody leaves while its counts are read

    # -- counts

    def _clear(self) -> None:
        p = self.p
        for memory in (self.earlier, self.own, self.later):
            p.store(p.constant(0, "i32", _over(self.width)), memory, (0, 0), ("none", "skip"))
        p.store(p.constant(0, "i32", _over(self.parts * self.width)), self.of_part, (0, 0))
        p.barrier()

    def _count(self, group: Scalar, rank: Scalar | None, first: Scalar, end: Scalar) -> None:
        """Counts the places of each expert: all, of which the block's begin with `first`; or a part of those that are
        not the cluster's, and the block's before `end`."""
        p = self.p
        rounds, layout = (self.places + _ROUND - 1) // _ROUND, local(_ROUND // _THREADS, 1).spatial(_THREADS, 1)
        if rank is None:
            with p.loop(0, rounds) as loop:
                self._count_round(loop.index, layout, first, first)
            return
        beginning = self._numbered(first, _of_mine())  # is under way meanwhile
        begin = group * (self.cluster * self.share)
        with p.loop(0, (rounds + (self.cluster - 1) - rank) // self.cluster) as loop:
            self._count_round(loop.index * self.cluster + rank, layout, begin, begin + self.cluster * self.share)
        self._count_up(self.own, beginning[1], beginning[0], end)
        with p.loop(1, (end - first + _THREADS - 1) // _THREADS - 1) as loop:
            place, expert = self._numbered(first + loop.index * _THREADS, _of_mine())
            self._count_up(self.own, expert, place, end)

    def _count_round(self, number: Scalar, layout: Layout, begin: Scalar, end: Scalar) -> None:
        """Counts the places of a round that are before `begin`, or from `end` on."""
        p = self.p
        place, expert = self._numbered(number * _ROUND, layout)
        for counts, bound, before in ((self.earlier, begin, True), (self.later, end, False)):
            others = place < p.splat(bound, "i32", layout)
            index = p.select(others, expert, -1) if before else p.select(others, -1, expert)
            self._count_up(counts, index, place, self.places)

    def _count_up(self, counts: Memory, index: Tile, place: Tile, end: Scalar) -> None:
        """Adds one to the counts at the indices of the places before `end`."""
        ones = self.p.constant(1, "i32", place.layout)
        self.p.scatter(ones, counts, (0,), self._of_places(place, index, end), "add")

    def _add_up(self, rank: Scalar | None) -> None:
        """Writes how many places each expert has before the block's and in all, and how many tiles: those with few
        slots count `_SHORT`."""
        p, layout = self.p, _over(self.width)
        before = number = p.constant(0, "i32", layout)
        for block in range(self.cluster):
            buffers = self.earlier, self.own, self.later
            counts = buffers if rank is None else (p.peer(buffer, block) for buffer in buffers)
            earlier, own, later = (p.load(each, (0, 0), layout, ("none", "zero")) for each in counts)
            number = number + earlier + own + later
            before = before + earlier
            if rank is not None:
                before = before + p.select(p.splat(rank, "i32", layout) > block, own, 0)
        tile, short = (p.splat(p[name], "i32", layout) for name in ("tile", "short"))
        rest = number - number // tile * tile
        last = p.select(short < rest, p.constant(1, "i32", layout), p.min(rest, 1) * _SHORT)
        for numbers, memory in ((before, self.before), (number, self.all), (number // tile + last, self.tiles)):
            p.store(numbers, memory, (0, 0))

    def _sum_over_lesser(self) -> None:
        """Writes how many places, and how many tiles, the experts before each have: those of lesser groups, and those
        before it in its own."""
        p, turns = self.p, self.width // _THREADS
        flat, groups = (1, self.width), self.width // _GROUP
        of_threads = local(turns, 1, 1).spatial(_THREADS // _GROUP, _GROUP, 1)
        of_groups = of_threads.local(1, 1, _GROUP)  # [groups, experts of one, experts of one]
        of_sums = of_threads.local(1, 1, groups).reduce((1,))  # [groups, 1, groups]
        lesser = p.iota(2, of_groups) < p.iota(1, of_groups.reduce((2,)))
        earlier = p.iota(2, of_sums) < p.iota(0, of_sums.reduce((2,)))
        sums = [p.alloc_shared("i32", (1, groups)) for _ in range(2)]
        within: list[Tile] = []
        for numbers, total in zip((self.all, self.tiles), sums):
            row = p.load(numbers, (0, 0), of_groups.reduce((1,)).reshape(flat))
            each = p.reshape(row, (groups, 1, _GROUP))
            within.append(p.reduce(p.select(lesser, each, 0), 2))
            p.store(p.reshape(p.reduce(each, 2), (1, groups)), total, (0, 0))
        p.barrier()
        for part, total, memory in zip(within, sums, (self.begins, self.rows)):
            row = p.load(total, (0, 0), of_sums.reduce((0,)).reshape((1, groups)))
            before = p.reduce(p.select(earlier, p.reshape(row, (1, 1, groups)), 0), 2)
            p.store(p.reshape(part + before, flat), memory, (0, 0))

    # -- places

    def _numbered(self, start: Scalar, layout: Layout) -> tuple[Tile, Tile]:
        """Returns the numbers of the places from `start` on, along dim 0, and their experts; elsewhere counts as the
        last.

        Beyond the last place is the last again: no load waits for a branch.
        """
        p, experts, words = self.p, self.experts, self.words
        place = p.iota(0, layout) + p.splat(start, "i32", layout)
        ids = p.global_view(p["ids"], "i32", (-1, words), sizes=[self.places])
        both = p.load(ids, (start, 0), layout * local(1, words), ("clamp", "none"))
        low, *high = (p.slice(both, 1, word, 1) for word in range(words))
        expert = p.select(low < 0, experts, p.min(low, experts))
        return place, p.select(high[0] == 0, expert, experts) if high else expert

    def _place(self, start: Scalar, end: Scalar) -> None:
        """Writes what a piece of the block's places is in the routing: those from `start` on, before `end`."""
        p, shape = self.p, (self.parts, _PART, 1)
        place, expert = (
            p.reshape(each, shape) for each in self._numbered(start, self.mine.reshape((self.piece, 1)))
        )
        part = p.iota(0, self.mine) * self.width
        p.store(p.reshape(expert, (1, self.piece)), self.of_piece, (0, 0))
        self._count_up(self.of_part, part + expert, place, end)
        p.barrier()
        self._start_parts()
        p.barrier()
        position = p.gather(self.starts, (0,), part + expert) + self._before_in_part(expert)
        begin, row = (p.gather(memory, (0,), expert) for memory in (self.begins, self.rows))
        beyond = p.constant(self.experts, "i32", self.mine)
        long, short = _long_and_short(p.gather(self.rows, (0,), beyond))
        self._write_slots(start, place, begin + position, end)
        self._write_tiles(place, expert, begin, position, row, long, end)
        empty = p.select(place < long + short, -1, place + 1)  # a row of the table that no tile has
        for column in range(_COLUMNS):
            p.scatter(p.constant(0, "i32", self.mine), self.table, (column,), self._of_places(place, empty, end))
        p.barrier()

    def _start_parts(self) -> None:
        """Writes how many places of each expert are before each part of a piece, and clears the counts of parts."""
        p, layout = self.p, _over(self.width)
        start, zeros = p.load(self.before, (0, 0), layout), p.constant(0, "i32", layout)
        for part in range(self.parts):
            at = (0, part * self.width)
            counted = p.load(self.of_part, at, layout)
            p.store(start, self.starts, at)
            p.store(zeros, self.of_part, at)
            start = start + counted
        p.store(start, self.before, (0, 0))

    def _before_in_part(self, expert: Tile) -> Tile:
        """Returns how many places of its part are before each and have the same expert."""
        p = self.p
        row = p.load(self.of_piece, (0, 0), self.of_parts.reduce((1,)).reshape((1, self.piece)))
        others = p.constant(0, "i32", self.of_parts) + p.reshape(row, (self.parts, 1, _PART))
        before = p.iota(2, self.of_parts) < p.iota(1, self.mine)
        return p.reduce(p.select(others == expert, p.select(before, p.constant(1, "i32", self.of_parts), 0), 0), 2)

    def _write_slots(self, start: Scalar, place: Tile, slot: Tile, end: Scalar) -> None:
        """Writes the slots of places, and the rows of slots."""
        p = self.p
        for name, number in (("slots", slot), ("numbers", place)):
            view = p.global_view(p[name], "i32", (-1, 1), sizes=[end])
            p.store(p.reshape(number, (self.piece, 1)), view, (start, 0), ("skip", "none"))
        rows = p.global_view(p["rows"], "i32", (-1,), sizes=[self.places])
        p.scatter(place // self.top_k, rows, (), self._of_places(place, slot, end))

    def _of_places(self, place: Tile, index: Tile, end: Scalar) -> Tile:
        """Returns an index that leaves out what is no place before `end`."""
        return self.p.select(place < self.p.splat(end, "i32", place.layout), index, -1)

    def _write_tiles(
        self, place: Tile, expert: Tile, begin: Tile, position: Tile, tiles: Tile, every_long: Tile, end: Scalar
    ) -> None:
        """Writes the rows of the token tiles that begin with these places, before `end`.

        tiles        those of lesser experts
        every_long   how many of all experts are not short
        """
        p = self.p
        tile, short = (p.splat(p[name], "i32", place.layout) for name in ("tile", "short"))
        number, slot, (before, short_before) = position // tile, begin + position, _long_and_short(tiles)
        size = p.min(tile, p.gather(self.all, (0,), expert) - position)
        row = p.select(short < size, before + number, every_long + short_before)
        begins = p.select(number * tile == position, row + 1, -1)
        index = self._of_places(place, p.select(expert < self.experts, begins, -1), end)
        for column, value in enumerate((expert, slot, slot + size)):
            p.scatter(value, self.table, (column,), index)


def _long_and_short(tiles: Tile) -> tuple[Tile, Tile]:
    """Returns how many tiles a count has that are not short, and how many that are."""
    short = tiles // _SHORT
    return tiles - short * _SHORT, short


def _over(size: int) -> Layout:
    """Returns a layout of so many numbers in a row, a multiple of the threads."""
    return local(1, size // _THREADS).spatial(1, _THREADS)


def _of_mine() -> Layout:
    """Returns the layout of the block's places that are counted at once."""
    return spatial(_THREADS, 1)
