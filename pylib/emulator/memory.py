"""The memories of a kernel: device memory made of separate arrays, and a block's shared (or local) memory.

All accesses are bulk: `lanes[i]` reads or writes `size` bytes at `address[i]` (int64), as a row of uint8. Every
access is checked for alignment and bounds. Device arrays lie gigabytes apart, so that an index that leaves
its array hits nothing, and above 4 GiB, so that a truncated pointer is found out too.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from pylib.emulator.faults import Array, Fault, require
from pylib.emulator.races import RaceDetector

#: First device address, distance of the arrays, and their alignment: 256 bytes, which cudaMalloc promises,
#: and no more.
GLOBAL_BASE, GLOBAL_STRIDE, GLOBAL_ALIGN = 0x7000_0000_0000, 1 << 33, 256
#: Shared memory starts above 0, so that a forgotten base address is found out (sm_90 also reserves the first
#: KiB).
SHARED_BASE = 1024
#: Where generic addresses see the shared, constant and local memories.
SHARED_WINDOW, CONST_WINDOW, LOCAL_WINDOW = 0x6000_0000_0000, 0x6100_0000_0000, 0x6200_0000_0000


class DeviceMemory:
    """Arrays at simulated addresses; the host's arrays are copied in, and back by `copy_back` if written."""

    def __init__(self, base: int = GLOBAL_BASE, stride: int = GLOBAL_STRIDE) -> None:
        self.base, self.stride = base, stride
        self.names: list[str] = []
        self.hosts: list[Array | None] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.offsets: list[int] = []  # of the array in `data`
        self.stored: list[bool] = []
        self.data = np.zeros(0, np.uint8)
        self.bytes_loaded = self.bytes_stored = 0
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
        self.written = np.zeros(self._size, np.bool_)  # by this launch
        for host, offset in zip(self.hosts, self.offsets):
            if host is not None:
                flat = host.reshape(-1).view(np.uint8)
                self.data[offset : offset + flat.size] = flat
        self._starts = np.array(self.starts, np.int64)
        self._ends = np.array(self.ends, np.int64)
        self._shift = np.array(self.starts, np.int64) - np.array(self.offsets, np.int64)

    def copy_back(self) -> None:
        for host, offset, stored in zip(self.hosts, self.offsets, self.stored):
            if host is not None and stored:
                flat = host.reshape(-1).view(np.uint8)
                flat[:] = self.data[offset : offset + flat.size]

    def locate(self, lanes: Array, address: Array, size: int, align: int | None = None) -> tuple[Array, list[int]]:
        """Offsets into `data` of accesses that lie in one array each, and the arrays' numbers."""
        if not len(address):
            return address, []
        align = align or size
        require(address & (align - 1) == 0, lanes, f"an address that is not a multiple of {align}")
        low, high = int(address.min()), int(address.max()) + size
        number = bisect_right(self.starts, low) - 1
        if number >= 0 and high <= self.ends[number]:
            return address - (self.starts[number] - self.offsets[number]), [number]
        if not self.starts:
            raise Fault(self.describe(low, size), int(lanes[0]))
        index = np.searchsorted(self._starts, address, "right") - 1
        inside = (index >= 0) & (address + size <= self._ends[index])
        if not inside.all():
            first = int(np.flatnonzero(~inside)[0])
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

    def read(self, lanes: Array, address: Array, size: int, constant: bool = False) -> Array:
        """`constant`: by `ld.global.nc`, whose cache does not see what this launch stores."""
        offset, arrays = self.locate(lanes, address, size)
        if constant and any(self.stored[i] for i in arrays):
            stored = self.written.reshape(-1, size)[offset // size]
            require(~stored, lanes, "ld.global.nc of memory that this launch has written")
        self.bytes_loaded += size * len(lanes)
        return self.data.reshape(-1, size)[offset // size]

    def read_prefix(self, lanes: Array, address: Array, size: int, count: Array) -> Array:
        """Rows of `size` bytes of which only the first `count[i]` are read; the others are 0 (cp.async)."""
        if (count == size).all():
            return self.read(lanes, address, size)
        rows = np.zeros((len(lanes), size), np.uint8)
        for some in np.unique(count[count > 0]).tolist():
            chosen = np.flatnonzero(count == some)
            offset, _ = self.locate(lanes[chosen], address[chosen], some, align=size)
            rows[chosen, :some] = self.data[offset[:, None] + np.arange(some)]
            self.bytes_loaded += some * len(chosen)
        return rows

    def write(self, lanes: Array, address: Array, rows: Array) -> None:
        size = rows.shape[1]
        offset, arrays = self.locate(lanes, address, size)
        for number in arrays:
            host = self.hosts[number]
            if host is not None and not host.flags.writeable:
                raise Fault(f"store to `{self.names[number]}`, a read-only array", int(lanes[0]))
            self.stored[number] = True
        self.data.reshape(-1, size)[offset // size] = rows
        self.written.reshape(-1, size)[offset // size] = True
        self.bytes_stored += rows.size


#: What a byte of shared memory is: READABLE after a store; IN_FLIGHT while a cp.async may still write it; LANDED
#: once the thread that issued the copy has waited for it, and no barrier has shown it to the others yet. Up to
#: LANDED it may be written.
READABLE, EMPTY, LANDED, IN_FLIGHT, OUTSIDE = range(5)


class SharedMemory:
    """The shared memory of one block, from `SHARED_BASE` on; knows of every byte whether it may be read."""

    def __init__(self, races: RaceDetector | None = None, rank: int = 0) -> None:
        self.end = SHARED_BASE
        self.spans: list[tuple[int, int]] = []
        self.races = races
        self.rank = rank  # of the block in its cluster

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
        if self.races:
            self.races.reset(len(self.data))

    def locate(self, lanes: Array, address: Array, size: int) -> Array:
        """Row numbers in `data.reshape(-1, size)`."""
        offset = address - SHARED_BASE
        if not len(offset):
            return offset
        require(offset & (size - 1) == 0, lanes, f"an address that is not a multiple of {size}")
        if offset.min() < 0 or offset.max() + size > len(self.data):
            first = int(np.flatnonzero((offset < 0) | (offset + size > len(self.data)))[0])
            raise Fault(
                f"out of bounds: {size} bytes at {int(address[first])} = offset {int(offset[first])} "
                f"of {self.end - SHARED_BASE} bytes of shared memory",
                int(lanes[first]),
            )
        return offset // size

    def read(self, lanes: Array, address: Array, size: int, atomic: bool = False, by: int | None = None) -> Array:
        """`by`: the rank of the block whose `lanes` read; by default this one."""
        own = by is None or by == self.rank
        row = self.locate(lanes, address, size)
        state = self.state.reshape(-1, size)[row]
        if state.any():  # not READABLE
            self._refuse_read(lanes, row, size, state, own)
        if self.races and own and not atomic:
            self.races.read(lanes, row, size)
        return self.data.reshape(-1, size)[row]

    def _refuse_read(self, lanes: Array, row: Array, size: int, state: Array, own_block: bool) -> None:
        require(state != OUTSIDE, lanes, "read outside every shared variable")
        require(state != EMPTY, lanes, "read of shared memory that was never written")
        require(state != IN_FLIGHT, lanes, "read of the target of a cp.async that its thread has not waited for")
        own = (self.copier.reshape(-1, size)[row] == lanes[:, None]) & own_block
        require(
            (state != LANDED) | own,
            lanes,
            "read of another thread's cp.async without a barrier after its wait",
        )

    def write(self, lanes: Array, address: Array, rows: Array, atomic: bool = False, by: int | None = None) -> None:
        """`by`: the rank of the block whose `lanes` write; by default this one."""
        size = rows.shape[1]
        row = self.locate(lanes, address, size)
        self._check_write(lanes, row, size, atomic, by is None or by == self.rank)
        self.data.reshape(-1, size)[row] = rows
        self.state.reshape(-1, size)[row] = READABLE

    def _check_write(self, lanes: Array, row: Array, size: int, atomic: bool = False, own: bool = True) -> None:
        state = self.state.reshape(-1, size)[row]
        if len(lanes) and state.max() > LANDED:
            require(state != OUTSIDE, lanes, "write outside every shared variable")
            require(state != IN_FLIGHT, lanes, "write to the target of a cp.async that is still in flight")
        if self.races and own:
            self.races.write(lanes, row, size, atomic)

    # cp.async: begin at issue, land when the issuing thread waits, publish at a barrier.

    def begin_copy(self, lanes: Array, address: Array, size: int) -> Array:
        row = self.locate(lanes, address, size)
        self._check_write(lanes, row, size)
        self.state.reshape(-1, size)[row] = IN_FLIGHT
        copier = self.copier.reshape(-1, size)
        copier[row] = lanes[:, None]
        require(copier[row, 0] == lanes, lanes, "cp.async to the same bytes as another thread's")
        return row

    def land_copy(self, lanes: Array, row: Array, rows: Array) -> None:
        size = rows.shape[1]
        if self.races:
            self.races.write(lanes, row, size)
        self.data.reshape(-1, size)[row] = rows
        self.state.reshape(-1, size)[row] = LANDED
        self._landed = True

    # Barriers: what arriving threads did is told to waiting ones.

    def release(self, members: Array, known: Array | None) -> Array | None:
        """`members` (a mask) come to a barrier; gives what it knows, to be handed on to `acquire`."""
        return self.races.release(members, known) if self.races else None

    def acquire(self, members: Array, known: Array | None) -> None:
        if self.races and known is not None:
            self.races.acquire(members, known)

    def publish(self, members: Array) -> None:
        """Copies that `members` have waited for become readable for all."""
        if self._landed:
            landed = self.state == LANDED
            self.state[landed & members[self.copier]] = READABLE
            self._landed = bool((self.state == LANDED).any())

    def synchronize(self) -> None:
        """A barrier of the whole block."""
        if self._landed:
            self.state[self.state == LANDED] = READABLE
            self._landed = False
        if self.races:
            self.races.synchronize()


class LocalMemory:
    """Each thread's own bytes, with the same address for every thread."""

    def __init__(self, size: int, lanes: int) -> None:
        self.size = -(-size // 16) * 16
        self.data = np.zeros((lanes, self.size), np.uint8)
        self.known = np.zeros((lanes, self.size), np.bool_)

    def reset(self) -> None:
        self.known[:] = False

    def locate(self, lanes: Array, address: Array, size: int) -> Array:
        require(address & (size - 1) == 0, lanes, f"an address that is not a multiple of {size}")
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
