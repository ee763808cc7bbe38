"""Finds threads that touch the same byte of shared memory, one of them writing, with no order between them.

Time is the number of synchronizations so far. `seen[t, u]` is the time up to which thread t knows what u did. A
barrier collects what those know and have done who arrive (`release`), and tells it to those who wait (`acquire`).
For every byte the detector keeps the last write and, per thread, the last read. This is the happens-before relation
of FastTrack (Flanagan and Freund, 2009), with reads kept per thread so that no race is missed or made up.
"""

from __future__ import annotations

import numpy as np

from pylib.emulator.faults import Array, Fault

_WARP, _WARPGROUP = 32, 128


class RaceDetector:
    """Between the threads of a block and, as threads of their own after these, the wgmma units of its warps."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.threads = lanes + lanes // _WARP

    def reset(self, size: int) -> None:
        self.now = 1
        self.floor = 0  # everything up to here is known to everybody
        self.seen = np.zeros((self.threads, self.threads), np.int32)
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

    def write(self, lanes: Array, row: Array, size: int, atomic: bool = False) -> None:
        """Atomics are writes that do not race with each other."""
        byte, thread = _bytes(lanes, row, size)
        self._check_writes(byte, thread, "writes", atomic)
        suspect = (self.read_at[byte] > self.floor) & (self.shared[byte] | (self.reader[byte] != thread))
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
        """What a barrier can tell once `members` (a mask) have come, `known` being what it could tell before."""
        told = self.seen[: self.lanes][members].max(axis=0)
        told[: self.lanes][members] = self.now
        self.now += 1
        return told if known is None else np.maximum(known, told)

    def acquire(self, members: Array, known: Array) -> None:
        seen = self.seen[: self.lanes]
        seen[members] = np.maximum(seen[members], known)

    def synchronize(self) -> None:
        """A barrier of the whole block."""
        self.seen[:] = self.floor = self.now
        self.now += 1

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
        warps = range(first, first + _WARPGROUP, _WARP)
        return [(self.lanes + lane // _WARP, slice(lane, lane + _WARP)) for lane in warps]

    def _check_writes(self, byte: Array, thread: Array, verb: str, atomic: bool = False) -> None:
        suspect = (self.written[byte] > self.floor) & (self.writer[byte] != thread)
        if atomic:
            suspect &= ~self.by_atomic[byte]
        if suspect.any():
            unordered = suspect & (self.written[byte] > self.seen[thread, self.writer[byte]])
            if unordered.any():
                first = int(np.flatnonzero(unordered)[0])
                self._report(int(byte[first]), int(thread[first]), verb, int(self.writer[byte[first]]), "wrote")

    def _report(self, byte: int, thread: int, verb: str, other: int, did: str) -> None:
        who = f"thread {other}" if other < self.lanes else f"the wgmma of warp {other - self.lanes}"
        lane = thread if thread < self.lanes else (thread - self.lanes) * _WARP
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


class ClusterRaceDetector:
    """Between blocks that use the shared memory of the block `rank`: only the cluster's barrier orders them."""

    def __init__(self, clock: ClusterClock, rank: int) -> None:
        self.clock, self.rank = clock, rank

    def reset(self, size: int) -> None:
        self.writer = np.full(size, self.rank, np.int64)  # rank of the block
        self.written = np.full(size, -1, np.int64)  # its thread's arrivals then
        self.reads = np.full((size, len(self.clock.arrivals)), -1, np.int64)  # by rank: the last one's

    def read(self, by: int, lanes: Array, row: Array, size: int) -> None:
        byte, thread = _bytes(lanes, row, size)
        self._check(by, byte, thread, "reads", self.writer[byte], self.written[byte], "wrote")
        self.reads[byte, by] = np.maximum(self.reads[byte, by], self.clock.arrivals[by, thread])

    def write(self, by: int, lanes: Array, row: Array, size: int) -> None:
        byte, thread = _bytes(lanes, row, size)
        self._check(by, byte, thread, "writes", self.writer[byte], self.written[byte], "wrote")
        for rank in range(len(self.clock.arrivals)):
            self._check(by, byte, thread, "writes", np.full(len(byte), rank), self.reads[byte, rank], "read")
        self.writer[byte] = by
        self.written[byte] = self.clock.arrivals[by, thread]

    def _check(self, by: int, byte: Array, thread: Array, verb: str, rank: Array, time: Array, did: str) -> None:
        """What blocks `rank` did at `time` has to be known to `thread` of block `by`."""
        unordered = (rank != by) & (time >= 0) & (self.clock.told[rank, self.clock.waits[by, thread]] <= time)
        if unordered.any():
            first = int(np.flatnonzero(unordered)[0])
            raise Fault(
                f"race: {verb} byte {byte[first]} of the shared memory of block {self.rank} of the cluster, "
                f"which block {rank[first]} {did}, without a cluster barrier between",
                int(thread[first]),
            )


def _bytes(lanes: Array, row: Array, size: int) -> tuple[Array, Array]:
    return (row[:, None] * size + np.arange(size)).ravel(), np.repeat(lanes, size)
