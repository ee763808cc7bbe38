"""The Emulator: PTX in, kernels launched on NumPy arrays."""

from __future__ import annotations

import itertools
import math
import struct
import threading
from collections import Counter
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowbit.dialect.errors import EmulatorError
from lowbit.dialect.signature import MOST_BLOCKS
from lowbit.passes.launch import Launch
from lowbit.pylib.emulator.isa import (  # the instructions register themselves
    async_copy,  # noqa: F401
    atomics,  # noqa: F401
    bits,  # noqa: F401
    comparisons,  # noqa: F401
    control,  # noqa: F401
    conversions,  # noqa: F401
    distributed,  # noqa: F401
    integers,  # noqa: F401
    mbarrier,  # noqa: F401
    tensor_core,  # noqa: F401
    transfer,  # noqa: F401
    warp,  # noqa: F401
    warpgroup,  # noqa: F401
)
from lowbit.pylib.emulator.isa.tensor_copy import tensor_argument
from lowbit.pylib.emulator.machine.cluster import MAX_CLUSTER
from lowbit.pylib.emulator.machine.decoder import decode
from lowbit.pylib.emulator.machine.faults import Array
from lowbit.pylib.emulator.machine.machine import Block, run_cluster
from lowbit.pylib.emulator.machine.memory import DeviceMemory, LocalMemory
from lowbit.pylib.emulator.machine.memory_map import MemoryMap, make_cluster
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory
from lowbit.pylib.emulator.machine.step_results import WARP
from lowbit.pylib.emulator.observer import Enough, current
from lowbit.pylib.emulator.text.parser import parse
from lowbit.pylib.emulator.text.ptx import Kernel, Param, Variable
from lowbit.pylib.runtime.tensor_map import ALIGN, SIZE, TensorMap

Dim3 = int | Sequence[int]
Index = tuple[int, int, int]

MAX_THREADS, MAX_SHARED = 1024, 232448
MAX_THREADS_Z = 64  # of the threads of a block, along z
SM_COUNT = 4
"""The multiprocessors of the GPU that is emulated: few, so that grids which depend on their number stay small."""


class Stats(Counter[str]):
    """How many warp instructions were executed, by full name ("ld.global.nc.v4.b32").

    As in a profiler, a warp counts if at least one of its threads is at the instruction, predicated off or
    not. Bytes are what the threads asked for.
    """

    def __init__(self, counts: Iterable[str] | Counter[str] = (), loaded: int = 0, stored: int = 0) -> None:
        super().__init__(counts)
        self.global_bytes_loaded = loaded
        self.global_bytes_stored = stored

    def total_of(self, prefix: str) -> int:
        """All instructions whose name starts with `prefix`: total_of("mma"), total_of("ld.global")."""
        return sum(count for name, count in self.items() if f"{name}.".startswith(f"{prefix}."))


class Emulator:
    """Runs the kernels of a PTX module, one cluster after the other, all threads of a block at once.

    Raises EmulatorError, with the line of the PTX, for anything in it that is not understood, and `launch`
    for anything a kernel does that PTX leaves undefined (see the package's docstring).

    After a launch, `stats` says what was executed. Safe to call from any thread: launches wait for one another.
    """

    def __init__(self, ptx: str) -> None:
        self.module = parse(ptx)
        self.stats = Stats()
        self._lock = threading.Lock()
        kernels = self.module.kernels.values()
        variables = itertools.chain(self.module.variables, *(kernel.variables for kernel in kernels))
        self._globals = {v.name: _contents(v).copy() for v in variables if v.space == "global"}
        for kernel in kernels:
            with self._prepared(kernel, _Config(), None) as (machine,):
                _check_instructions(kernel, machine)

    def launch(
        self,
        name: str,
        *,
        grid: Dim3 = 1,
        block: Dim3,
        args: Sequence[object],
        shared_bytes: int = 0,
        racecheck: bool = False,
        blocks: Iterable[Sequence[int]] | None = None,
        max_steps: int = 10_000_000,
        names: Sequence[str] | None = None,
    ) -> None:
        """Run kernel `name` to its end.

        grid, block: numbers of blocks and of threads, each an int or (x, y, z), up to CUDA's limits.
        args: one per parameter. A C-contiguous NumPy array is device memory: the kernel gets its address, and
            what it stores is in the array afterwards. None is a null pointer. Ints and floats are taken in
            the parameter's type; `.b8 p[n]` parameters take bytes or an array of n bytes by value, and with n = 128
            and .align 64 a TensorMap of an array.
        shared_bytes: dynamic shared memory, for `.extern .shared` arrays.
        racecheck: report conflicting accesses to shared memory that no barrier orders, and those of several blocks to
            device memory that no atomics order (slower).
        blocks: the blocks to run, and in what order; by default all, x fastest. A cluster is run when its first
            block comes, its blocks in this order.
        max_steps: block steps after which a block counts as an endless loop: an instruction that all its threads take
            together is one. The 10 million of the default take minutes.
        names: what errors call the arguments that are memory; by default as the PTX calls the parameters.

        The size of the clusters is the kernel's `.reqnctapercluster`.
        """
        kernel = self.module.kernels.get(name)
        if kernel is None:
            raise EmulatorError(f"no kernel {name!r}; the module has {', '.join(self.module.kernels) or 'none'}")
        shape, extent = _dim3(block, "block"), _dim3(grid, "grid")
        if any(n > most for n, most in zip(extent, MOST_BLOCKS)):
            raise EmulatorError(f"grid={extent} has too many blocks; at most {MOST_BLOCKS} are allowed")
        _check_shape(kernel, shape, shared_bytes)
        cluster = _cluster_shape(kernel, extent)
        if len(args) != len(kernel.params):
            raise EmulatorError(f"{name} takes {len(kernel.params)} arguments, not {len(args)}")
        observer = current()
        racecheck |= observer is not None and observer.racecheck
        config = _Config(shape, extent, cluster, shared_bytes, racecheck, max_steps, tuple(names or ()))
        order = None if blocks is None else [_dim3(index, "block index", least=0) for index in blocks]
        clusters = _all_clusters(extent, cluster) if order is None else _clusters(order, cluster)
        with self._lock, self._prepared(kernel, config, args) as machines:  # launches share .global variables
            for machine in machines:
                machine.steps = [decode(instruction, machine) for instruction in kernel.instructions]
            self._run(machines, clusters, cluster)

    def _run(self, machines: list[Block], clusters: Iterable[list[Index]], shape: Index) -> None:
        """Run the clusters of a grid one after the other, on the machines of one."""
        device, observer = machines[0].device, current()
        seen = observer and observer.begin(machines)
        if observer:
            clusters = itertools.islice(clusters, observer.clusters)
        try:
            with np.errstate(all="ignore"):
                for indices in clusters:
                    run_cluster([machines[_rank(index, shape)] for index in indices], indices)
        except Enough:
            pass
        except EmulatorError as error:
            if seen:
                seen.fault = str(error)
            raise
        finally:
            device.copy_back()
            counts = sum((machine.opcode_counts() for machine in machines), Counter[str]())
            if seen:
                counted = np.sum([machine.counts for machine in machines], 0)[:-1]
                seen.counts = Counter(dict(enumerate(counted.tolist())))
                seen.read = device.bytes_seen()
            self.stats = Stats(counts, device.bytes_loaded, device.bytes_stored)

    def run(self, launch: Launch, arguments: Mapping[str, object], **options: Any) -> None:
        """Run a compiled kernel to its end.

        arguments: by the names of the kernel's parameters, the workspace included; values as `args` of `launch`.
        options: the other options of `launch`.
        """
        observer = current()
        sm_count = observer.sm_count if observer and observer.sm_count else SM_COUNT
        self.launch(
            launch.name,
            grid=launch.blocks(arguments, sm_count),
            block=launch.threads,
            args=[arguments[p.name] for p in launch.params],
            shared_bytes=launch.shared_bytes,
            names=[p.name for p in launch.params],
            **options,
        )

    @contextmanager
    def _prepared(self, kernel: Kernel, config: _Config, args: Sequence[object] | None) -> Generator[list[Block]]:
        """The blocks of a cluster as `_prepare` makes them; afterwards their memory is free."""
        machines = self._prepare(kernel, config, args)
        try:
            yield machines
        finally:
            for machine in machines:
                machine.release()

    def _prepare(self, kernel: Kernel, config: _Config, args: Sequence[object] | None) -> list[Block]:
        """The blocks of a cluster, by rank, with all memories laid out; `args` None: just to decode instructions."""
        lanes = -(-math.prod(config.block) // WARP) * WARP
        cluster = make_cluster(kernel, config.cluster, lanes, config.racecheck)
        memories = MemoryMap(cluster, DeviceMemory(racecheck=config.racecheck))
        dynamic: list[Variable] = []
        for variable in [*self.module.variables, *kernel.variables]:
            if variable.size is None:
                dynamic.append(variable)
            else:
                contents = self._globals.get(variable.name)
                memories.add_variable(variable, variable.size, _contents(variable) if contents is None else contents)
        memories.add_dynamic(dynamic, config.shared_bytes)
        for i, param in enumerate(kernel.params):
            name = config.names[i] if config.names else param.name
            value = bytes(param.size) if args is None else _argument(memories.device, param, args[i], i, name)
            memories.add_param(param, value)
        memories.allocate()
        return [_block(kernel, config, memories, shared, lanes) for shared in memories.cluster.memories]


@dataclass(frozen=True)
class _Config:
    """How a kernel is launched: blocks of so many threads, a grid of blocks, clusters of blocks."""

    block: Index = (WARP, 1, 1)
    grid: Index = (1, 1, 1)
    cluster: Index = (1, 1, 1)
    shared_bytes: int = 0
    racecheck: bool = False
    max_steps: int = 1
    names: tuple[str, ...] = ()


def _check_instructions(kernel: Kernel, block: Block) -> None:
    """Raises EmulatorError for the first instruction that is unknown: decodes one of each form."""
    seen: set[Hashable] = set()
    for instruction in kernel.instructions:
        if (form := instruction.form()) not in seen:
            seen.add(form)
            decode(instruction, block)


def _block(kernel: Kernel, config: _Config, memories: MemoryMap, shared: SharedMemory, lanes: int) -> Block:
    """A block of a cluster, which runs in the memories of all and in its own shared and local memory."""
    return Block(
        kernel=kernel,
        shape=config.block,
        grid=config.grid,
        device=memories.device,
        constant=memories.constant,
        shared=shared,
        local=LocalMemory(memories.local_bytes, lanes),
        cluster=memories.cluster,
        rank=shared.rank,
        symbols=memories.symbols,
        params=np.frombuffer(bytes(memories.params), np.uint8),
        dynamic_shared_bytes=config.shared_bytes,
        max_steps=config.max_steps,
    )


def _contents(variable: Variable) -> Array:
    """The initial bytes, read-only."""
    return np.frombuffer(variable.data.ljust(variable.size or 0, b"\0"), np.uint8)


def _dim3(value: Dim3, what: str, least: int = 1) -> Index:
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(values) <= 3 or min(values) < least:
        raise EmulatorError(f"{what}={value} must be one to three numbers, each at least {least}")
    x, y, z = (*values, *(least,) * (3 - len(values)))
    return x, y, z


def _check_shape(kernel: Kernel, shape: Index, shared_bytes: int) -> None:
    threads = shape[0] * shape[1] * shape[2]
    if kernel.reqntid is not None and shape != (*kernel.reqntid, 1, 1)[:3]:
        raise EmulatorError(f"block={shape} must be {kernel.reqntid}, which {kernel.name} requires (.reqntid)")
    if kernel.maxntid is not None and threads > int(np.prod(kernel.maxntid)):
        raise EmulatorError(f"block={shape} exceeds .maxntid {kernel.maxntid} of {kernel.name}")
    if threads > MAX_THREADS:
        raise EmulatorError(f"block={shape} has {threads} threads; at most {MAX_THREADS} are allowed")
    if shape[2] > MAX_THREADS_Z:
        raise EmulatorError(f"block={shape} has {shape[2]} threads along z; at most {MAX_THREADS_Z} are allowed")
    if not 0 <= shared_bytes <= MAX_SHARED:
        raise EmulatorError(f"shared_bytes={shared_bytes} must be 0 to {MAX_SHARED}")


def _cluster_shape(kernel: Kernel, grid: Index) -> Index:
    if kernel.cluster is None:
        if kernel.explicit_cluster:
            raise EmulatorError(f"{kernel.name} is .explicitcluster and does not say its size: add .reqnctapercluster")
        return 1, 1, 1
    shape = _dim3(kernel.cluster, ".reqnctapercluster")
    if any(n % per for n, per in zip(grid, shape)):
        raise EmulatorError(f"grid={grid} must be a multiple of the cluster {shape} that {kernel.name} requires")
    if int(np.prod(shape)) > MAX_CLUSTER:
        raise EmulatorError(f"{kernel.name} requires clusters of {shape}; at most {MAX_CLUSTER} blocks are allowed")
    return shape


def _rank(index: Index, shape: Index) -> int:
    x, y, z = (i % n for i, n in zip(index, shape))
    return x + shape[0] * (y + shape[1] * z)


def _indices(extent: Iterable[int]) -> Iterator[Index]:
    """All indices below three extents, x fastest, one at a time: a grid may have billions."""
    width, height, depth = extent
    return ((x, y, z) for z in range(depth) for y in range(height) for x in range(width))


def _all_clusters(grid: Index, shape: Index) -> Iterator[list[Index]]:
    """The blocks of a grid by cluster, x fastest."""
    for at in _indices(n // size for n, size in zip(grid, shape)):
        x, y, z = (i * size for i, size in zip(at, shape))
        yield [(x + i, y + j, z + k) for i, j, k in _indices(shape)]


def _clusters(order: list[Index], shape: Index) -> Iterable[list[Index]]:
    """The blocks in `order` by cluster."""
    size = int(np.prod(shape))
    if size == 1:
        return [[index] for index in order]
    clusters: dict[tuple[int, ...], list[Index]] = {}
    for index in order:
        clusters.setdefault(tuple(i // n for i, n in zip(index, shape)), []).append(index)
    for at, members in clusters.items():
        if len(set(members)) != size or len(members) != size:
            raise EmulatorError(f"blocks={members} must name each of the {size} blocks of cluster {at} once")
    return clusters.values()


def _argument(device: DeviceMemory, param: Param, value: object, number: int, name: str) -> bytes:
    """The bytes of an argument; arrays are put into device memory."""
    what = f"argument {number} ({param.name}, .{param.type}{f'[{param.size}]' if param.array else ''})"
    if isinstance(value, TensorMap):
        if not param.array or param.size != SIZE or param.align < ALIGN:
            raise EmulatorError(f"{what}: a tensor map is passed as `.param .align {ALIGN} .b8 name[{SIZE}]`")
        if isinstance(value.address, int):
            raise EmulatorError(f"{what}: the tensor map needs the array in place of its address")
        return tensor_argument(device, value, _device_array(device, name, value.address, what))
    if param.array:
        data = value if isinstance(value, bytes) else np.asarray(value).tobytes() if _is_array(value) else None
        if data is None or len(data) != param.size:
            raise EmulatorError(f"{what}: give {param.size} bytes, or an array of that size")
        return data
    if isinstance(value, np.ndarray):
        if param.size != 8:
            raise EmulatorError(f"{what}: an array is a pointer, which has 64 bits")
        return struct.pack("<Q", _device_array(device, name, value, what))
    if value is None:
        return bytes(param.size)
    if isinstance(value, np.generic) and value.dtype.itemsize == param.size:
        return value.tobytes()
    if param.type[0] == "f" and isinstance(value, int | float | np.number):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[param.size], float(value))
    if isinstance(value, int | np.integer):
        width = 8 * param.size
        if not -(1 << width - 1) <= int(value) < 1 << width:
            raise EmulatorError(f"{what}: {value} does not fit {width} bits")
        return (int(value) & (1 << width) - 1).to_bytes(param.size, "little")
    raise EmulatorError(f"{what}: cannot pass {value!r}")


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def _device_array(device: DeviceMemory, name: str, value: Array, what: str) -> int:
    if not value.flags.c_contiguous:
        raise EmulatorError(f"{what}: the array must be C-contiguous; pass np.ascontiguousarray(...)")
    for other, start in zip(device.hosts, device.starts):
        if other is None or not np.may_share_memory(other, value):
            continue
        if other.ctypes.data == value.ctypes.data and other.nbytes == value.nbytes:
            return start  # the same array twice
        raise EmulatorError(f"{what}: the array overlaps another argument's; pass copies")
    return device.add(name, value.nbytes, value)
