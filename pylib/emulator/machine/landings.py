"""Which bytes of shared memory a bulk copy has brought, and who may read them: threads that have waited for the phase
of its mbarrier, and after a barrier with one of these all others (PTX ISA 9.7.9.25.4)."""

from __future__ import annotations

import numpy as np

from lowbit.pylib.emulator.machine.barrier_object import MBarrier
from lowbit.pylib.emulator.machine.faults import Array, any_of, distinct


class Landings:
    """Per byte the phase whose end shows it, as long as it is not shown to all."""

    def __init__(self, size: int) -> None:
        self.serial = np.zeros(size, np.int64)  # of the phase, or 0
        self.barriers: dict[int, MBarrier] = {}  # by number
        self.bytes: dict[int, list[Array]] = {}  # by serial

    def land(self, byte: Array, barrier: MBarrier) -> None:
        self.serial[byte] = barrier.serial
        self.barriers[barrier.number] = barrier
        self.bytes.setdefault(barrier.serial, []).append(byte)

    def shown(self, byte: Array, lanes: Array) -> Array:
        """Tells whether all of `lanes` [n or 1, several] have waited for the bulk copies of the `byte` [n, size]."""
        shown = np.zeros(byte.shape, np.bool_)
        serials = self.serial[byte]
        for serial in filter(None, distinct(serials.ravel())):
            here = serials == serial
            shown |= here & self._waited(serial)[lanes].all(axis=1, keepdims=True)
        return shown

    def _waited(self, serial: int) -> Array:
        return np.greater(self.barriers[serial >> 32].observed, serial & 2**32 - 1)

    def publish(self, members: Array | None) -> Array | None:
        """The bytes that `members` (a mask; None: all) have waited for, and show to all by a barrier."""
        found = list[Array]()
        for serial in list(self.bytes):
            waited = self._waited(serial)
            if any_of(waited if members is None else waited & members):
                found += [byte[self.serial[byte] == serial] for byte in self.bytes.pop(serial)]
        return np.concatenate(found) if found else None
