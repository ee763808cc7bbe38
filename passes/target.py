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
    """As the user spells it: "sm_90a", "cpu", "emulator:sm_80"."""
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
    """Of the GPU that the rule for schedules has in mind."""

    @property
    def is_gpu(self) -> bool:
        """True where the result is PTX, whoever runs it."""
        return self.kind != "cpu"

    @property
    def features(self) -> str:
        """LLVM's feature string."""
        return f"+ptx{self.ptx_version}" if self.is_gpu else ""

    @property
    def has_cp_async(self) -> bool:
        """cp.async, and mma.sync m16n8k16 on f16 and bf16 (PTX ISA 9.7.9.25, 9.7.14.5)."""
        return self.capability >= 80

    @property
    def has_fp8_mma(self) -> bool:
        """mma.sync on e4m3 and e5m2, and cvt to and from them (PTX ISA 9.7.14.5)."""
        return self.capability >= 89

    @property
    def has_bf16_arith(self) -> bool:
        """add, sub and mul on bf16x2; before sm_90 only fma, which does their work (PTX ISA 9.7.4)."""
        return self.capability >= 90

    @property
    def has_clusters(self) -> bool:
        """Blocks that see each other's shared memory (PTX ISA 5.2.2); griddepcontrol; the async proxy's fences."""
        return self.capability >= 90

    @property
    def has_wgmma(self) -> bool:
        """wgmma and setmaxnreg: of the "a" variant alone (PTX ISA 9.7.15)."""
        return self.arch == "sm_90a"

    def __str__(self) -> str:
        return self.name


def _cuda(arch: str, ptx_version: int, shared_kb: int, threads: int, blocks: int, multiprocessors: int) -> Target:
    return Target(
        name=arch,
        kind="cuda",
        arch=arch,
        capability=int(arch.removeprefix("sm_").rstrip("a")),
        ptx_version=ptx_version,
        max_shared_per_block=(shared_kb - 1) * 1024,
        shared_per_sm=shared_kb * 1024,
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        max_registers_per_thread=255,
        registers_per_sm=65536,
        multiprocessors=multiprocessors,
    )


# The oldest PTX version with all we use (8.0, CUDA 12.0; fp8 mma.sync came with 8.4), so that older
# assemblers and drivers take it; on Hopper 8.6 (CUDA 12.7).
_CUDA = (
    _cuda("sm_80", ptx_version=80, shared_kb=164, threads=2048, blocks=32, multiprocessors=108),
    _cuda("sm_86", ptx_version=80, shared_kb=100, threads=1536, blocks=16, multiprocessors=84),
    _cuda("sm_87", ptx_version=80, shared_kb=164, threads=1536, blocks=16, multiprocessors=16),
    _cuda("sm_89", ptx_version=84, shared_kb=100, threads=1536, blocks=24, multiprocessors=142),
    _cuda("sm_90", ptx_version=86, shared_kb=228, threads=2048, blocks=32, multiprocessors=132),
    _cuda("sm_90a", ptx_version=86, shared_kb=228, threads=2048, blocks=32, multiprocessors=132),
)
_EMULATED = tuple(replace(target, name=f"emulator:{target.arch}", kind="emulator") for target in _CUDA)
_TARGETS = {target.name: target for target in (Target("cpu", "cpu"), *_CUDA, *_EMULATED)}


def parse_target(name: str) -> Target:
    """The target called `name`.

    "cpu"; "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a"; "emulator:" and one of these; "emulator" for
    "emulator:sm_80". "sm_90" is Hopper without wgmma; an H100 or H200 wants "sm_90a".

    Raises:
        TargetError: the name is none of these.
    """
    target = _TARGETS.get("emulator:sm_80" if name == "emulator" else name)
    if target is None:
        raise TargetError(f"unknown target {name!r}; allowed: {', '.join(map(repr, _TARGETS))}, 'emulator'")
    return target
