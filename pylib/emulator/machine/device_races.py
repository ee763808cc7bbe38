"""Finds blocks that touch the same byte of device memory, one of them writing, with no order between them.

Clusters run one after the other here, and side by side on a GPU. Only atomics order them: one with .release tells what
its cluster has done and knows, and one with .acquire on the same address learns it (`last_arrival` and
`others_arrived` in tile programs). The time of a cluster is cut into epochs, a new one after each release, numbered for
the whole launch; every byte has the epochs of its last write, and of the first and the last read since.

Accesses of one cluster are not compared with each other, and of several readers the middle ones are forgotten: what is
reported is a race, but not every race is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, Fault, any_of

Index = tuple[int, int, int]


class DeviceRaces:
    """The accesses of a launch to device memory, which has `size` bytes. `begin` comes before each cluster.

    name   says what a byte is called, by its offset
    """

    def __init__(self, size: int, name: Callable[[int], str]) -> None:
        self._name = name
        self._wrote, self._first, self._last = (np.zeros(size, np.int32) for _ in range(3))
        self._atomic = np.zeros(size, np.bool_)  # whether the last write was
        self._clusters = [-1]  # by epoch
        self._blocks: list[Index] = []  # the first one of each cluster
        self._told: dict[int, dict[int, int]] = {}  # by address: the last epoch of each cluster that is known there

    def begin(self, blocks: Sequence[Index]) -> None:
        """The blocks of a cluster run from now on. Each knows what was done before the launch."""
        self._blocks.append(blocks[0])
        self._known: dict[int, int] = {}
        self._started = len(self._clusters)
        self._advance()

    def _advance(self) -> None:
        self._now = len(self._clusters)
        self._clusters.append(len(self._blocks) - 1)

    def read(self, lanes: Array, byte: Array) -> None:
        """Each lane reads a row of bytes, given by their offsets. Raises Fault where another cluster wrote one."""
        self._check(lanes, byte, self._wrote[byte], "reads", "wrote")
        self._first[byte] = np.where(self._first[byte] == 0, self._now, self._first[byte])
        self._last[byte] = self._now

    def write(self, lanes: Array, byte: Array, atomic: bool = False) -> None:
        """Each lane writes a row of bytes. Atomics do not race with each other."""
        wrote = self._wrote[byte]
        self._check(lanes, byte, np.where(self._atomic[byte], 0, wrote) if atomic else wrote, "writes", "wrote")
        for read in (self._first, self._last):
            self._check(lanes, byte, read[byte], "writes", "read")
            read[byte] = 0
        self._wrote[byte], self._atomic[byte] = self._now, atomic

    def order(self, byte: Array, acquire: bool, release: bool) -> None:
        """The cluster has executed atomics at the addresses of these bytes."""
        for address in np.unique(byte).tolist() if acquire or release else ():
            if acquire:
                _learn(self._known, self._told.get(address, {}))
            if release:
                _learn(self._told.setdefault(address, {}), {**self._known, self._clusters[self._now]: self._now})
        if release:
            self._advance()

    def _check(self, lanes: Array, byte: Array, epochs: Array, verb: str, did: str) -> None:
        """Raises Fault for an epoch of another cluster that this one does not know of."""
        others = (epochs > 0) & (epochs < self._started)
        for epoch in np.unique(epochs[others]).tolist() if any_of(others) else ():
            cluster = self._clusters[epoch]
            if epoch > self._known.get(cluster, 0):
                row, column = (int(i[0]) for i in np.nonzero(epochs == epoch))
                place, block = self._name(int(byte[row, column])), self._blocks[cluster]
                why = f"{verb} {place} that block {block} {did}, with nothing that orders the blocks between"
                raise Fault(f"race: {why}", int(lanes[row]))


def _learn(known: dict[int, int], more: dict[int, int]) -> None:
    for cluster, epoch in more.items():
        known[cluster] = max(known.get(cluster, 0), epoch)
