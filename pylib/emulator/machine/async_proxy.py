"""Finds missing fences between stores to shared memory and the async proxy, through which wgmma reads it and bulk
copies write it (PTX ISA 8.5, 9.7.15.4).

Ordinary stores and cp.async write through the generic proxy. Before a wgmma reads such bytes, or a bulk copy overwrites
them, a fence.proxy.async has to come between: by the thread that wrote them, or by another one after a barrier with it.
While a wgmma is in flight, nobody may write what it reads.
"""

from __future__ import annotations

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, require

_ANYONE = -1
_ROW = 16  # bytes that a wgmma reads together; no write crosses their borders


class AsyncProxy:
    """Per byte: whether a write is not fenced yet, whose fence it needs, and whether it is that of the one who wrote it
    alone. Per row of 16: how many wgmma in flight read it."""

    def reset(self, size: int) -> None:
        self.unfenced = np.zeros(size, np.bool_)
        self.writer = np.zeros(size, np.int32)
        self.unshown = np.zeros(size, np.bool_)
        self.readers = np.zeros(size // _ROW, np.int32)

    def check_write(self, lanes: Array, row: Array, size: int) -> None:
        free = self.readers[row * size // _ROW] == 0
        require(free, lanes, "write to shared memory that a wgmma in flight reads: wgmma.wait_group comes first")

    def write(self, lanes: Array, row: Array, size: int, own: bool) -> None:
        """`own`: by threads of this block; the writes of others need a fence here."""
        self.unfenced.reshape(-1, size)[row] = True
        self.writer.reshape(-1, size)[row] = lanes[:, None] if own else _ANYONE
        self.unshown.reshape(-1, size)[row] = own

    def fence(self, lanes: Array) -> None:
        self.unfenced &= (self.writer != _ANYONE) & ~np.isin(self.writer, lanes)

    def publish(self, members: Array | None) -> None:
        """A barrier shows others what `members` (a mask; None: all) have written; their fence will do from now on."""
        written = np.flatnonzero(self.unshown)
        if members is not None:
            written = written[members[self.writer[written]]]
        self.writer[written] = _ANYONE
        self.unshown[written] = False

    def begin_read(self, lanes: Array, row: Array) -> None:
        self._check_fenced(lanes, row, _ROW, "wgmma reads shared memory that")
        np.add.at(self.readers, row, 1)

    def begin_write(self, lanes: Array, row: Array, size: int) -> None:
        self._check_fenced(lanes, row, size, "a bulk copy overwrites what")

    def _check_fenced(self, lanes: Array, row: Array, size: int, what: str) -> None:
        fenced = ~self.unfenced.reshape(-1, size)[row]
        require(fenced, lanes, f"{what} was written without a fence.proxy.async since")

    def end_read(self, row: Array) -> None:
        np.subtract.at(self.readers, row, 1)
