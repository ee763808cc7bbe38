"""The memories of a kernel: device memory made of separate arrays, and the local memory of a block's threads.

All accesses are bulk: `lanes[i]` reads or writes `size` bytes at `address[i]` (int64), as a row of uint8. Every
access is checked for alignment and bounds. Device arrays lie gigabytes apart, so that an index that leaves
its array hits nothing, and above 4 GiB, so that a truncated pointer is found out too.

A load whose first byte is inside may end beyond its array: that much lies in the same 16 bytes, which hardware loads as
one, and LLVM makes such loads of several shorter ones. What is beyond are ones, NaN in every type of floats, so a
kernel that uses them shows it.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from lowbit.pylib.emulator.machine.device_races import DeviceRaces
from lowbit.pylib.emulator.machine.faults import Array, Fault, all_of, any_outside, require, require_multiple
from lowbit.pylib.runtime.tensor_map import TensorMap

#: First device address, distance of the arrays, and their alignment: 256 bytes, which cudaMalloc promises,
#: and no more.
GLOBAL_BASE, GLOBAL_STRIDE, GLOBAL_ALIGN = 0x7000_0000_0000, 1 << 33, 256
#: Where generic addresses see the shared, constant and local memories, and the kernel's parameters.
SHARED_WINDOW, CONST_WINDOW, LOCAL_WINDOW = 0x6000_0000_0000, 0x6100_0000_0000, 0x6200_0000_0000
PARAM_WINDOW = 0x6300_0000_0000


class DeviceMemory:
    """Arrays at simulated addresses; the host's arrays are copied in, and back by `copy_back` if written."""

    def __init__(self, base: int = GLOBAL_BASE, stride: int = GLOBAL_STRIDE, racecheck: bool = False) -> None:
        self.base, self.stride = base, stride
        self.racecheck = racecheck
        self.races: DeviceRaces | None = None
        self.tensors: list[tuple[TensorMap, int]] = []  # with the addresses of their arrays
        self.names: list[str] = []
        self.hosts: list[Array | None] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.offsets: list[int] = []  # of the array in `data`
        self.stored: list[bool] = []
        self.data = np.zeros(0, np.uint8)
        self.bytes_loaded = self.bytes_stored = 0
        self.seen: Array | None = None  # bytes of `data` that were read, for those who watch
        self._size = 0

    def add(self, name: str, size: int, host: Array | None = None) -> int:
        """Make room for an array; its address. Arrays with a `host` take its contents at `allocate`."""
        start = self.base + len(self.starts) * self.stride + GLOBAL_ALIGN
        self.names.append(name)
        self.hosts.append(host)
        self.starts.append(start)
        self.ends.append(start + size)
        self.offsets.append(self._size)
        self.stored.append(False)
        self._size += -(-size // GLOBAL_ALIGN) * GLOBAL_ALIGN
        return start

    def allocate(self) -> None:
        self.data = np.zeros(self._size, np.uint8)
        sizes = [end - start for start, end in zip(self.starts, self.ends)]
        for size, offset, following in zip(sizes, self.offsets, [*self.offsets[1:], self._size]):
            self.data[offset + size : following] = 0xFF
        self.written = np.zeros(self._size, np.bool_)  # by this launch
        self.races = DeviceRaces(self._size, self._name_of) if self.racecheck else None
        for host, offset in zip(self.hosts, self.offsets):
            if host is not None:
                flat = host.reshape(-1).view(np.uint8)
                self.data[offset : offset + flat.size] = flat
        self._starts = np.array(self.starts, np.int64)
        self._ends = np.array(self.ends, np.int64)
        self._shift = np.array(self.starts, np.int64) - np.array(self.offsets, np.int64)

    def _name_of(self, offset: int) -> str:
        """Returns the name of a byte of `data`, for messages."""
        number = bisect_right(self.offsets, offset) - 1
        return f"byte {offset - self.offsets[number]} of `{self.names[number]}`"

    def note_read(self, lanes: Array, byte: Array) -> None:
        """Each of `lanes` reads a row of bytes, given by their offsets in `data`."""
        if self.races:
            self.races.read(lanes, byte)
        if self.seen is not None:
            self.seen[byte] = True

    def watch(self) -> None:
        """Notes from now on which bytes are read."""
        self.seen = np.zeros(self._size, np.bool_)

    def bytes_seen(self) -> dict[str, int]:
        """Returns how many bytes of each array were read since `watch`, each counted once."""
        ends = [*self.offsets[1:], self._size]
        seen = np.zeros(0, np.bool_) if self.seen is None else self.seen
        return {name: int(seen[start:end].sum()) for name, start, end in zip(self.names, self.offsets, ends)}

    def copy_back(self) -> None:
        for host, offset, stored in zip(self.hosts, self.offsets, self.stored):
            if host is not None and stored:
                flat = host.reshape(-1).view(np.uint8)
                flat[:] = self.data[offset : offset + flat.size]

    def locate(
        self, lanes: Array, address: Array, size: int, align: int | None = None, inside: int | None = None
    ) -> tuple[Array, list[int]]:
        """Offsets into `data` of accesses that lie in one array each, and the arrays' numbers. inside: how many of
        their bytes have to, at least; None: all."""
        reach = inside or size
        if not len(address):
            return address, []
        align = align or size
        require_multiple(address, align, lanes)
        first = int(address[0])
        number = bisect_right(self.starts, first) - 1  # mostly that of all
        if number >= 0:
            within = address - self.starts[number]
            if not any_outside(within, self.ends[number] - self.starts[number] - reach):
                return within + self.offsets[number], [number]
        if not self.starts:
            raise Fault(self.describe(first, size), int(lanes[0]))
        index = np.searchsorted(self._starts, address, "right") - 1
        found = (index >= 0) & (address + reach <= self._ends[index])
        if not all_of(found):
            first = int(np.flatnonzero(~found)[0])
            raise Fault(self.describe(int(address[first]), size), int(lanes[first]))
        return address - self._shift[index], np.unique(index).tolist()

    def describe(self, address: int, size: int) -> str:
        if not self.starts:
            return f"out of bounds: {size} bytes at {address:#x}, and there are no arrays"
        ends = zip(self.starts, self.ends)
        distance, number = min((max(start - address, address + size - end), i) for i, (start, end) in enumerate(ends))
        text = f"out of bounds: {size} bytes at {address:#x}"
        if distance > self.stride // 2:
            return text
        start, end = self.starts[number], self.ends[number]
        return f"{text} = byte {address - start} of `{self.names[number]}`, which has {end - start} bytes"

    def read(
        self, lanes: Array, address: Array, size: int, constant: bool = False, atomic: bool = False
    ) -> Array:
        """`constant`: by `ld.global.nc`, whose cache does not see what this launch stores. `atomic`: a write
        follows."""
        offset, arrays = self.locate(lanes, address, size, inside=size if atomic else 1)
        if not atomic and (self.races or self.seen is not None):
            self.note_read(lanes, _bytes(offset, size))
        if constant and any(self.stored[i] for i in arrays):
            stored = self.written.reshape(-1, size)[offset // size]
            require(~stored, lanes, "ld.global.nc of memory that this launch has written")
        self.bytes_loaded += size * len(lanes)
        return self.data.reshape(-1, size)[offset // size]

    def read_prefix(self, lanes: Array, address: Array, size: int, count: Array) -> Array:
        """Rows of `size` bytes of which only the first `count[i]` are read; the others are 0 (cp.async)."""
        if all_of(count == size):
            return self.read(lanes, address, size)
        rows = np.zeros((len(lanes), size), np.uint8)
        for some in np.unique(count[count > 0]).tolist():
            chosen = np.flatnonzero(count == some)
            offset, _ = self.locate(lanes[chosen], address[chosen], some, align=size)
            byte = _bytes(offset, some)
            self.note_read(lanes[chosen], byte)
            rows[chosen, :some] = self.data[byte]
            self.bytes_loaded += some * len(chosen)
        return rows

    def write(self, lanes: Array, address: Array, rows: Array, atomic: bool = False) -> None:
        size = rows.shape[1]
        offset, arrays = self.locate(lanes, address, size)
        if self.races:
            self.races.write(lanes, _bytes(offset, size), atomic)
        for number in arrays:
            host = self.hosts[number]
            if host is not None and not host.flags.writeable:
                raise Fault(f"store to `{self.names[number]}`, a read-only array", int(lanes[0]))
            self.stored[number] = True
        self.data.reshape(-1, size)[offset // size] = rows
        self.written.reshape(-1, size)[offset // size] = True
        self.bytes_stored += rows.size

    def order(self, lanes: Array, address: Array, size: int, acquire: bool, release: bool) -> None:
        """`lanes` have executed atomics at these addresses."""
        if self.races:
            self.races.order(self.locate(lanes, address, size)[0], acquire, release)


def _bytes(offset: Array, size: int) -> Array:
    return offset[:, None] + np.arange(size)


class LocalMemory:
    """Each thread's own bytes, with the same address for every thread."""

    def __init__(self, size: int, lanes: int) -> None:
        self.size = -(-size // 16) * 16
        self.data = np.zeros((lanes, self.size), np.uint8)
        self.known = np.zeros((lanes, self.size), np.bool_)

    def reset(self) -> None:
        self.known[:] = False

    def locate(self, lanes: Array, address: Array, size: int) -> Array:
        require_multiple(address, size, lanes)
        inside = (address >= 0) & (address + size <= self.size)
        require(np.asarray(inside), lanes, f"out of bounds of {self.size} local bytes")
        return (lanes * self.size + address) // size

    def read(self, lanes: Array, address: Array, size: int) -> Array:
        row = self.locate(lanes, address, size)
        require(self.known.reshape(-1, size)[row], lanes, "read of local memory that was never written")
        return self.data.reshape(-1, size)[row]

    def write(self, lanes: Array, address: Array, rows: Array) -> None:
        row = self.locate(lanes, address, rows.shape[1])
        self.data.reshape(-1, rows.shape[1])[row] = rows
        self.known.reshape(-1, rows.shape[1])[row] = True
