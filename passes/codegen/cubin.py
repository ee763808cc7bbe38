"""PTX to a cubin: nvJitLink from its wheel (any CUDA build of PyTorch brings one), or else ptxas.

Both hold the same assembler, and neither needs a driver or a GPU. nvJitLink is called through cuda.bindings: it is
loaded in this process, where ptxas costs a process per kernel.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, Protocol

from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.target import Target
from lowbit.passes.targets import GPU_NAMES


@dataclass(frozen=True)
class Resources:
    """Registers and memory of a kernel, as the assembler reports them; of several kernels, the largest of each."""

    registers: int
    """Per thread."""
    spill_stores: int
    """Bytes per thread, like the next two."""
    spill_loads: int
    stack: int
    shared: int
    """Bytes of static shared memory per block; dynamic shared memory is the launch's business."""
    serialized: bool = False
    """Whether wgmma run one after the other, since the assembler found no way to let them overlap: a kernel is built so
    that it finds one."""


@dataclass(frozen=True)
class Cubin:
    """An assembled module."""

    image: bytes
    resources: Resources


def emit_cubin(ptx: str, target: Target) -> bytes:
    """The cubin of `ptx` for `target`'s architecture.

    Raises:
        TargetError: `target` is not a GPU, or there is no assembler.
        PassError: the assembler refuses the PTX; the message shows the lines.
    """
    return assemble(ptx, target).image


def resource_usage(ptx: str, target: Target) -> Resources:
    """Registers, spills and shared memory of `ptx` on `target`; errors as for `emit_cubin`."""
    return assemble(ptx, target).resources


def assemble(ptx: str, target: Target) -> Cubin:
    """Cubin and resource report in one run; errors as for `emit_cubin`."""
    if not target.is_gpu:
        raise TargetError(f"no cubin for target {target}; allowed: {GPU_NAMES}")
    image, log = assembler().run(ptx, target.arch)
    return Cubin(image, _resources(log, target))


class Assembler(Protocol):
    """Something that turns PTX into a cubin."""

    @property
    def version(self) -> str:
        """Name and version, to report."""
        ...

    def run(self, ptx: str, arch: str) -> tuple[bytes, str]:
        """The cubin and the log in ptxas's words."""
        ...


@lru_cache(maxsize=1)
def assembler() -> Assembler:
    """The assembler of this installation.

    Raises:
        TargetError: there is none.
    """
    try:
        return NvJitLink()
    except (ImportError, RuntimeError):  # no cuda.bindings, or no libnvJitLink that it finds
        pass
    if program := shutil.which("ptxas") or next(wheel_files("bin/ptxas"), None):
        return Ptxas(str(program))
    wheels = "cuda-bindings nvidia-nvjitlink"
    raise TargetError(f"a cubin needs nvJitLink or ptxas, and neither is here; pip install {wheels}")


def wheel_files(pattern: str) -> Iterator[Path]:
    """Files of NVIDIA's wheels, which unpack to ``nvidia/<package>/``, newest major version first."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob(f"*/{pattern}"), key=lambda path: path.name, reverse=True)


class NvJitLink:
    """libnvJitLink, in this process. Raises ImportError or RuntimeError where it can't be loaded."""

    def __init__(self) -> None:
        self._api = import_module("cuda.bindings.nvjitlink")
        self.version = "nvJitLink {}.{}".format(*self._api.version())

    def run(self, ptx: str, arch: str) -> tuple[bytes, str]:
        """The cubin and the log in ptxas's words."""
        api, options, source = self._api, [f"-arch={arch}", "-verbose", *_of_lines(ptx)], ptx.encode() + b"\0"
        try:
            handle = api.create(len(options), options)
        except api.nvJitLinkError as error:
            raise TargetError(f"{self.version} takes no {arch} ({error}); install a newer nvidia-nvjitlink") from None
        try:
            api.add_data(handle, api.InputType.PTX, source, len(source), "kernel.ptx")
            api.complete(handle)
            log = self._read("info_log", handle).decode(errors="replace")
            return self._read("linked_cubin", handle), log
        except api.nvJitLinkError as error:
            log = self._read("error_log", handle).decode(errors="replace")
            _refuse(ptx, log.strip("\0\n") or str(error), self.version)
        finally:
            api.destroy(handle)

    def _read(self, what: str, handle: int) -> bytes:
        buffer = bytearray(getattr(self._api, f"get_{what}_size")(handle))
        getattr(self._api, f"get_{what}")(handle, buffer)
        return bytes(buffer)


class Ptxas:
    """The ptxas program."""

    def __init__(self, program: str) -> None:
        self._program = program

    @property
    def version(self) -> str:
        done = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=True)
        return f"ptxas {done.stdout.strip().splitlines()[-1]}"

    def run(self, ptx: str, arch: str) -> tuple[bytes, str]:
        """The cubin and the log in ptxas's words."""
        with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
            source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(ptx)
            command = [self._program, "-v", *_of_lines(ptx), f"-arch={arch}", str(source), "-o", str(cubin)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            log = done.stdout + done.stderr
            if done.returncode:
                _refuse(ptx, log, self.version)
            return cubin.read_bytes(), log


def _of_lines(ptx: str) -> list[str]:
    """The option that keeps the lines of a program in machine code, where the PTX has some."""
    return ["-lineinfo"] if re.search(r"^\s*\.loc\s", ptx, re.MULTILINE) else []


def _refuse(ptx: str, log: str, version: str) -> NoReturn:
    """Raise the assembler's complaint with the PTX lines it is about."""
    lines = ptx.splitlines()
    shown = [
        f"line {number}: {message}\n    {lines[int(number) - 1].strip()}"
        for number, message in re.findall(r"line (\d+); (?:error|fatal)\s*:\s*(.*)", log)
        if int(number) <= len(lines)
    ]
    raise PassError(f"{version} refuses the PTX:\n" + "\n".join(shown[:8] or [log.strip("\0\n")]))


def _resources(log: str, target: Target) -> Resources:
    """The largest of each number in a ``-v`` log."""

    def most(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)), default=0)

    # Only nvJitLink's linker ("info : used ...", after ptxas's "ptxas info : Used ...") knows shared
    # variables of module scope; on sm_90, and there alone, it adds the 1 KB that the system takes of every block.
    linked = most(r"(?m)^info *: used .* (\d+) bytes smem")
    return Resources(
        registers=most(r"Used (\d+) registers"),
        spill_stores=most(r"(\d+) bytes spill stores"),
        spill_loads=most(r"(\d+) bytes spill loads"),
        stack=most(r"(\d+) bytes stack frame"),
        shared=linked - 1024 * (target.capability == 90) if linked else most(r"(\d+) bytes smem"),
        serialized="wgmma.mma_async instructions are serialized" in log,
    )
