"""Where the variables and parameters of a kernel lie in the memories of a cluster of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowbit.pylib.emulator.machine.async_proxy import AsyncProxy
from lowbit.pylib.emulator.machine.cluster import Cluster
from lowbit.pylib.emulator.machine.faults import Array
from lowbit.pylib.emulator.machine.memory import DeviceMemory
from lowbit.pylib.emulator.machine.races import ClusterRaceDetector, RaceClock, RaceDetector
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory
from lowbit.pylib.emulator.text.ptx import Kernel, Param, Variable

_CONST_BASE, _CONST_STRIDE = 0x10000, 0x20000


@dataclass
class MemoryMap:
    """Memories that are filled up, one variable after the other, and then allocated.

    All blocks of a cluster lay out their shared memory alike, so that a variable has one address in each.
    """

    cluster: Cluster
    device: DeviceMemory = field(default_factory=DeviceMemory)
    constant: DeviceMemory = field(default_factory=lambda: DeviceMemory(_CONST_BASE, _CONST_STRIDE))
    symbols: dict[str, tuple[str, int]] = field(default_factory=dict)  # name -> (space, address)
    params: bytearray = field(default_factory=bytearray)
    local_bytes: int = 0

    def add_variable(self, variable: Variable, size: int, contents: Array) -> None:
        """Place a variable of a known size, with its initial bytes, in its space."""
        match variable.space:
            case "shared":
                address = self._add_shared(size, variable.align)
            case "local":
                address = -(-self.local_bytes // variable.align) * variable.align
                self.local_bytes = address + size
            case "const":
                address = self.constant.add(variable.name, size, contents)
            case _:
                address = self.device.add(variable.name, size, contents)
        self.symbols[variable.name] = (variable.space, address)

    def add_dynamic(self, variables: Sequence[Variable], nbytes: int) -> None:
        """Place dynamic shared memory, behind the rest: all `extern` arrays are names for it."""
        if variables:
            address = self._add_shared(nbytes, max(variable.align for variable in variables))
            self.symbols.update((variable.name, ("shared", address)) for variable in variables)

    def add_param(self, param: Param, value: bytes) -> None:
        """Append a parameter's bytes to those before it."""
        self.params.extend(bytes(-len(self.params) % param.align))
        self.symbols[param.name] = ("param", len(self.params))
        self.params.extend(value)

    def allocate(self) -> None:
        """Make the memories, now that their sizes are known."""
        for memory in (self.device, self.constant, *self.cluster.memories):
            memory.allocate()

    def _add_shared(self, size: int, align: int) -> int:
        (address,) = {memory.add(size, align) for memory in self.cluster.memories}
        return address


def make_cluster(kernel: Kernel, shape: tuple[int, int, int], lanes: int, racecheck: bool) -> Cluster:
    """Returns a cluster of blocks of so many lanes, with the watchers of shared memory that the kernel needs."""
    cluster = Cluster(shape, lanes)
    cluster.memories = [SharedMemory(lanes, rank) for rank in range(cluster.size)]
    cluster.races = RaceClock(cluster.size, lanes) if racecheck else None
    copies_in_bulk = any(i.opcode == "wgmma" or "bulk" in i.modifiers for i in kernel.instructions)
    for shared in cluster.memories:
        if cluster.races:
            shared.races = RaceDetector(cluster.races, shared.rank)
        if cluster.races and cluster.size > 1:
            shared.cluster_races = ClusterRaceDetector(cluster.clock, cluster.races, shared.rank)
        if copies_in_bulk:
            shared.proxy = AsyncProxy()
    return cluster
