"""What a program is compiled for: a GPU architecture, this machine's CPU, or the PTX emulator.

Numbers are from the CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per
Compute Capability". A block may use 1 KB less shared memory than an SM has: the driver keeps it for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lowbit.dialect.errors import TargetError
from lowbit.passes.costs import THRESHOLDS, Costs, Rates, Thresholds

Kind = Literal["cpu", "cuda", "emulator"]


@dataclass(frozen=True)
class Target:
    """One compilation target, from a file of `passes/targets/`; `passes.targets.parse_target` finds it.

    For a CPU the GPU fields are zero. An emulator target has the architecture it stands in for: the same PTX
    is generated, and run by the interpreter instead of a device.
    """

    name: str
    """The user's spelling: "sm_90a", "cpu", "emulator:sm_80"."""
    kind: Kind
    arch: str = ""
    """LLVM's and ptxas's name of the architecture, "" for a CPU."""
    capability: int = 0
    """Compute capability times ten: 80, 86, ..."""
    ptx_version: int = 0
    """PTX ISA version times ten to emit."""
    max_shared_per_block: int = 0
    """Bytes; above 48 KB a kernel has to opt in."""
    shared_per_sm: int = 0
    """Bytes."""
    max_threads_per_sm: int = 0
    max_blocks_per_sm: int = 0
    max_registers_per_thread: int = 0
    registers_per_sm: int = 0
    multiprocessors: int = 0
    """The number of a typical GPU of the architecture. The rule for schedules fills so many."""
    has_clusters: bool = False
    """Blocks that see each other's shared memory (PTX ISA 5.2.2); griddepcontrol; the async proxy's fences."""
    has_wgmma: bool = False
    """wgmma (PTX ISA 9.7.15)."""
    hardware: str = ""
    """The GPU on which its kernels are run and timed; "" where they only run in the emulator."""
    most_multiprocessors: int = 0
    """Of the largest GPU of the architecture: workspaces have room for so many blocks."""
    rates: Rates = field(default=Rates(1, 1, 1, 1, 1), repr=False, compare=False)
    fitted: Costs | None = field(default=None, repr=False, compare=False)
    thresholds: Thresholds = field(default=THRESHOLDS, repr=False, compare=False)

    @property
    def costs(self) -> Costs:
        """What its kernels take. Raises TargetError for a CPU."""
        if self.fitted is None:
            raise TargetError(f"target {self.name} has one program for every number of rows, and nothing to predict")
        return self.fitted

    @property
    def is_gpu(self) -> bool:
        """True where the result is PTX, whoever runs it."""
        return self.kind != "cpu"

    @property
    def has_fp8(self) -> bool:
        """Conversions to f8e4m3 (PTX ISA 9.7.9.21), and mma.sync of it."""
        return self.capability >= 89

    @property
    def features(self) -> str:
        """LLVM's feature string."""
        return f"+ptx{self.ptx_version}" if self.is_gpu else ""

    @property
    def runs_later(self) -> bool:
        """Whether its PTX runs on later architectures, too: that of an "a" variant is for one alone (CUDA Programming
        Guide, "PTX Compatibility")."""
        return not self.arch.endswith("a")

    def __str__(self) -> str:
        return self.name


def gpu(
    arch: str,
    *,
    ptx: int,
    shared_kb: int,
    threads: int,
    blocks: int,
    multiprocessors: int,
    clusters: bool = False,
    wgmma: bool = False,
    hardware: str = "",
    most_multiprocessors: int = 0,
    rates: Rates,
    costs: Costs,
    thresholds: Thresholds = THRESHOLDS,
) -> Target:
    """Returns a target for a GPU architecture. shared_kb, threads and blocks are of a multiprocessor; all architectures
    have 64 K registers.

    ptx: the oldest PTX version, times ten, that has the architecture and all that is used (8.0, CUDA 12.0), so that
    older assemblers and drivers take it
    """
    return Target(
        name=arch,
        kind="cuda",
        arch=arch,
        capability=int(arch.removeprefix("sm_").rstrip("a")),
        ptx_version=ptx,
        max_shared_per_block=(shared_kb - 1) * 1024,
        shared_per_sm=shared_kb * 1024,
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        max_registers_per_thread=255,
        registers_per_sm=65536,
        multiprocessors=multiprocessors,
        has_clusters=clusters,
        has_wgmma=wgmma,
        hardware=hardware,
        most_multiprocessors=most_multiprocessors or multiprocessors,
        rates=rates,
        fitted=costs,
        thresholds=thresholds,
    )
