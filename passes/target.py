"""What a program is compiled for: a GPU architecture, this machine's CPU, or the PTX emulator.

Numbers are from the CUDA C++ Programming Guide, "Compute Capabilities", table "Technical Specifications per
Compute Capability". A block may use 1 KB less shared memory than an SM has: the driver keeps it for itself.
"""

from dataclasses import dataclass, replace
from typing import Literal

from lowbit.dialect.errors import TargetError

Kind = Literal["cpu", "cuda", "emulator"]


@dataclass(frozen=True)
class Target:
    """One compilation target; make it with `parse_target`.

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


def _gpu(
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
) -> Target:
    """An entry of the table: numbers are per multiprocessor, and all architectures have 64 K registers."""
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
    )


# Every architecture is one entry, in the order of compute capabilities. `ptx` is the oldest PTX version that has the
# architecture and all that is used (8.0, CUDA 12.0), so that older assemblers and drivers take it. From sm_100 on there
# is no wgmma, and kernels are those of sm_80. sm_120 does without clusters: theirs were not tried on such a GPU.
GPUS = (
    _gpu("sm_80", ptx=80, shared_kb=164, threads=2048, blocks=32, multiprocessors=108),  # A100
    _gpu("sm_86", ptx=80, shared_kb=100, threads=1536, blocks=16, multiprocessors=84),  # A40
    _gpu("sm_87", ptx=80, shared_kb=164, threads=1536, blocks=16, multiprocessors=16),  # Orin
    _gpu("sm_89", ptx=84, shared_kb=100, threads=1536, blocks=24, multiprocessors=142),  # L40S
    _gpu("sm_90", ptx=86, shared_kb=228, threads=2048, blocks=32, multiprocessors=132, clusters=True),  # H100
    _gpu(
        "sm_90a",
        ptx=86,
        shared_kb=228,
        threads=2048,
        blocks=32,
        multiprocessors=132,
        clusters=True,
        wgmma=True,
        hardware="NVIDIA H200",
    ),
    _gpu("sm_100", ptx=86, shared_kb=228, threads=2048, blocks=32, multiprocessors=148, clusters=True),  # B200
    _gpu("sm_103", ptx=88, shared_kb=228, threads=2048, blocks=32, multiprocessors=148, clusters=True),  # B300
    _gpu("sm_120", ptx=87, shared_kb=100, threads=1536, blocks=24, multiprocessors=170),  # RTX 5090
)
_EMULATED = tuple(replace(target, name=f"emulator:{target.arch}", kind="emulator") for target in GPUS)
_TARGETS = {target.name: target for target in (Target("cpu", "cpu"), *GPUS, *_EMULATED)}

GPU_NAMES = ", ".join(target.name for target in GPUS)


def parse_target(name: str) -> Target:
    """The target called `name`: "cpu", the name of an architecture in `GPUS`, "emulator:" and one of these, or
    "emulator" for "emulator:sm_80". "sm_90" is Hopper without wgmma; an H100 or H200 wants "sm_90a".

    Raises:
        TargetError: the name is none of these.
    """
    target = _TARGETS.get("emulator:sm_80" if name == "emulator" else name)
    if target is None:
        hint = "; leave it out for this machine's GPU" if name in ("cuda", "gpu") else ""
        raise TargetError(f"unknown target {name!r}; allowed: {', '.join(map(repr, _TARGETS))}, 'emulator'{hint}")
    return target


def target_of_gpu(capability: int, shared_per_block: int = 1 << 30) -> Target | None:
    """The best target for a GPU of this compute capability (times ten) whose blocks may have so many bytes of shared
    memory: an entry of its own, with all that the architecture has, or that of its nearest predecessor. None for a GPU
    that is older than all."""
    own = [target for target in GPUS if target.capability == capability]
    earlier = [target for target in GPUS if target.capability < capability and target.runs_later]
    fitting = [target for target in (*earlier, *own) if target.max_shared_per_block <= shared_per_block]
    return fitting[-1] if fitting else None
