"""The wgmma.mma_async of a block between issue and wait, and the rules for their registers (PTX ISA 9.7.15.7).

A product is computed at issue. Until the warpgroup has waited for its group no other instruction may use its
registers, nobody may write the shared memory that it reads (async_proxy.py), and only further products of the same
shape may add to the same accumulators. Between another use of a register and a wgmma that uses it there has to be a
wgmma.fence, and one before the first wgmma.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, Fault, any_of
from lowbit.pylib.emulator.machine.shared_memory import WARPGROUP, SharedMemory
from lowbit.pylib.emulator.text.ptx import Kernel, Reg, Vector


class Flight:
    """The use of a register that some wgmma names, the queue's register `number`."""

    __slots__ = ("_queue", "_touched", "_users", "number")

    def __init__(self, queue: WgmmaQueue, number: int) -> None:
        self._queue, self.number = queue, number
        self._touched, self._users = queue.touched[number], queue.users[number]

    def touch(self, mask: Array | None) -> None:
        """An ordinary instruction uses the register."""
        busy = self._users > 0 if mask is None else mask & (self._users > 0)
        if any_of(busy):
            name, lane = self._queue.names[self.number], int(np.flatnonzero(busy)[0])
            raise Fault(f"{name} is used while a wgmma with it is in flight: wgmma.wait_group comes first", lane)
        np.copyto(self._touched, self._queue.fences, where=True if mask is None else mask)


@dataclass
class _Product:
    first: int  # lane of the warpgroup
    number: int  # of the commit group, counted per warpgroup
    registers: Array  # by number
    rows: list[Array]  # of 16 bytes that it reads


class WgmmaQueue:
    """The products of a block that are not waited for yet, and what is known of the `registers` that they use."""

    def __init__(self, lanes: int, shared: SharedMemory, registers: list[Reg]) -> None:
        self.groups, self.shared = -(-lanes // WARPGROUP), shared
        self.products: list[_Product] = []
        self.fences = np.zeros(lanes, np.int64)
        self.committed = np.zeros(self.groups, np.int64)
        self.names = [reg.name for reg in registers]
        self.touched = np.zeros((len(registers), lanes), np.int64)  # after how many fences each was used last
        self.users = np.zeros((len(registers), lanes), np.int64)  # products in flight
        self.roles = np.zeros((len(registers), self.groups), object)  # of these: "A", or the accumulator's shape

    def reset(self) -> None:
        self.products.clear()
        for state in (self.fences, self.committed, self.touched, self.users):
            state[:] = 0

    def fence(self, active: Array) -> None:
        self.fences[active] += 1

    def issue(self, first: int, shape: str, accumulators: Array, inputs: Array, rows: list[Array]) -> None:
        """A product of the warpgroup that starts at lane `first`, with registers by their numbers."""
        for registers, role in ((accumulators, shape), (inputs, "A")):
            if len(registers):
                self._begin(first, registers, role)
        number = int(self.committed[first // WARPGROUP])
        self.products.append(_Product(first, number, np.concatenate([accumulators, inputs]), rows))

    def _begin(self, first: int, registers: Array, role: str) -> None:
        """Registers are used as `role`."""
        lanes, group = slice(first, first + WARPGROUP), first // WARPGROUP
        stale = self.touched[registers, lanes] == self.fences[lanes]
        if any_of(stale):
            which, lane = (int(i[0]) for i in np.nonzero(stale))
            name = self.names[registers[which]]
            used = f"since {name} was used by another instruction"
            since = used if self.fences[first + lane] else "before the first wgmma"
            raise Fault(f"no wgmma.fence {since}", first + lane)
        roles = self.roles[registers, group]
        others = (self.users[registers, first] > 0) & (roles != role)
        if any_of(others):
            which = int(np.flatnonzero(others)[0])
            other = "A" if roles[which] == "A" else f"accumulator of {roles[which]}"
            what = f"{self.names[registers[which]]} is in use as {other} by a wgmma in flight"
            raise Fault(f"{what}: wgmma.wait_group comes first", first)
        self.users[registers, lanes] += 1
        self.roles[registers, group] = role

    def commit(self, active: Array) -> None:
        self.committed[active[::WARPGROUP]] += 1

    def wait(self, active: Array, pending: int) -> None:
        """Finish all but the latest `pending` groups of each active warpgroup; uncommitted products stay."""
        left = list[_Product]()
        for product in self.products:
            group = product.first // WARPGROUP
            if active[product.first] and product.number < self.committed[group] - pending:
                self._finish(product)
            else:
                left.append(product)
        self.products = left

    def _finish(self, product: _Product) -> None:
        self.users[product.registers, product.first : product.first + WARPGROUP] -= 1
        for row in product.rows:
            self.shared.end_async_read(product.first, row)


def wgmma_registers(kernel: Kernel) -> list[Reg]:
    """The registers that hold accumulators or A of some wgmma."""
    vectors = [o for i in kernel.instructions if i.opcode == "wgmma" for o in i.operands[:2] if isinstance(o, Vector)]
    return list(dict.fromkeys(item for vector in vectors for item in vector.items if isinstance(item, Reg)))
