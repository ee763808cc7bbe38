"""Finds threads that touch the same byte of shared memory, one of them writing, with no order between them.

Time is the number of synchronizations so far. `seen[t, u]` is the time up to which thread t knows the actions of u. A
barrier collects the knowledge of threads that arrive (`release`), and passes it to threads that wait (`acquire`).
For every byte the detector keeps the last write and, per thread, the last read. This is the happens-before relation
of FastTrack (Flanagan and Freund, 2009), with reads kept per thread so that no race is missed or made up.

Units that read or write at a time of their own count as threads, too: the wgmma unit of each warp, and the bulk copies
into the memory of each block.
"""

from __future__ import annotations

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, Fault

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


class RaceDetector:
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
        self.writer = np.zeros(size, np.int32)
        self.written = np.zeros(size, np.int32)
        self.by_atomic = np.zeros(size, np.bool_)
        self.reader = np.zeros(size, np.int32)  # the last one
        self.shared = np.zeros(size, np.bool_)  # read by several threads since `floor`
        self.read_at = np.zeros(size, np.int32)
        self.reads = np.zeros((size, self.threads), np.int32)  # paged in as it is touched

    def read(self, lanes: Array, row: Array, size: int) -> None:
        byte, thread = _bytes(lanes, row, size)
        self._check_writes(byte, thread, "reads")
        self._record_reads(byte, thread)

    def _record_reads(self, byte: Array, thread: Array) -> None:
        recent = self.read_at[byte] > self.floor
        shared = recent & (self.shared[byte] | (self.reader[byte] != thread))
        self.reader[byte] = thread
        self.shared[byte] = shared
        self.shared[byte[self.reader[byte] != thread]] = True
        self.read_at[byte] = self.now
        self.reads[byte, thread] = self.now

    def write(self, lanes: Array, row: Array, size: int, atomic: bool = False, floor: int | None = None) -> None:
        """Atomics are writes that do not race with each other. `floor`: up to when the writer knows everything."""
        floor = self.floor if floor is None else floor
        byte, thread = _bytes(lanes, row, size)
        self._check_writes(byte, thread, "writes", atomic, floor)
        suspect = (self.read_at[byte] > floor) & (self.shared[byte] | (self.reader[byte] != thread))
        if suspect.any():
            byte_, thread_ = byte[suspect], thread[suspect]
            unordered = self.reads[byte_] > self.seen[thread_]
            unordered[np.arange(len(byte_)), thread_] = False
            if unordered.any():
                first, other = (int(i[0]) for i in np.nonzero(unordered))
                self._report(int(byte_[first]), int(thread_[first]), "writes", other, "read")
        self.writer[byte] = thread
        self.written[byte] = self.now
        self.by_atomic[byte] = atomic
        lost = self.writer[byte] != thread
        if lost.any() and not atomic:
            first = int(np.flatnonzero(lost)[0])
            self._report(int(byte[first]), int(thread[first]), "writes", int(self.writer[byte[first]]), "wrote")

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
        for unit, warp in self._units(first):
            self.seen[unit] = self.seen[warp].max(axis=0)
            self.seen[unit, warp] = self.now
            byte, thread = _bytes(np.full(len(row), unit), row, size)
            self._check_writes(byte, thread, "reads")

    def end_async_read(self, first: int, row: Array, size: int) -> None:
        for unit, warp in self._units(first):
            self._record_reads(*_bytes(np.full(len(row), unit), row, size))
            self.seen[warp, unit] = self.now

    def _units(self, first: int) -> list[tuple[int, slice]]:
        warps = range(first, first + WARPGROUP, _WARP)
        return [(self.lanes + lane // _WARP, slice(lane, lane + _WARP)) for lane in warps]

    def _check_writes(
        self, byte: Array, thread: Array, verb: str, atomic: bool = False, floor: int | None = None
    ) -> None:
        # Who has only met the others at a block's barrier does not know of bulk copies.
        known = np.where(self.writer[byte] == self.copies, 0, self.floor if floor is None else floor)
        suspect = (self.written[byte] > known) & (self.writer[byte] != thread)
        if atomic:
            suspect &= ~self.by_atomic[byte]
        if suspect.any():
            unordered = suspect & (self.written[byte] > self.seen[thread, self.writer[byte]])
            if unordered.any():
                first = int(np.flatnonzero(unordered)[0])
                self._report(int(byte[first]), int(thread[first]), verb, int(self.writer[byte[first]]), "wrote")

    def _report(self, byte: int, thread: int, verb: str, other: int, did: str) -> None:
        who = f"thread {other}" if other < self.lanes else f"the wgmma of warp {other - self.lanes}"
        if other == self.copies:
            who = "a bulk copy"
        lane = None if thread == self.copies else thread if thread < self.lanes else (thread - self.lanes) * _WARP
        raise Fault(f"race: {verb} shared byte {byte} that {who} {did}, without a barrier between", lane)


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
    """The last access to each byte: block, its thread's arrivals at the cluster's barrier, thread and time."""

    def __init__(self, size: int, rank: int) -> None:
        self.rank = np.full(size, rank, np.int64)
        self.phase = np.full(size, -1, np.int64)
        self.thread = np.zeros(size, np.int64)
        self.time = np.zeros(size, np.int32)


class ClusterRaceDetector:
    """Finds races of blocks in the shared memory of block `rank`. The cluster's barrier or mbarriers order them."""

    def __init__(self, clock: ClusterClock, races: RaceClock, rank: int) -> None:
        self.clock, self.races, self.rank = clock, races, rank

    def reset(self, size: int) -> None:
        self.writes = _Accesses(size, self.rank)
        self.reads = [_Accesses(size, rank) for rank in range(len(self.clock.arrivals))]

    def read(self, by: int, lanes: Array, row: Array, size: int) -> None:
        byte, thread = _bytes(lanes, row, size)
        self._check(by, byte, thread, "reads", self.writes, "wrote")
        self._note(self.reads[by], by, byte, thread)

    def write(self, by: int, lanes: Array, row: Array, size: int) -> None:
        byte, thread = _bytes(lanes, row, size)
        self._check(by, byte, thread, "writes", self.writes, "wrote")
        for reads in self.reads:
            self._check(by, byte, thread, "writes", reads, "read")
        self._note(self.writes, by, byte, thread)

    def _note(self, accesses: _Accesses, by: int, byte: Array, thread: Array) -> None:
        phase = self.clock.arrivals[by, thread]
        last = phase >= accesses.phase[byte]
        byte, thread = byte[last], thread[last]
        accesses.rank[byte] = by
        accesses.phase[byte] = phase[last]
        accesses.thread[byte] = by * self.races.threads + thread
        accesses.time[byte] = self.races.now

    def _check(self, by: int, byte: Array, thread: Array, verb: str, accesses: _Accesses, did: str) -> None:
        """The `accesses` of other blocks have to be known to `thread` of block `by`."""
        rank, phase = accesses.rank[byte], accesses.phase[byte]
        unordered = (rank != by) & (phase >= 0) & (self.clock.told[rank, self.clock.waits[by, thread]] <= phase)
        if unordered.any():
            seen = self.races.seen[by * self.races.threads + thread, accesses.thread[byte]]
            unordered &= accesses.time[byte] > seen
        if unordered.any():
            first = int(np.flatnonzero(unordered)[0])
            raise Fault(
                f"race: {verb} byte {byte[first]} of the shared memory of block {self.rank} of the cluster, "
                f"which block {rank[first]} {did}, without a cluster barrier between",
                int(thread[first]),
            )


def bytes_of(row: Array, size: int) -> Array:
    """The numbers [rows, size] of the bytes of rows."""
    return row[:, None] * size + np.arange(size)


def _bytes(lanes: Array, row: Array, size: int) -> tuple[Array, Array]:
    return bytes_of(row, size).ravel(), np.repeat(lanes, size)
