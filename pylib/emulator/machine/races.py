"""Finds threads that touch the same byte of shared memory, one of them writing, with no order between them.

Time is the number of synchronizations so far. `seen[t, u]` is the time up to which thread t knows the actions of u. A
barrier collects the knowledge of threads that arrive (`release`), and passes it to threads that wait (`acquire`).
For every byte the detector keeps the last write and the last read, and once several threads have read it, the last
read of each; bytes that have always been accessed together share what is kept (`_Grains`). This is the happens-before
relation of FastTrack (Flanagan and Freund, 2009): no race is missed or made up.

Units that read or write at a time of their own count as threads, too: the wgmma unit of each warp, and the bulk copies
into the memory of each block.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, Fault, all_of, any_of

_WARP, WARPGROUP = 32, 128


class RaceClock:
    """The time, and what the threads of a cluster's blocks know of each other."""

    def __init__(self, blocks: int, lanes: int) -> None:
        self.lanes = lanes
        self.threads = lanes + lanes // _WARP + 1  # per block: its lanes, their wgmma units, bulk copies
        self.seen = np.zeros((blocks * self.threads,) * 2, np.int32)

    def reset(self) -> None:
        self.now = 1
        self.seen[:] = 0


class _Grains:
    """Memory in grains: as many bytes as every access so far has had a whole number of. All of a grain has had the same
    accesses, so one entry stands for it, and most kernels access 16 bytes, or 4, at a time."""

    grain = 16

    def _in_grains(self, size: int) -> int:
        """Returns the grains of an access of `size` bytes; they become smaller if it has a part of one."""
        if size % self.grain:
            smaller = gcd(size, self.grain)
            self._split(self.grain // smaller)
            self.grain = smaller
        return size // self.grain

    def _split(self, parts: int) -> None:
        raise NotImplementedError


class RaceDetector(_Grains):
    """Finds races in the shared memory of block `rank`, between its threads and the bulk copies into it."""

    def __init__(self, clock: RaceClock, rank: int) -> None:
        self.clock = clock
        self.lanes, self.threads = clock.lanes, clock.threads
        self.first = rank * clock.threads  # the block's threads in the clock
        self.copies = clock.threads - 1  # the thread that bulk copies count as
        self.block = slice(self.first, self.first + self.threads)
        self.seen = clock.seen[self.block, self.block]  # what the block's threads know of each other

    @property
    def now(self) -> int:
        return self.clock.now

    def reset(self, size: int) -> None:
        self.floor = 0  # everything up to here is known to everybody
        size //= self.grain
        self.writer = np.zeros(size, np.int32)
        self.written = np.zeros(size, np.int32)
        self.by_atomic = np.zeros(size, np.bool_)
        self.reader = np.zeros(size, np.int32)  # the last one
        self.shared = np.zeros(size, np.bool_)  # read by several threads since `floor`
        self.read_at = np.zeros(size, np.int32)
        self.reads = np.zeros((self.threads, size), np.int32)  # of what is shared; paged in as it is touched
        self.reading = np.zeros(self.threads, np.bool_)  # who has read anything

    def _split(self, parts: int) -> None:
        for name in ("writer", "written", "by_atomic", "reader", "shared", "read_at"):
            setattr(self, name, np.repeat(getattr(self, name), parts))
        reads = np.zeros((self.threads, len(self.writer)), np.int32)
        reads[self.reading] = np.repeat(self.reads[self.reading], parts, axis=1)
        self.reads = reads

    def read(self, lanes: Array, row: Array, size: int) -> None:
        size = self._in_grains(size)
        self._check_writes(lanes, row, size, "reads")
        self._note_reader(lanes[:, None], row, size)
        reader, shared = _rows(self.reader, size), _rows(self.shared, size)
        shared[row[reader[row, 0] != lanes]] = True  # by another lane at the same time
        several = shared[row].any(axis=1)
        self._note_reads(lanes[several], row[several], size)

    def _note_reader(self, thread: Array | int, row: Array, size: int) -> None:
        reader, shared, read_at = (_rows(each, size) for each in (self.reader, self.shared, self.read_at))
        recent = read_at[row] > self.floor
        shared_before = recent & shared[row]
        shared_now = recent & (reader[row] != thread) & ~shared_before
        if any_of(shared_now):
            at, column = np.nonzero(shared_now)
            self._note_last_read(row[at] * size + column)
        reader[row] = thread
        shared[row] = shared_before | shared_now
        read_at[row] = self.now

    def _note_last_read(self, grain: Array) -> None:
        """Grains that one thread has read are read by several from now on."""
        self.reads[self.reader[grain], grain] = self.read_at[grain]
        self.reading[self.reader[grain]] = True

    def _note_reads(self, threads: Array, row: Array, size: int) -> None:
        self.reads.reshape(self.threads, -1, size)[threads, row] = self.now
        self.reading[threads] = True

    def write(self, lanes: Array, row: Array, size: int, atomic: bool = False, floor: int | None = None) -> None:
        """Atomics are writes that do not race with each other. `floor`: up to when the writer knows everything."""
        floor = self.floor if floor is None else floor
        size = self._in_grains(size)
        self._check_writes(lanes, row, size, "writes", atomic, floor)
        self._check_reads(lanes, row, size, floor)
        writer = _rows(self.writer, size)
        writer[row] = lanes[:, None]
        _rows(self.written, size)[row] = self.now
        _rows(self.by_atomic, size)[row] = atomic
        lost = writer[row, 0] != lanes
        if any_of(lost) and not atomic:
            first = int(np.flatnonzero(lost)[0])
            self._report(int(row[first]) * size, int(lanes[first]), "writes", int(writer[row[first], 0]), "wrote")

    def _check_reads(self, lanes: Array, row: Array, size: int, floor: int) -> None:
        """What others have read has to be known to the lanes that write."""
        thread = lanes[:, None]
        read_at, shared, reader = (_rows(each, size)[row] for each in (self.read_at, self.shared, self.reader))
        suspect = (read_at > floor) & (shared | (reader != thread))
        if not any_of(suspect):
            return
        writers, which = np.unique(lanes, return_inverse=True)
        of_all = self.seen[writers].min(axis=1, where=self.reading, initial=self.now)[which, None]
        suspect &= read_at > np.where(shared, of_all, self.seen[thread, reader])
        if any_of(suspect):
            at, column = np.nonzero(suspect)
            self._check_each_read(row[at] * size + column, lanes[at])

    def _check_each_read(self, grain: Array, thread: Array) -> None:
        """What any other thread has read has to be known to the `thread` that writes it."""
        self._note_last_read(grain[~self.shared[grain]])
        unordered = self.seen[thread] < self.reads[:, grain].T
        unordered[np.arange(len(grain)), thread] = False
        if any_of(unordered):
            first, other = (int(i[0]) for i in np.nonzero(unordered))
            self._report(int(grain[first]), int(thread[first]), "writes", other, "read")

    def release(self, members: Array, known: Array | None) -> Array:
        """Returns what a barrier knows once `members` (a mask) have come, and `known` before."""
        told = self._rows()[members].max(axis=0)
        told[self.first : self.first + self.lanes][members] = self.now
        self.clock.now += 1
        return told if known is None else np.maximum(known, told)

    def acquire(self, members: Array, known: Array) -> None:
        rows = self._rows()
        rows[members] = np.maximum(rows[members], known)

    def _rows(self) -> Array:
        """Returns what each lane of the block knows of all threads of the cluster."""
        return self.clock.seen[self.first : self.first + self.lanes]

    def synchronize(self) -> None:
        """A barrier of the whole block, whose threads then also know alike of the others."""
        self._rows()[:] = self._rows().max(axis=0)
        own = self.seen[:, : self.copies]  # a bulk copy is known to who has waited for its mbarrier
        own[:] = self.floor = self.now
        self.clock.now += 1

    # Bulk copies. One starts with what the thread that issues it knows and has done; its mbarrier tells that it has
    # written.

    def begin_transfer(self, rank: int, lane: int, row: Array, size: int) -> int:
        """Thread `lane` of block `rank` starts a bulk copy; the time of its write."""
        clock, copies = self.clock, self.first + self.copies
        issuer = rank * self.threads + lane
        clock.seen[copies] = clock.seen[issuer]
        clock.seen[copies, issuer] = self.now
        self.write(np.full(len(row), self.copies), row, size, floor=0)
        clock.now += 1
        return self.now - 1

    def transferred(self, time: int) -> Array:
        """Returns what an mbarrier knows of a bulk copy that has ended."""
        known = np.zeros(len(self.clock.seen), np.int32)
        known[self.first + self.copies] = time
        return known

    # wgmma. A unit starts with what the threads of its warp know and have done, and they learn at the wait that it has
    # read. It reads at any time between; writes in this time are refused anyway (AsyncProxy).

    def begin_async_read(self, first: int, row: Array, size: int) -> None:
        """The wgmma units of the warpgroup that starts at lane `first` read from now on."""
        units, size = self._units(first), self._in_grains(size)
        for unit, warp in units:
            self.seen[unit] = self.seen[warp].max(axis=0)
            self.seen[unit, warp] = self.now
        known = np.min([self.seen[unit] for unit, _ in units], axis=0)  # to all units
        if any_of(_rows(self.written, size)[row] > known[_rows(self.writer, size)[row]]):
            for unit, _ in units:
                self._check_writes(np.full(len(row), unit), row, size, "reads")

    def end_async_read(self, first: int, row: Array, size: int) -> None:
        units, size = self._units(first), self._in_grains(size)
        for unit, warp in units:
            self.seen[warp, unit] = self.now
        self._note_reader(units[-1][0], row, size)
        _rows(self.shared, size)[row] = True
        self._note_reads(np.array([[unit] for unit, _ in units]), row, size)

    def _units(self, first: int) -> list[tuple[int, slice]]:
        warps = range(first, first + WARPGROUP, _WARP)
        return [(self.lanes + lane // _WARP, slice(lane, lane + _WARP)) for lane in warps]

    def _check_writes(
        self, lanes: Array, row: Array, size: int, verb: str, atomic: bool = False, floor: int | None = None
    ) -> None:
        """What others have written has to be known to the lanes."""
        writer, written = _rows(self.writer, size)[row], _rows(self.written, size)[row]
        # Who has only met the others at a block's barrier does not know of bulk copies.
        known = np.where(writer == self.copies, 0, self.floor if floor is None else floor)
        suspect = (written > known) & (writer != lanes[:, None])
        if atomic:
            suspect &= ~_rows(self.by_atomic, size)[row]
        if any_of(suspect):
            unordered = suspect & (written > self.seen[lanes[:, None], writer])
            if any_of(unordered):
                at, column = (int(i[0]) for i in np.nonzero(unordered))
                self._report(int(row[at]) * size + column, int(lanes[at]), verb, int(writer[at, column]), "wrote")

    def _report(self, grain: int, thread: int, verb: str, other: int, did: str) -> None:
        who = f"thread {other}" if other < self.lanes else f"the wgmma of warp {other - self.lanes}"
        if other == self.copies:
            who = "a bulk copy"
        lane = None if thread == self.copies else thread if thread < self.lanes else (thread - self.lanes) * _WARP
        raise Fault(f"race: {verb} shared byte {grain * self.grain} that {who} {did}, without a barrier between", lane)


class ClusterClock:
    """When the threads of a cluster do something: by how often they have been at its barrier."""

    def __init__(self, blocks: int, lanes: int) -> None:
        self.arrivals = np.zeros((blocks, lanes), np.int64)  # of each thread
        self.waits = np.zeros((blocks, lanes), np.int64)  # how many of these it has waited for
        self.reset()

    def reset(self) -> None:
        self.phase = 0  # how often the barrier has opened
        self.arrivals[:] = self.waits[:] = 0
        #: [rank, p]: up to which phase a thread that has waited for phase p knows what the block did before
        self.told = np.zeros((len(self.arrivals), 1), np.int64)

    def advance(self, released: Array) -> None:
        """The phase ends; `released` says for which blocks all arrivals had release semantics."""
        self.phase += 1
        self.told = np.column_stack([self.told, np.where(released, self.phase, self.told[:, -1])])


class _Accesses:
    """The last access to each grain: block, its thread's arrivals at the cluster's barrier, thread and time."""

    def __init__(self, size: int, rank: int) -> None:
        self.rank = np.full(size, rank, np.int32)
        self.phase = np.full(size, -1, np.int32)
        self.thread = np.zeros(size, np.int32)
        self.time = np.zeros(size, np.int32)

    def split(self, parts: int) -> None:
        self.rank, self.phase, self.thread, self.time = (
            np.repeat(each, parts) for each in (self.rank, self.phase, self.thread, self.time)
        )


class ClusterRaceDetector(_Grains):
    """Finds races of blocks in the shared memory of block `rank`. The cluster's barrier or mbarriers order them."""

    def __init__(self, clock: ClusterClock, races: RaceClock, rank: int) -> None:
        self.clock, self.races, self.rank = clock, races, rank

    def reset(self, size: int) -> None:
        size //= self.grain
        self.writes = _Accesses(size, self.rank)
        self.reads = [_Accesses(size, rank) for rank in range(len(self.clock.arrivals))]

    def _split(self, parts: int) -> None:
        for accesses in (self.writes, *self.reads):
            accesses.split(parts)

    def read(self, by: int, lanes: Array, row: Array, size: int) -> None:
        size = self._in_grains(size)
        self._check(by, lanes, row, size, "reads", self.writes, "wrote")
        self._note(self.reads[by], by, lanes, row, size)

    def write(self, by: int, lanes: Array, row: Array, size: int) -> None:
        size = self._in_grains(size)
        self._check(by, lanes, row, size, "writes", self.writes, "wrote")
        for reads in self.reads:
            self._check(by, lanes, row, size, "writes", reads, "read")
        self._note(self.writes, by, lanes, row, size)

    def _note(self, accesses: _Accesses, by: int, lanes: Array, row: Array, size: int) -> None:
        last = self.clock.arrivals[by, lanes][:, None] >= _rows(accesses.phase, size)[row]
        if not all_of(last):  # some grains have been accessed later than that
            at, column = np.nonzero(last)
            lanes, row, size = lanes[at], row[at] * size + column, 1
        _rows(accesses.rank, size)[row] = by
        _rows(accesses.phase, size)[row] = self.clock.arrivals[by, lanes][:, None]
        _rows(accesses.thread, size)[row] = (by * self.races.threads + lanes)[:, None]
        _rows(accesses.time, size)[row] = self.races.now

    def _check(
        self, by: int, lanes: Array, row: Array, size: int, verb: str, accesses: _Accesses, did: str
    ) -> None:
        """The `accesses` of other blocks have to be known to `lanes` of block `by`."""
        rank = _rows(accesses.rank, size)[row]
        others = rank != by
        if not any_of(others):
            return
        phase, waits = _rows(accesses.phase, size)[row], self.clock.waits[by, lanes][:, None]
        unordered = others & (phase >= 0) & (self.clock.told[rank, waits] <= phase)
        if any_of(unordered):
            seen = self.races.seen[(by * self.races.threads + lanes)[:, None], _rows(accesses.thread, size)[row]]
            unordered &= _rows(accesses.time, size)[row] > seen
        if any_of(unordered):
            at, column = (int(i[0]) for i in np.nonzero(unordered))
            raise Fault(
                f"race: {verb} byte {(row[at] * size + column) * self.grain} of the shared memory of block {self.rank} "
                f"of the cluster, which block {rank[at, column]} {did}, without a cluster barrier between",
                int(lanes[at]),
            )


def bytes_of(row: Array, size: int) -> Array:
    """The numbers [rows, size] of the bytes of rows."""
    return row[:, None] * size + np.arange(size)


def _rows(of_grains: Array, size: int) -> Array:
    """What is known of grains, as rows of `size` grains: NumPy takes rows faster than as many grains."""
    return of_grains.reshape(-1, size)
