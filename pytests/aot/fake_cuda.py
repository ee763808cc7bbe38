"""The driver of fake_cuda.c, and folders whose code it takes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shutil import copytree

from c_runtime import compiler
from exported import read_manifest, seal

HERE = Path(__file__).resolve().parent
KINDS = {"pointer": "p", "i32": "i", "tensor_map": "t"}


def build_driver(folder: Path, *flags: str) -> Path:
    """Returns the folder, with a libcuda.so.1 in it."""
    usual = ("-shared", "-fPIC", "-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1")
    command = [compiler(), *usual, *flags, "-pthread", HERE / "fake_cuda.c", "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True)
    return folder


def with_texts(folder: Path, to: Path) -> Path:
    """Returns a copy of a folder in which the code of each kernel is what fake_cuda.c takes for it."""
    copytree(folder, to)
    manifest = read_manifest(to)
    for target in manifest["matmuls"][0]["targets"]:
        for kernel in target["kernels"]:
            kinds = "".join(KINDS[param["kind"]] for param in kernel["params"])
            for code in ("cubin", "ptx"):
                (to / kernel[code]).write_text(f"{code}:{kernel['name']} {kinds}")
    seal(to, manifest)
    return to
