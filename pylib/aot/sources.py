"""The sources that an exported folder has: the runtime in C, its headers, a CMake project that builds them, and a file
that makes all others part of a library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

C_FOLDER = Path(__file__).parent / "c"
CMAKE_FOLDER = C_FOLDER / "cmake"


def runtime_files() -> dict[str, bytes]:
    """Returns the files of the runtime, by their names in a folder."""
    found = (path for path in sorted(C_FOLDER.rglob("*")) if path.is_file())
    return {str(path.relative_to(C_FOLDER)): path.read_bytes() for path in found}


def embedded_c(sizes: dict[str, int], matmuls: Iterable[str]) -> str:
    """Returns a C file that makes files part of a program, those of a folder by name with their sizes in bytes, and has
    tvm-ffi's functions of its matmuls."""
    embedded = [
        f'LOWBIT_EMBED({i}, {"LOWBIT_CODE" if name.startswith("cpu/") else "LOWBIT_DATA"}, "{name}")'
        for i, name in enumerate(sizes)
    ]
    entries = [f'    {{"{name}", lowbit_file_{i}, {size}}},' for i, (name, size) in enumerate(sizes.items())]
    return "\n".join(
        [
            "/* Written by `lowbit export`. */",
            '#include "embed.h"',
            '#include "tvm_ffi.h"',
            "",
            *embedded,
            "",
            "const lowbit_file LOWBIT_FILES[] = {",
            *entries,
            "    {0, 0, 0}};",
            "",
            *(f"LOWBIT_TVM({name})" for name in matmuls),
            "",
        ]
    )
