"""Finds threads that touch the same byte of shared memory, one of them writing, with no order between them.

Time is the number of synchronizations so far. `seen[t, u]` is the time up to which thread t knows what u did. A
barrier collects what those know and have done who arrive (`release`), and tells it to those who wait (`acquire`).
For every byte the detector keeps the last write and, per thread, the last read. This is the happens-before relation
of FastTrack (Flanagan and Freund, 2009), with reads kept per thread so that no race is missed or made up.
"""

from __future__ import annotations

import numpy as np

from pylib.emulator.faults import Array, Fault


class RaceDetector:
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    def reset(self, size: int) -> None:
        self.now = 1
        self.floor = 0  # everything up to here is known to everybody
        self.seen = np.zeros((self.lanes, self.lanes), np.int32)
        self.writer = np.zeros(size, np.int32)
        self.written = np.zeros(size, np.int32)
        self.by_atomic = np.zeros(size, np.bool_)
        self.reader = np.zeros(size, np.int32)  # the last one
        self.shared = np.zeros(size, np.bool_)  # read by several threads since `floor`
        self.read_at = np.zeros(size, np.int32)
        self.reads = np.zeros((size, self.lanes), np.int32)  # paged in as it is touched

    def read(self, lanes: Array, row: Array, size: int) -> None:
        byte, thread = self._bytes(lanes, row, size)
        self._check_writes(byte, thread, "reads")
        recent = self.read_at[byte] > self.floor
        shared = recent & (self.shared[byte] | (self.reader[byte] != thread))
        self.reader[byte] = thread
        self.shared[byte] = shared
        self.shared[byte[self.reader[byte] != thread]] = True
        self.read_at[byte] = self.now
        self.reads[byte, thread] = self.now

    def write(self, lanes: Array, row: Array, size: int, atomic: bool = False) -> None:
        """Atomics are writes that do not race with each other."""
        byte, thread = self._bytes(lanes, row, size)
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
        told = self.seen[members].max(axis=0)
        told[members] = self.now
        self.now += 1
        return told if known is None else np.maximum(known, told)

    def acquire(self, members: Array, known: Array) -> None:
        self.seen[members] = np.maximum(self.seen[members], known)

    def synchronize(self) -> None:
        """A barrier of the whole block."""
        self.seen[:] = self.floor = self.now
        self.now += 1

    @staticmethod
    def _bytes(lanes: Array, row: Array, size: int) -> tuple[Array, Array]:
        return (row[:, None] * size + np.arange(size)).ravel(), np.repeat(lanes, size)

    def _check_writes(self, byte: Array, thread: Array, verb: str, atomic: bool = False) -> None:
        suspect = (self.written[byte] > self.floor) & (self.writer[byte] != thread)
        if atomic:
            suspect &= ~self.by_atomic[byte]
        if suspect.any():
            unordered = suspect & (self.written[byte] > self.seen[thread, self.writer[byte]])
            if unordered.any():
                first = int(np.flatnonzero(unordered)[0])
                self._report(int(byte[first]), int(thread[first]), verb, int(self.writer[byte[first]]), "wrote")

    @staticmethod
    def _report(byte: int, thread: int, verb: str, other: int, did: str) -> None:
        raise Fault(f"race: {verb} shared byte {byte} that thread {other} {did}, without a barrier between", thread)
