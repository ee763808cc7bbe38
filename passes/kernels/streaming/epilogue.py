"""The end of the matmul kernel: what the warps and blocks that split k have, added up, and stored.

Sums of warps meet in shared memory. Blocks that split k either are a cluster, and each adds up its part of the rows
from the shared memory of all; or they write to device memory, where the last one to arrive adds up.
"""

from __future__ import annotations

import math
from functools import reduce

from lowbit.dialect.epilogue import HALF
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.layout import Layout, column_spatial, local, replicated
from lowbit.dialect.top_k import ROUTER_WEIGHTS
from lowbit.passes.builder import Index, Memory, Scalar, Tile
from lowbit.passes.kernels.epilogue import Epilogue
from lowbit.passes.kernels.streaming.block import Block
from lowbit.passes.kernels.streaming.work import TopKWork, top_k_of
from lowbit.passes.launch import COUNTERS


class Ending:
    """Writes the end of a block's program."""

    def __init__(self, block: Block) -> None:
        self.p, self.work, self.plan = block.p, block.work, block.plan
        self.spec, self.schedule = block.spec, block.schedule
        of_expert = block.spec.n // block.spec.experts
        self._end = Epilogue(block.p, block.spec, ragged=of_expert % block.schedule.rows != 0)

    def finish(self, sums: list[Tile]) -> None:
        """The sum over warps and splits that share rows, then scales of rows and of x, bias, conversion, store.

        sums  of each chain of a warp [warps_k, rows, tokens]; there are several in invariant matmuls only
        """
        s = self.schedule
        if s.cluster > 1:
            rows = s.rows // s.cluster
            rank = self.work.split()
            self._store(self._across_cluster(sums, rank), self.work.first_row() + rank * rows)
            self.p.barrier("cluster_wait")  # nobody leaves while its sums are read
        elif s.split_k > 1:
            self._across_splits(self._across_warps(sums))
        else:
            self._store(self._across_warps(sums), self.work.first_row())

    def _sums_buffers(self, sums: list[Tile]) -> list[Memory]:
        """Every warp's sums in shared memory, a buffer for each chain: [warps_k, rows, tokens]."""
        p, s = self.p, self.schedule
        row = s.rows + 4  # keeps the lanes of a fragment in different banks
        shape, strides = (s.warps_k, s.rows, s.tokens), (row * s.tokens, 1, row)
        buffers = [p.alloc_shared("f32", shape, strides) for _ in sums]
        for total, buffer in zip(sums, buffers, strict=True):
            p.store(total, buffer, (0, 0, 0), ("none", "none", "none" if s.tokens == s.columns else "skip"))
        return buffers

    def _across_warps(self, sums: list[Tile]) -> Tile:
        """The sum over the warps that split k: [rows, tokens] (or all columns, if there is one warp only)."""
        p, s = self.p, self.schedule
        if s.warps_k == 1:
            return p.reshape(self._added_up(sums), (s.rows, s.columns))
        buffers = self._sums_buffers(sums)
        p.barrier()
        layout = self._sum_up_layout(s.warps_k, s.rows, s.tokens)
        loaded = [p.load(buffer, (0, 0, 0), layout) for buffer in buffers]
        total = p.reduce(loaded[0], 0) if s.chains == 1 else self._added_up(self._in_order(loaded))
        return p.reshape(total, (s.rows, s.tokens))

    def _across_cluster(self, sums: list[Tile], rank: Scalar) -> Tile:
        """The sum over warps and blocks of the cluster, of this block's part of the rows: [rows / cluster, tokens]."""
        p, s = self.p, self.schedule
        read = self._shared_with_peers(sums)
        rows, turns = s.rows // s.cluster, range(s.cluster)
        parts = [part for turn in turns for part in self._parts_of_peer(read, self._peer(rank, turn), rank, rows)]
        total = self._added_up(parts)
        p.barrier("cluster_arrive")
        return p.reshape(total, (rows, s.tokens))

    def _added_up(self, terms: list[Tile]) -> Tile:
        return reduce(self.p.add, terms)

    def _in_order(self, chains: list[Tile]) -> list[Tile]:
        """The sums of warps [warps_k, rows, tokens] of each of their chains as terms, in the order of k."""
        return [self.p.slice(each, 0, warp, 1) for warp in range(self.schedule.warps_k) for each in chains]

    def _peer(self, rank: Scalar, turn: int) -> Index:
        """Returns whose sums a block adds in a turn: each begins with its own, unless there is one order for all."""
        return turn if self.spec.invariant else (rank + turn) % self.schedule.cluster

    def _shared_with_peers(self, sums: list[Tile]) -> list[Memory]:
        """Every warp's sums in shared memory, when all blocks of the cluster have theirs there."""
        buffers = self._sums_buffers(sums)
        self.p.barrier("cluster")
        return buffers

    def _parts_of_peer(self, buffers: list[Memory], peer: Index, part: Scalar, rows: int) -> list[Tile]:
        """What a block of the cluster adds: the sum of its warps, or their chains one by one where there is one order
        for all kernels (`SumOrder`)."""
        if not self.spec.invariant:
            return [self._of_peer(buffers[0], peer, part, rows)]
        return self._in_order([self._warps_of_peer(buffer, peer, part, rows) for buffer in buffers])

    def _of_peer(self, buffer: Memory, peer: Index, part: Scalar, rows: int) -> Tile:
        """The sums over the warps of a block of the cluster, of one part of the rows: [1, rows, tokens]."""
        return self.p.reduce(self._warps_of_peer(buffer, peer, part, rows), 0)

    def _warps_of_peer(self, buffer: Memory, peer: Index, part: Scalar, rows: int) -> Tile:
        """The sums of its warps: [warps_k, rows, tokens]."""
        layout = self._sum_up_layout(self.schedule.warps_k, rows, self.schedule.tokens)
        return self.p.load(self.p.peer(buffer, peer), (0, part * rows, 0), layout)

    def _sum_up_layout(self, parts: int, rows: int, columns: int) -> Layout:
        """[parts, rows, columns]: all parts of an element in one thread, neighbours along the rows; with them both
        halves of a gated row block."""
        if self.spec.is_gated:
            halves = self._spread(parts, rows // 2, columns).reshape((parts, rows // ROWS, HALF, columns))
            return (halves.unsqueeze(2) * local(1, 1, 2, 1, 1)).reshape((parts, rows, columns))
        return self._spread(parts, rows, columns)

    def _spread(self, parts: int, rows: int, columns: int) -> Layout:
        s = self.schedule
        across = math.gcd(rows, s.threads)
        side = math.gcd(columns, s.threads // across)
        spare = s.threads // (across * side)
        return replicated(spare, 3) * (local(parts, rows // across, columns // side) * column_spatial(1, across, side))

    def _across_splits(self, total: Tile) -> None:
        """Through device memory: the last block of a tile to arrive adds up and stores."""
        p, s, work = self.p, self.schedule, self.work
        tiles, columns = self.plan.steps.tiles, total.shape[1]
        size = s.rows * columns
        sizes, strides = (s.split_k, tiles, COUNTERS + s.rows, columns), (tiles * size, size, 1, s.rows)
        partial = p.global_view(p["workspace"], "f32", sizes, strides)  # behind the counters: rows are side by side
        counters = p.global_view(p["workspace"], "i32", (COUNTERS,))
        p.store(p.reshape(total, (1, 1, s.rows, columns)), partial, (work.split(), work.tile, COUNTERS, 0))
        last = p.last_arrival(counters, work.tile, s.split_k)
        with p.when(last):
            layout = self._sum_up_layout(s.split_k, s.rows, columns).reshape((s.split_k, 1, s.rows, columns))
            parts = p.load(partial, (0, work.tile, COUNTERS, 0), layout)
            self._store(p.reshape(p.reduce(parts, 0), (s.rows, columns)), work.first_row())

    def _store(self, total: Tile, first_row: Scalar) -> None:
        self.work.store(self._numbers(total, first_row), self._end, first_row)

    def _numbers(self, total: Tile, first_row: Scalar) -> Tile:
        """Returns the numbers of y that sums over all of k become."""
        p, spec, end = self.p, self.spec, self._end
        if spec.compute:
            total = p.mul(total, self.work.scales_of_x(total.layout.reduce((0,))))
        if spec.row_scales and not spec.outliers:  # else before the outliers were added
            total = p.mul(total, end.per_row("row_scales", "f32", total, first_row))
        return end.numbers(total, first_row)


class SumOfExperts(Ending):
    """The end where the blocks of a cluster have one of a token's experts each: what these make of it, rounded to y's
    type, times their weights, in the order of the ids. As many of the blocks as divide the rows add up a part each."""

    work: TopKWork

    def finish(self, sums: list[Tile]) -> None:
        p, count = self.p, top_k_of(self.plan).count
        parts = 1 << (count.bit_length() - 1)
        (read,) = self._shared_with_peers(sums)
        if parts < count:
            with p.when(self.work.rank < parts):
                self._add_up(read, count, self.schedule.rows // parts)
        else:
            self._add_up(read, count, self.schedule.rows // parts)
        p.barrier("cluster_arrive")
        p.barrier("cluster_wait")  # nobody leaves while its sums are read

    def _add_up(self, sums: Memory, count: int, rows: int) -> None:
        """Stores so many rows of y, the block's part of them. sums: of a block; those of all are at the same place."""
        p, work = self.p, self.work
        row = work.tile * self.schedule.rows + work.rank * rows
        y: Tile | None = None
        for place in range(count):
            expert = work.expert_at(work.y_row * count + place)
            part = p.reshape(self._of_peer(sums, place, work.rank, rows), (rows, self.schedule.tokens))
            term = self._term(part, place, expert, row)
            y = term if y is None else p.add(y, term)
        if y is not None:
            view = self._end.view_like_y("y", work.y_row + 1)
            p.store(p.cast(y, self.spec.out_dtype), view, (row, work.y_row), (self._end.outside("skip"), "skip"))

    def _term(self, part: Tile, place: int, expert: Scalar, row: Scalar) -> Tile:
        """Returns what the expert of a place adds to y, exactly 0 if it is elsewhere. row: of an expert's own."""
        p, work, top_k, experts = self.p, self.work, top_k_of(self.plan), self.spec.experts
        of_token = p.global_view(p[ROUTER_WEIGHTS], str(top_k.weights), (-1, top_k.count), sizes=[work.y_row + 1])
        here = expert < experts
        numbers = self._numbers(part, work.rows_before(here.select(expert, 0)) + row)
        weight = p.cast(p.load(of_token, (work.y_row, place), part.layout.reduce((0, 1))), "f32")
        term = p.mul(p.cast(numbers, "f32"), weight)
        return p.select(p.splat(expert, "i32", term.layout) < experts, term, 0.0)
