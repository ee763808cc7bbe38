"""The wgmma.mma_async of a block between issue and wait, and the rules for their registers (PTX ISA 9.7.15.7).

A product is computed at issue. Until the warpgroup has waited for its group no other instruction may use its
registers, nobody may write the shared memory that it reads (async_proxy.py), and only further products of the same
shape may add to the same accumulators. Between another use of a register and a wgmma that uses it there has to be a
wgmma.fence, and one before the first wgmma.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array, Fault
from lowbit.pylib.emulator.machine.shared_memory import WARPGROUP, SharedMemory
from lowbit.pylib.emulator.text.ptx import Kernel, Reg, Vector


class Flight:
    """The use of a register that some wgmma names."""

    __slots__ = ("name", "queue", "role", "touched", "users")

    def __init__(self, name: str, queue: WgmmaQueue) -> None:
        self.name, self.queue = name, queue
        self.touched = np.zeros(queue.lanes, np.int64)  # after how many fences it was used last
        self.users = np.zeros(queue.lanes, np.int64)  # products in flight
        self.role = [""] * queue.groups  # of these: "A", or the shape whose accumulator it is

    def reset(self) -> None:
        self.touched[:] = self.users[:] = 0

    def touch(self, mask: Array | None) -> None:
        """An ordinary instruction uses the register."""
        busy = self.users > 0 if mask is None else mask & (self.users > 0)
        if busy.any():
            lane = int(np.flatnonzero(busy)[0])
            raise Fault(f"{self.name} is used while a wgmma with it is in flight: wgmma.wait_group comes first", lane)
        np.copyto(self.touched, self.queue.fences, where=True if mask is None else mask)

    def begin(self, first: int, role: str) -> None:
        """A wgmma of the warpgroup that starts at lane `first` uses it as `role`."""
        lanes = slice(first, first + WARPGROUP)
        stale = self.touched[lanes] == self.queue.fences[lanes]
        if stale.any():
            lane = first + int(np.flatnonzero(stale)[0])
            since = (
                f"since {self.name} was used by another instruction"
                if self.queue.fences[lane]
                else "before the first wgmma"
            )
            raise Fault(f"no wgmma.fence {since}", lane)
        group = first // WARPGROUP
        if self.users[first] and self.role[group] != role:
            other = "A" if self.role[group] == "A" else f"accumulator of {self.role[group]}"
            raise Fault(f"{self.name} is in use as {other} by a wgmma in flight: wgmma.wait_group comes first", first)
        self.users[lanes] += 1
        self.role[group] = role


@dataclass
class _Product:
    first: int  # lane of the warpgroup
    number: int  # of the commit group, counted per warpgroup
    registers: list[Flight]
    rows: list[Array]  # of 16 bytes that it reads


class WgmmaQueue:
    """The products of a block that are not waited for yet."""

    def __init__(self, lanes: int, shared: SharedMemory) -> None:
        self.lanes, self.groups, self.shared = lanes, -(-lanes // WARPGROUP), shared
        self.products: list[_Product] = []
        self.fences = np.zeros(lanes, np.int64)
        self.committed = np.zeros(self.groups, np.int64)
        self.flights: list[Flight] = []

    def flight(self, reg: Reg) -> Flight:
        self.flights.append(Flight(reg.name, self))
        return self.flights[-1]

    def reset(self) -> None:
        self.products.clear()
        self.fences[:] = 0
        self.committed[:] = 0
        for flight in self.flights:
            flight.reset()

    def fence(self, active: Array) -> None:
        self.fences[active] += 1

    def issue(
        self, first: int, shape: str, accumulators: list[Flight], inputs: list[Flight], rows: list[Array]
    ) -> None:
        for flight in accumulators:
            flight.begin(first, shape)
        for flight in inputs:
            flight.begin(first, "A")
        number = int(self.committed[first // WARPGROUP])
        self.products.append(_Product(first, number, [*accumulators, *inputs], rows))

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
        for flight in product.registers:
            flight.users[product.first : product.first + WARPGROUP] -= 1
        for row in product.rows:
            self.shared.end_async_read(product.first, row)


def wgmma_registers(kernel: Kernel) -> list[Reg]:
    """The registers that hold accumulators or A of some wgmma."""
    vectors = [o for i in kernel.instructions if i.opcode == "wgmma" for o in i.operands[:2] if isinstance(o, Vector)]
    return list(dict.fromkeys(item for vector in vectors for item in vector.items if isinstance(item, Reg)))
