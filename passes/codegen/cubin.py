"""PTX to a cubin: nvJitLink from its wheel (any CUDA build of PyTorch brings one), or else ptxas.

Both hold the same assembler, and neither needs a driver or a GPU. nvJitLink is called through ctypes: it is
loaded in this process, where ptxas costs a process per kernel.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, Protocol

from lowbit.dialect.errors import PassError, TargetError
from lowbit.passes.target import GPU_NAMES, Target


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, as the assembler reports it; of several kernels, the largest of each."""

    registers: int
    """Per thread."""
    spill_stores: int
    """Bytes per thread, like the next two."""
    spill_loads: int
    stack: int
    shared: int
    """Bytes of static shared memory per block; dynamic shared memory is the launch's business."""


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
    for library in (*_wheel_files("lib/libnvJitLink.so*"), "libnvJitLink.so.13", "libnvJitLink.so.12"):
        try:
            return NvJitLink(ctypes.CDLL(str(library)))
        except OSError:
            continue
    if program := shutil.which("ptxas") or next(_wheel_files("bin/ptxas"), None):
        return Ptxas(str(program))
    raise TargetError("a cubin needs nvJitLink or ptxas, and neither is here; pip install 'lowbit[cuda]'")


def _wheel_files(pattern: str) -> Iterator[Path]:
    """Files of NVIDIA's wheels, which unpack to ``nvidia/<package>/``, newest major version first."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob(f"*/{pattern}"), key=lambda path: path.name, reverse=True)


class NvJitLink:
    """libnvJitLink; its entry points carry the version of the interface in their names."""

    _INPUT_PTX = 2  # nvJitLinkInputType

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._suffix = "13_0" if hasattr(library, "__nvJitLinkCreate_13_0") else "12_0"

    @property
    def version(self) -> str:
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        self._library.nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"nvJitLink {major.value}.{minor.value}"

    def run(self, ptx: str, arch: str) -> tuple[bytes, str]:
        """The cubin and the log in ptxas's words."""
        options = (ctypes.c_char_p * 2)(f"-arch={arch}".encode(), b"-verbose")
        handle, source = ctypes.c_void_p(), ptx.encode()
        if self._call("Create", ctypes.byref(handle), len(options), options):
            raise TargetError(f"{self.version} does not know {arch}; install a newer nvidia-nvjitlink")
        try:
            size = ctypes.c_size_t(len(source) + 1)
            failed = self._call("AddData", handle, self._INPUT_PTX, source, size, b"kernel.ptx")
            if failed or self._call("Complete", handle):
                _refuse(ptx, self._buffer("ErrorLog", handle).decode(errors="replace"), self.version)
            log = self._buffer("InfoLog", handle).decode(errors="replace")
            return self._buffer("LinkedCubin", handle), log
        finally:
            self._call("Destroy", ctypes.byref(handle))

    def _call(self, name: str, *arguments: object) -> int:
        return self._library[f"__nvJitLink{name}_{self._suffix}"](*arguments)

    def _buffer(self, name: str, handle: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{name}Size", handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{name}", handle, buffer)
        return buffer.raw


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
            command = [self._program, "-v", f"-arch={arch}", str(source), "-o", str(cubin)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            log = done.stdout + done.stderr
            if done.returncode:
                _refuse(ptx, log, self.version)
            return cubin.read_bytes(), log


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
    )
