"""A thread block cluster: its barrier, and its shared memories as one address space (PTX ISA 9.7.13.4, 5.1.7).

The address of byte `a` of the shared memory of rank `r` is `(r + 1) << 24 | a` in the .shared::cluster window; an `a`
alone, as .shared::cta has it, means the block's own memory.

Blocks of a cluster run in turns and change only where all threads of one wait for the others. So that a mistake is
found in any order, each access to another block's memory is stamped with the number of times that its thread has
arrived at the cluster's barrier: a block may exit only after the phase that follows the last stamp on its memory.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, Fault, all_of, any_of, distinct, require
from lowbit.pylib.emulator.machine.races import ClusterClock, RaceClock
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory
from lowbit.pylib.emulator.machine.transfers import Transfers

#: Largest cluster; above 8 blocks it takes a launch attribute.
MAX_CLUSTER = 16
_RANK_SHIFT = 24

_Addresses = TypeVar("_Addresses", int, Array)


class Cluster:
    """The state that the blocks of a cluster share: `shape` = (x, y, z) blocks of `lanes` lanes."""

    def __init__(self, shape: tuple[int, int, int], lanes: int) -> None:
        self.shape = shape
        self.size = shape[0] * shape[1] * shape[2]
        self.memories: list[SharedMemory] = []  # by rank
        self.clock = ClusterClock(self.size, lanes)
        self.races: RaceClock | None = None
        self.transfers = Transfers()
        self.relaxed = np.zeros((self.size, lanes), np.bool_)  # the thread's last arrival
        self.exited = np.zeros((self.size, lanes), np.bool_)
        self.touched = np.zeros(self.size, np.int64)  # last stamp of another block on a rank's memory, or -1

    def reset(self) -> None:
        self.clock.reset()
        self.transfers.queue.clear()
        if self.races:
            self.races.reset()
        self.relaxed[:] = False
        self.exited[:] = False
        self.touched[:] = -1
        self.known: dict[int, Array | None] = {}  # by phase: see RaceDetector

    def place(self, rank: int) -> tuple[int, int, int]:
        """%cluster_ctaid of a rank: x fastest."""
        x, y, _ = self.shape
        return rank % x, rank // x % y, rank // (x * y)

    # The barrier. A thread's arrival number n is for the phase n, which ends when all threads that live have arrived.

    def arrive(self, rank: int, threads: Array, relaxed: bool) -> None:
        arrivals = self.clock.arrivals[rank]
        twice = threads & (arrivals > self.clock.waits[rank])
        if any_of(twice):
            lane = int(np.flatnonzero(twice)[0])
            raise Fault("a thread arrives at the cluster's barrier again before it has waited", lane)
        arrivals[threads] += 1
        self.relaxed[rank, threads] = relaxed
        if not relaxed:
            shared = self.memories[rank]
            phase = int(arrivals[threads].max())
            self.known[phase] = shared.release(threads, self.known.get(phase))
            shared.publish(threads)
        else:
            self.memories[rank].barriers.publish(threads, fenced=True)
        self.open()

    def open(self) -> None:
        """End the phase if all threads that live have arrived."""
        if not all_of(self.exited) and all_of((self.clock.arrivals > self.clock.phase) | self.exited):
            relaxed = self.relaxed & (self.clock.arrivals > self.clock.phase)
            self.clock.advance(np.logical_not(relaxed.any(axis=1)))

    def wait(self, rank: int, threads: Array) -> Array:
        """Returns which of `threads` may go on."""
        arrivals, waits = self.clock.arrivals[rank], self.clock.waits[rank]
        idle = threads & (arrivals == waits)
        if any_of(idle):
            lane = int(np.flatnonzero(idle)[0])
            raise Fault("a thread waits at the cluster's barrier and has not arrived there", lane)
        ready = threads & (arrivals <= self.clock.phase)
        waits[ready] = arrivals[ready]
        for phase in np.unique(waits[ready]).tolist():
            some = ready & (waits == phase)
            self.memories[rank].acquire(some, self.known.get(phase))
        return ready

    def exit(self, rank: int, threads: Array) -> None:
        self.exited[rank] |= threads
        if all_of(self.exited[rank]):
            waits = int(self.clock.waits[rank].max())
            if self.touched[rank] >= waits:
                raise Fault("the block exits while another may still use its shared memory: no cluster barrier between")
            self.transfers.check_exit(self.memories[rank])
            self.memories[rank].barriers.check_exit(waits)
        self.open()

    def progress(self) -> int:
        """Returns how many events have happened that threads of other blocks may wait for."""
        return self.clock.phase + sum(memory.barriers.ended for memory in self.memories)

    # Distributed shared memory

    def is_own(self, address: Array) -> Array:
        """Tells which of the addresses are .shared::cta, of the block itself."""
        return address >> _RANK_SHIFT == 0

    def offset(self, address: _Addresses) -> _Addresses:
        """Where .shared::cluster addresses are in their block's memory."""
        return address & (1 << _RANK_SHIFT) - 1

    def map(self, address: Array, rank: Array) -> Array:
        """mapa: the .shared::cluster address of the own address `address` in block `rank`."""
        return (rank.astype(np.int64) + 1 << _RANK_SHIFT) | address.astype(np.int64)

    def reach(self, rank: int, target: int, lanes: Array, barrier: bool) -> SharedMemory:
        """The memory of block `target`, which `lanes` of block `rank` are about to use; `barrier`: just an mbarrier,
        or with one, for which that block waits."""
        if target != rank:
            what = f"use of the shared memory of block {target} of the cluster"
            require(
                self.clock.waits[rank, lanes] > 0, lanes, f"{what} before any cluster barrier: it may not have started"
            )
            if all_of(self.exited[target]):
                raise Fault(f"{what}, which has exited", int(lanes[0]))
            if not barrier:
                self.touched[target] = max(int(self.touched[target]), self.stamp(rank, lanes))
        return self.memories[target]

    def stamp(self, rank: int, lanes: Array) -> int:
        return int(self.clock.arrivals[rank, lanes].max())


class ClusterMemory:
    """The .shared::cluster window as the block of `rank` sees it."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank

    def parts(self, lanes: Array, address: Array, barrier: bool = False) -> list[tuple[Array, SharedMemory, Array]]:
        """The accesses by memory: which they are, the memory, and the addresses there. `barrier`: see Cluster.reach."""
        number = address >> _RANK_SHIFT
        bad = (number < 0) | (number > self.cluster.size)
        if any_of(bad):
            first = int(np.flatnonzero(bad)[0])
            raise Fault(f"out of bounds: {int(address[first]):#x} is no .shared::cluster address", int(lanes[first]))
        parts = list[tuple[Array, SharedMemory, Array]]()
        target = np.where(number == 0, self.rank, number - 1)
        for rank in distinct(target):
            some = np.flatnonzero(target == rank)
            memory = self.cluster.reach(self.rank, rank, lanes[some], barrier)
            parts.append((some, memory, self.cluster.offset(address[some])))
        return parts

    def read(self, lanes: Array, address: Array, size: int) -> Array:
        rows = np.empty((len(lanes), size), np.uint8)
        for some, memory, at in self.parts(lanes, address):
            rows[some] = memory.read(lanes[some], at, size, by=self.rank)
        return rows

    def write(self, lanes: Array, address: Array, rows: Array) -> None:
        for some, memory, at in self.parts(lanes, address):
            memory.write(lanes[some], at, rows[some], by=self.rank)
