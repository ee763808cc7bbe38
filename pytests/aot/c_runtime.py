"""The exported C runtime as a shared library, called through ctypes: for tests that compare it with Python."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from c_structs import Call, Given
from torch import Tensor

from lowbit.pylib.aot.sources import C_FOLDER

CPU = -1
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
TYPES = {torch.uint8: 0, torch.int8: 1, torch.int32: 2, torch.float32: 3}
OK, BAD_ARGUMENT, BAD_FILE, BAD_VERSION, NOT_THERE, BAD_WEIGHT, CUDA_FAILED = range(7)


def compiler(name: str = "cc") -> str:
    """Returns the path of a compiler, or skips the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


def needs_flag(flag: str) -> None:
    """Skips the test where the compiler can't build a program with a flag: it may know one whose library is missing."""
    command = [compiler(), "-x", "c", flag, "-", "-o", os.devnull]
    if subprocess.run(command, input=b"int main(void) { return 0; }", capture_output=True, check=False).returncode:
        pytest.skip(f"{compiler()} has no {flag} on this machine")


def sources() -> list[str]:
    """Returns the C files of the runtime."""
    return [str(path) for path in sorted(C_FOLDER.glob("src/*.c"))]


@lru_cache(maxsize=1)
def library_path() -> Path:
    """Returns the file of the runtime, compiled once per process."""
    folder = Path(mkdtemp(prefix="lowbit-test-"))
    atexit.register(shutil.rmtree, folder)
    flags = ("-shared", "-fPIC", "-O2", "-fvisibility=hidden", *WARNINGS, f"-I{C_FOLDER}/include")
    path = folder / "liblowbit.so"
    subprocess.run([compiler(), *flags, *sources(), "-o", path, "-lm", "-ldl", "-pthread"], check=True)
    return path


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Returns the runtime."""
    loaded = ctypes.CDLL(str(library_path()))
    for name in ("error_text", "target", "tensor_name"):
        getattr(loaded, f"lowbit_{name}").restype = ctypes.c_char_p
    sizes = ("workspace_bytes", "dequantize_bytes", "tensor_bytes", "outlier_bytes", "expert_tile")
    for name in ("n", "k", "outputs", *sizes):
        getattr(loaded, f"lowbit_{name}").restype = ctypes.c_int64
    return loaded


class Failed(Exception):
    """A call that returned a code; `code` is it, and the text is lowbit_error_text."""

    def __init__(self, code: int) -> None:
        super().__init__(library().lowbit_error_text().decode())
        self.code = code


def check(code: int) -> None:
    if code:
        raise Failed(code)


def pointers(tensors: Sequence[Tensor]) -> Any:
    """Returns an array of addresses."""
    return (ctypes.c_void_p * max(1, len(tensors)))(*(t.data_ptr() for t in tensors))


class CMatmul:
    """A handle of the C runtime. Raises Failed where a call returns a code."""

    def __init__(self, folder: Path | str, name: str | None = None, device: int = CPU) -> None:
        self.handle = ctypes.c_void_p()
        given = None if name is None else name.encode()
        check(library().lowbit_open(str(folder).encode(), given, device, ctypes.byref(self.handle)))

    def __enter__(self) -> CMatmul:
        return self

    def __exit__(self, *_: object) -> None:
        library().lowbit_close(self.handle)

    @property
    def target(self) -> str:
        return library().lowbit_target(self.handle).decode()

    def expert_tile(self, m: int) -> int:
        return library().lowbit_expert_tile(self.handle, ctypes.c_int64(m))

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each tensor, by name."""
        c, h = library(), self.handle
        return {c.lowbit_tensor_name(h, i).decode(): c.lowbit_tensor_bytes(h, i) for i in range(c.lowbit_tensors(h))}

    def memory(self, outliers: int = 0) -> dict[str, Tensor]:
        """Returns memory for the tensors that nothing has been written to; of outliers so many bytes."""
        sizes = self.sizes() | ({"outliers": outliers} if outliers else {})
        return {name: torch.full((size,), 0xA5, dtype=torch.uint8) for name, size in sizes.items()}

    def pack(self, given: Mapping[str, Tensor], without: str = "") -> dict[str, Tensor]:
        """Returns the packed tensors as bytes, by name; for that of one name there is no memory."""
        kept = {name: t.contiguous() for name, t in given.items()}
        listed = (Given * len(kept))(
            *(Given(name.encode(), TYPES[t.dtype], t.data_ptr(), t.numel()) for name, t in kept.items())
        )
        lines = 0
        if "outliers" in self.sizes():
            lines = library().lowbit_outlier_bytes(self.handle, listed, len(kept))
            check(BAD_WEIGHT if lines < 0 else OK)
        packed = self.memory(lines)
        addresses = pointers(list(packed.values()))
        if without:
            addresses[list(packed).index(without)] = None
        check(library().lowbit_pack(self.handle, listed, len(kept), addresses))
        return packed

    def multiply(self, x: Tensor, weight: Sequence[Tensor], y: Tensor, inputs: Sequence[Tensor] = ()) -> Tensor:
        """Returns y, which is written."""
        m = len(y)
        size = library().lowbit_workspace_bytes(self.handle, ctypes.c_int64(max(m, len(x))))
        workspace = torch.zeros(max(size, 1), dtype=torch.uint8)
        of_weight, of_inputs = pointers(weight), pointers(inputs)
        call = Call(ctypes.sizeof(Call), x.data_ptr(), ctypes.addressof(of_weight), y.data_ptr(), m, len(x))
        call.inputs = ctypes.addressof(of_inputs) if inputs else None
        call.workspace, call.workspace_bytes = workspace.data_ptr(), size
        check(library().lowbit_run(self.handle, ctypes.byref(call)))
        return y

    def dequantize(self, weight: Sequence[Tensor], w: Tensor) -> Tensor:
        """Returns w, which is written."""
        size = library().lowbit_dequantize_bytes(self.handle)
        workspace = torch.zeros(max(size, 1), dtype=torch.uint8)
        to, scratch = ctypes.c_void_p(w.data_ptr()), ctypes.c_void_p(workspace.data_ptr())
        check(library().lowbit_dequantize(self.handle, pointers(weight), to, scratch, None))
        return w

    def save(self, path: Path, weight: Sequence[Tensor]) -> None:
        check(library().lowbit_save(self.handle, str(path).encode(), pointers(weight)))

    def load(self, path: Path) -> dict[str, Tensor]:
        """Returns the tensors of a file as bytes, by name."""
        sizes = (ctypes.c_int64 * len(self.sizes()))()
        check(library().lowbit_saved_bytes(self.handle, str(path).encode(), sizes))
        found = {name: torch.zeros(size, dtype=torch.uint8) for name, size in zip(self.sizes(), sizes)}
        check(library().lowbit_load(self.handle, str(path).encode(), pointers(list(found.values()))))
        return found


def as_bytes(t: Tensor) -> np.ndarray:
    """Returns the memory of a tensor."""
    return t.contiguous().view(-1).view(torch.uint8).numpy()
