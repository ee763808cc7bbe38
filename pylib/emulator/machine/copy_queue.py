"""The cp.async copies of a block between issue and wait (PTX ISA 9.7.9.25.3).

The source is read at issue; the target stays "in flight" until the issuing thread has waited for the group,
and then belongs to that thread until a barrier (memory.py). A copy that is never waited for never arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lowbit.pylib.emulator.machine.barrier_object import MBarrier
from lowbit.pylib.emulator.machine.faults import Array, any_of
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory


@dataclass
class _Copy:
    lanes: Array
    row: Array
    data: Array
    group: Array  # number of the commit group, counted per thread
    number: int  # in the order of issue
    noted: Array  # by `track`

    def of(self, some: Array) -> _Copy:
        """Returns the copies of some lanes."""
        lanes, row, data, group = self.lanes[some], self.row[some], self.data[some], self.group[some]
        return _Copy(lanes, row, data, group, self.number, self.noted[some])


class CopyQueue:
    """The copies of a block that are not waited for yet."""

    def __init__(self, lanes: int, shared: SharedMemory) -> None:
        self.shared = shared
        self.copies: list[_Copy] = []
        self.issued = 0
        self.committed = np.zeros(lanes, np.int64)  # groups per thread

    def reset(self) -> None:
        self.copies.clear()
        self.committed[:] = 0

    def issue(self, lanes: Array, row: Array, data: Array) -> None:
        noted = np.zeros(len(lanes), bool)
        self.copies.append(_Copy(lanes, row, data, self.committed[lanes], self.issued, noted))
        self.issued += 1

    def commit(self, lanes: Array) -> None:
        self.committed[lanes] += 1

    def wait(self, lanes: Array, pending: int) -> None:
        """Finish all but the latest `pending` groups of each of `lanes`; uncommitted copies stay."""
        waits = np.full(len(self.committed), -1, np.int64)
        waits[lanes] = self.committed[lanes] - pending
        self._finish(lambda copy: copy.group < waits[copy.lanes], self.shared.land_copy)

    def track(self, lanes: Array) -> None:
        """An mbarrier is to tell of what `lanes` have issued: of that alone, not of what they do until it arrives. So
        for races it counts as written now."""
        for copy in self.copies:
            mine = np.isin(copy.lanes, lanes) & ~copy.noted
            if any_of(mine):
                self.shared.note_copy(copy.lanes[mine], copy.row[mine], copy.data.shape[1])
                copy.noted |= mine

    def arrive(self, lanes: Array, before: int, barrier: MBarrier) -> None:
        """Finish the copies of `lanes` that were issued `before`: who waits for `barrier` may read them."""
        self._finish(
            lambda copy: np.isin(copy.lanes, lanes) & (copy.number < before),
            lambda lanes, row, data: self.shared.land_copy(lanes, row, data, barrier),
        )

    def _finish(self, ended: Callable[[_Copy], Array], land: Callable[[Array, Array, Array], None]) -> None:
        """Finish the copies of those lanes for which they have `ended`."""
        left = list[_Copy]()
        for copy in self.copies:
            done = ended(copy)
            if any_of(done):
                land(copy.lanes[done], copy.row[done], copy.data[done])
            rest = ~done
            if any_of(rest):
                left.append(copy.of(rest))
        self.copies = left
