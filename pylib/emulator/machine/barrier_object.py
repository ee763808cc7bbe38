"""mbarrier objects: barriers in shared memory that count arrivals and bytes (PTX ISA 9.7.13.15).

A phase ends when the arrivals that it waits for have come and no byte that was announced is outstanding. An arrival
has release semantics and a wait acquires, as at a barrier; what threads know by it is told in the phase they wait for.
"""

from __future__ import annotations

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, Fault, require

SIZE = 8
#: Range of both counts (PTX ISA 9.7.13.15.2).
MAX_COUNT = 2**20 - 1


class MBarrier:
    """The mbarrier at `address`, which lane `owner` has initialised; `number` differs from that of any other."""

    def __init__(self, number: int, address: int, count: int, owner: int, lanes: int) -> None:
        self.number, self.address, self.count, self.owner = number, address, count, owner
        self.phase, self.pending, self.bytes = 0, count, 0
        self.fenced = False  # may take part in bulk copies
        self.published = False  # others may use it
        self.observed = np.zeros(lanes, np.int64)  # the phases that each lane has waited for
        self.copied = 0  # up to which phase copies have counted,
        self.remote = 0  # and up to which other blocks have arrived
        self.stamp = -1  # how often the last one's thread had arrived at the cluster's barrier: see Cluster
        self.arriving: Array | None = None  # what those know who have arrived in this phase: see RaceDetector
        self.known: Array | None = None  # of the phases before

    @property
    def serial(self) -> int:
        """A number of the phase, different from that of any other phase of any mbarrier."""
        return self.number << 32 | self.phase

    def arrive(self, count: int) -> None:
        if count > self.pending:
            raise Fault(f"{count} arrivals at {self.state()}: more than it waits for")
        self.pending -= count
        self._advance()

    def expect(self, count: int) -> None:
        self._count_bytes(count)

    def complete(self, count: int) -> None:
        """`count` bytes have come."""
        self._count_bytes(-count)
        self._advance()

    def _count_bytes(self, change: int) -> None:
        self.bytes += change
        if abs(self.bytes) > MAX_COUNT:
            raise Fault(f"the tx-count leaves its range of {MAX_COUNT} bytes at {self.state()}")

    def tell(self, known: Array | None) -> None:
        """Add to what the waiting threads get to know."""
        if known is not None:
            self.arriving = known if self.arriving is None else np.maximum(self.arriving, known)

    def _advance(self) -> None:
        if self.pending or self.bytes:
            return
        self.phase += 1
        self.pending = self.count
        if self.arriving is not None:
            self.known = self.arriving if self.known is None else np.maximum(self.known, self.arriving)
            self.arriving = None

    def state(self) -> str:
        text = f"the mbarrier at {self.address} (phase {self.phase}: {self.pending} of {self.count} arrivals missing"
        if self.bytes > 0:
            text += f", {self.bytes} bytes expected and not copied"
        if self.bytes < 0:
            text += f", {-self.bytes} bytes more copied than expected"
        return text + ")"


class MBarriers:
    """The mbarriers in the shared memory of a block."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes  # of the block
        self.made = 0
        self.reset()

    def reset(self) -> None:
        self.at: dict[int, MBarrier] = {}

    @property
    def ended(self) -> int:
        """How many phases have ended."""
        return sum(barrier.phase for barrier in self.at.values())

    def init(self, address: int, count: int, owner: int) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise Fault(f"an mbarrier waits for 1 to {MAX_COUNT} arrivals, not {count}", owner)
        self.made += 1
        self.at[address] = MBarrier(self.made, address, count, owner, self.lanes)

    def find(self, address: int, lanes: Array, own: bool = True) -> MBarrier:
        """The mbarrier at `address`, for `lanes` of this block (`own`) or of another one."""
        barrier = self.at.get(address)
        if barrier is None:
            made = ", ".join(map(str, self.at)) or "none"
            raise Fault(f"no mbarrier is initialised at {address} (initialised: {made})", int(lanes[0]))
        if not barrier.published:
            what = f"use of the mbarrier at {address}, which thread {barrier.owner} has initialised"
            require((lanes == barrier.owner) & own, lanes, f"{what}, without a barrier since")
        return barrier

    def fence(self) -> None:
        for barrier in self.at.values():
            barrier.fenced = True

    def publish(self, members: Array | None, fenced: bool = False) -> None:
        """A barrier: what `members` (a mask; None: all) have initialised may be used; `fenced`: after a fence only."""
        for barrier in self.at.values():
            if (members is None or members[barrier.owner]) and (barrier.fenced or not fenced):
                barrier.published = True

    def check_exit(self, cluster_waits: int) -> None:
        """Raise a Fault if the block exits and has not waited for what others do to an mbarrier. `cluster_waits`: how
        often it has waited at the cluster's barrier, which will do for arrivals."""
        for barrier in self.at.values():
            waited = barrier.observed.max()
            if barrier.copied > waited:
                raise Fault(f"the block exits and has not waited for a copy that counts at {barrier.state()}")
            if barrier.remote > waited and barrier.stamp >= cluster_waits:
                raise Fault(f"the block exits and has not waited for an arrival of another block at {barrier.state()}")
