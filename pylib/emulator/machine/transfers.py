"""Transfers into shared memory whose end an mbarrier counts: bulk copies, st.async and the arrivals that follow a
thread's cp.async (PTX ISA 9.7.9.25).

The source is read at issue. A transfer ends as late as can be, when no thread of the cluster can go on without it, so
that whoever does not wait for it is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lowbit.pylib.emulator.machine.barrier_object import MBarrier
from lowbit.pylib.emulator.machine.faults import Fault
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory


@dataclass
class Transfer:
    """It ends by `finish`, called with the mbarrier at `address` of `memory`."""

    memory: SharedMemory
    address: int
    finish: Callable[[MBarrier], None]
    report: Callable[[str], Exception]  # names the instruction and its thread

    def land(self) -> None:
        barrier = self.memory.barriers.at.get(self.address)
        try:
            if barrier is None:
                raise Fault(f"the mbarrier at {self.address} has been invalidated before the copy counted there")
            barrier.copied = barrier.phase + 1
            self.finish(barrier)
        except Fault as fault:
            raise self.report(fault.message) from None


class Transfers:
    """The transfers of a cluster, in the order of issue."""

    def __init__(self) -> None:
        self.queue: deque[Transfer] = deque()

    def land(self) -> bool:
        """End the oldest; False if there is none."""
        if not self.queue:
            return False
        self.queue.popleft().land()
        return True

    def check_exit(self, memory: SharedMemory) -> None:
        """Raise a Fault if the block of `memory` exits too early."""
        for transfer in self.queue:
            if transfer.memory is memory:
                raise Fault(
                    f"the block exits while a copy into its shared memory is in flight, which nobody has waited for at "
                    f"the mbarrier at {transfer.address}"
                )
