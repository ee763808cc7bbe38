"""The shared memory of a block, which knows of every byte whether it may be read (see memory.py for accesses)."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lowbit.pylib.emulator.machine.async_proxy import AsyncProxy
from lowbit.pylib.emulator.machine.barrier_object import SIZE, MBarrier, MBarriers
from lowbit.pylib.emulator.machine.faults import (
    Array,
    Fault,
    all_of,
    any_of,
    any_outside,
    distinct,
    require,
    require_multiple,
)
from lowbit.pylib.emulator.machine.landings import Landings
from lowbit.pylib.emulator.machine.races import WARPGROUP, ClusterRaceDetector, RaceDetector, bytes_of

#: Shared memory starts above 0, so that a forgotten base address is found out (sm_90 also reserves the first
#: KiB).
SHARED_BASE = 1024

#: What a byte of shared memory is: READABLE after a store; IN_FLIGHT while a copy may still write it; LANDED
#: once the thread that issued a cp.async has waited for it, or the mbarrier of a bulk copy has counted it, and no
#: barrier has shown it to the others yet; BARRIER if it is part of an mbarrier. Up to LANDED it may be written.
READABLE, EMPTY, LANDED, IN_FLIGHT, OUTSIDE, BARRIER = range(6)
#: In place of the thread that issued a cp.async: a bulk copy.
BULK = -1


class Watch(Protocol):
    """Hears of what happens in a shared memory; offsets are from its beginning."""

    def access(self, lanes: Array, offset: Array, size: int) -> None: ...

    def touch(self, offset: Array, size: int) -> None: ...

    def begin_copy(self, row: Array, size: int) -> None: ...

    def land_copy(self, row: Array, size: int) -> None: ...


class SharedMemory:
    """The shared memory of one block, from `SHARED_BASE` on; knows of every byte whether it may be read."""

    def __init__(self, lanes: int, rank: int = 0) -> None:
        self.end = SHARED_BASE
        self.spans: list[tuple[int, int]] = []
        self.rank = rank  # of the block in its cluster
        self.races: RaceDetector | None = None
        self.cluster_races: ClusterRaceDetector | None = None
        self.proxy: AsyncProxy | None = None  # if there are wgmma or bulk copies
        self.barriers = MBarriers(lanes)
        self.watch: Watch | None = None

    def add(self, size: int, align: int) -> int:
        start = -(-self.end // align) * align
        self.end = start + size
        self.spans.append((start - SHARED_BASE, self.end - SHARED_BASE))
        return start

    def allocate(self) -> None:
        size = -(-(self.end - SHARED_BASE) // 16) * 16
        self.data = np.zeros(size, np.uint8)
        self.state = np.zeros(size, np.uint8)
        self.copier = np.zeros(size, np.int32)
        self.reset()

    def reset(self) -> None:
        self.state[:] = OUTSIDE
        for start, end in self.spans:
            self.state[start:end] = EMPTY
        self._landed = False
        self.barriers.reset()
        self.landings = Landings(len(self.data))
        for tracker in (self.races, self.cluster_races, self.proxy):
            if tracker:
                tracker.reset(len(self.data))

    def locate(self, lanes: Array, address: Array, size: int) -> Array:
        """Row numbers in `data.reshape(-1, size)`."""
        offset = address - SHARED_BASE
        if not len(offset):
            return offset
        require_multiple(offset, size, lanes)
        if any_outside(offset, len(self.data) - size):
            first = int(np.flatnonzero((offset < 0) | (offset + size > len(self.data)))[0])
            raise Fault(
                f"out of bounds: {size} bytes at {int(address[first])} = offset {int(offset[first])} "
                f"of {self.end - SHARED_BASE} bytes of shared memory",
                int(lanes[first]),
            )
        return offset // size

    def read(self, lanes: Array, address: Array, size: int, atomic: bool = False, by: int | None = None) -> Array:
        """`by`: the rank of the block whose `lanes` read; by default this one."""
        by = self.rank if by is None else by
        row = self.locate(lanes, address, size)
        self._tell(lanes, row, size, by)
        state = self.state.reshape(-1, size)[row]
        if any_of(state):  # not READABLE
            self._refuse_read(lanes, row, size, state, by == self.rank, lanes[:, None] if by == self.rank else None)
        if self.races and by == self.rank and not atomic:
            self.races.read(lanes, row, size)
        if self.cluster_races and not atomic:
            self.cluster_races.read(by, lanes, row, size)
        return self.data.reshape(-1, size)[row]

    def _refuse_read(self, lanes: Array, row: Array, size: int, state: Array, own: bool, waiters: Array | None) -> None:
        """Raise a Fault unless `lanes` have copied what they read (`own`), or the `waiters` [lanes or 1, several] of
        this block have waited for the bulk copies of it."""
        require(state != OUTSIDE, lanes, "read outside every shared variable")
        require(state != BARRIER, lanes, "read of an mbarrier; after mbarrier.inval its bytes are free")
        require(state != EMPTY, lanes, "read of shared memory that was never written")
        copier = self.copier.reshape(-1, size)[row]
        bulk = (copier == BULK) & (state != READABLE)
        flying = (state == IN_FLIGHT) & ~bulk
        require(~flying, lanes, "read of the target of a cp.async that its thread has not waited for")
        require(
            (state != LANDED) | bulk | (copier == lanes[:, None]) & own,
            lanes,
            "read of another thread's cp.async without a barrier after its wait",
        )
        if any_of(bulk):
            arrived = state == LANDED
            if waiters is None:
                arrived[:] = False
            else:
                arrived &= self.landings.shown(bytes_of(row, size), waiters)
            require(~bulk | arrived, lanes, "read of the target of a bulk copy before a wait for the mbarrier's phase")

    def _are_shown(self, row: Array, size: int, state: Array, waiters: Array) -> bool:
        """Tells whether all that is read is from bulk copies that the `waiters` have waited for, as most of what wgmma
        reads: of all that `_refuse_read` looks for, nothing can be wrong then."""
        return (
            all_of(state == LANDED)
            and all_of(self.copier.reshape(-1, size)[row] == BULK)
            and all_of(self.landings.shown(bytes_of(row, size), waiters))
        )

    def write(self, lanes: Array, address: Array, rows: Array, atomic: bool = False, by: int | None = None) -> None:
        """`by`: the rank of the block whose `lanes` write; by default this one."""
        size = rows.shape[1]
        row = self.locate(lanes, address, size)
        by = self.rank if by is None else by
        self._tell(lanes, row, size, by)
        self._check_write(lanes, row, size, atomic, by)
        self.data.reshape(-1, size)[row] = rows
        self.state.reshape(-1, size)[row] = READABLE
        if self.proxy:
            self.proxy.write(lanes, row, size, by == self.rank)

    def _tell(self, lanes: Array, row: Array, size: int, by: int) -> None:
        """Tells who watches of an access by this block's threads."""
        if self.watch and by == self.rank and len(lanes):
            self.watch.access(lanes, row * size, size)

    def _check_write(self, lanes: Array, row: Array, size: int, atomic: bool, by: int) -> None:
        state = self.state.reshape(-1, size)[row]
        if len(lanes) and state.max() > LANDED:
            require(state != OUTSIDE, lanes, "write outside every shared variable")
            require(state != BARRIER, lanes, "write to an mbarrier; after mbarrier.inval its bytes are free")
            require(state != IN_FLIGHT, lanes, "write to the target of a copy that is still in flight")
        if self.proxy:
            self.proxy.check_write(lanes, row, size)
        self._note_write(lanes, row, size, atomic, by)

    def _note_write(self, lanes: Array, row: Array, size: int, atomic: bool, by: int) -> None:
        if self.races and by == self.rank:
            self.races.write(lanes, row, size, atomic)
        if self.cluster_races:
            self.cluster_races.write(by, lanes, row, size)

    # cp.async: begin at issue, land when the issuing thread waits, publish at a barrier.

    def begin_copy(self, lanes: Array, address: Array, size: int) -> Array:
        row = self.locate(lanes, address, size)
        self._check_write(lanes, row, size, False, self.rank)
        self.state.reshape(-1, size)[row] = IN_FLIGHT
        copier = self.copier.reshape(-1, size)
        copier[row] = lanes[:, None]
        require(copier[row, 0] == lanes, lanes, "cp.async to the same bytes as another thread's")
        if self.watch and len(lanes):
            self.watch.access(lanes, row * size, size)
            self.watch.begin_copy(row, size)
        return row

    def land_copy(self, lanes: Array, row: Array, rows: Array, barrier: MBarrier | None = None) -> None:
        """`barrier`: not to the thread that issued it, but to those that wait for this mbarrier, which tracks it."""
        size = rows.shape[1]
        if self.watch:
            self.watch.land_copy(row, size)
        if barrier is None:
            self.note_copy(lanes, row, size)
        self.data.reshape(-1, size)[row] = rows
        self.state.reshape(-1, size)[row] = LANDED
        self._landed = True
        if self.proxy:
            self.proxy.write(lanes, row, size, barrier is None)
        if barrier:
            self._land(row, size, barrier)

    def note_copy(self, lanes: Array, row: Array, size: int) -> None:
        self._note_write(lanes, row, size, False, self.rank)

    # Bulk copies: begin at issue, land when they count at their mbarrier, published at a barrier after its wait.

    def begin_transfer(self, by: int, lanes: Array, address: Array, size: int) -> tuple[Array, int]:
        """A copy of rows of `size` bytes to `address`, which `lanes` of the block of rank `by` issue: the rows'
        numbers, and the time for `land_transfer`."""
        row = self.locate(lanes, address, size)
        state = self.state.reshape(-1, size)[row]
        require(state != OUTSIDE, lanes, "a bulk copy writes outside every shared variable")
        require(state != BARRIER, lanes, "a bulk copy overwrites an mbarrier")
        require(state != IN_FLIGHT, lanes, "a bulk copy to the target of a copy that is still in flight")
        if self.proxy:
            self.proxy.check_write(lanes, row, size)
            self.proxy.begin_write(lanes, row, size)
        time = 0
        if self.races:
            for lane in distinct(lanes):
                time = self.races.begin_transfer(by, lane, row[lanes == lane], size)
        self.state.reshape(-1, size)[row] = IN_FLIGHT
        self.copier.reshape(-1, size)[row] = BULK
        if self.watch:
            self.watch.begin_copy(row, size)
        return row, time

    def land_transfer(self, row: Array, rows: Array, barrier: MBarrier, time: int) -> None:
        """The copy is there: its mbarrier counts it."""
        size = rows.shape[1]
        if self.watch:
            self.watch.land_copy(row, size)
        self.data.reshape(-1, size)[row] = rows
        self._land(row, size, barrier)
        if self.races:
            barrier.tell(self.races.transferred(time))
        barrier.complete(rows.size)

    def _land(self, row: Array, size: int, barrier: MBarrier) -> None:
        self.state.reshape(-1, size)[row] = LANDED
        self.copier.reshape(-1, size)[row] = BULK
        self.landings.land(bytes_of(row, size).ravel(), barrier)

    # wgmma: begin at issue, end when the warpgroup (that starts at lane `first`) waits. Rows of 16 bytes.

    def begin_async_read(self, first: int, address: Array) -> tuple[Array, Array, Array]:
        """The rows' numbers, for `end_async_read`, their bytes, and which of them were never written."""
        lanes = np.full(len(address), first)
        row = self.locate(lanes, address, 16)
        state = self.state.reshape(-1, 16)[row]
        empty = state == EMPTY
        warpgroup = np.arange(first, first + WARPGROUP)[None]
        if any_of(state) and not self._are_shown(row, 16, state, warpgroup) and any_of(state[~empty]):
            self._refuse_read(lanes, row, 16, np.where(empty, READABLE, state), False, warpgroup)
        if self.races:
            self.races.begin_async_read(first, row, 16)
        if self.cluster_races:
            self.cluster_races.read(self.rank, lanes, row, 16)
        if self.proxy:
            self.proxy.begin_read(lanes, row)
        if self.watch:
            self.watch.touch(row * 16, 16)
        return row, self.data.reshape(-1, 16)[row], empty.any(axis=1)

    def end_async_read(self, first: int, row: Array) -> None:
        if self.races:
            self.races.end_async_read(first, row, 16)
        if self.proxy:
            self.proxy.end_read(row)

    def fence_proxy(self, lanes: Array) -> None:
        """fence.proxy.async."""
        if self.proxy:
            self.proxy.fence(lanes)

    # mbarriers

    def init_barrier(self, lane: int, address: int, count: int) -> None:
        lanes = np.array([lane])
        row = self.locate(lanes, np.array([address]), SIZE)
        self._check_write(lanes, row, SIZE, False, self.rank)
        self.state.reshape(-1, SIZE)[row] = BARRIER
        self.barriers.init(address, count, lane)

    def end_barrier(self, lane: int, address: int) -> None:
        self.barriers.find(address, np.array([lane]))
        del self.barriers.at[address]
        self.state[address - SHARED_BASE : address - SHARED_BASE + SIZE] = EMPTY

    def observe(self, barrier: MBarrier, lanes: Array, ordered: bool) -> None:
        """`lanes` have waited for the phase of `barrier` that has ended last."""
        barrier.observed[lanes] = barrier.phase
        if ordered:
            members = np.zeros(len(barrier.observed), np.bool_)
            members[lanes] = True
            self.acquire(members, barrier.known)

    # Barriers: what arriving threads did is told to waiting ones.

    def release(self, members: Array, known: Array | None) -> Array | None:
        """`members` (a mask) come to a barrier; gives what it knows, to be handed on to `acquire`."""
        return self.races.release(members, known) if self.races else None

    def acquire(self, members: Array, known: Array | None) -> None:
        if self.races and known is not None:
            self.races.acquire(members, known)

    def publish(self, members: Array, initialised: bool = True) -> None:
        """Copies that `members` have waited for become readable for all. `initialised`: their mbarriers, too."""
        if self._landed:
            landed = np.flatnonzero((self.state == LANDED) & (self.copier != BULK))
            waited = members[self.copier[landed]]
            self.state[landed[waited]] = READABLE
            self._landed = not all_of(waited)
        self._publish_all(members, initialised)

    def synchronize(self) -> None:
        """A barrier of the whole block."""
        if self._landed:
            self.state[(self.state == LANDED) & (self.copier != BULK)] = READABLE
            self._landed = False
        if self.races:
            self.races.synchronize()
        self._publish_all(None, True)

    def _publish_all(self, members: Array | None, initialised: bool) -> None:
        if self.proxy:
            self.proxy.publish(members)
        if initialised:
            self.barriers.publish(members)
        shown = self.landings.publish(members)
        if shown is not None:
            self.state[shown[self.state[shown] == LANDED]] = READABLE
