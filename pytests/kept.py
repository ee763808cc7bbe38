"""What the emulator made of a launch, kept from one test run to the next.

A launch in the emulator is a function of the PTX, of what is in memory, of the order of the blocks and of the emulator:
all of them are in the key, with their contents. So a change that leaves a kernel's PTX alone does not emulate it again,
while packing, the reference and its bounds are computed in every run. A launch that fails is never kept.

The folder is LOWBIT_TEST_CACHE, or build/test-cache; `pytest --fresh` neither reads nor fills it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.passes.launch import Launch
from lowbit.pylib.build.cache import Cache
from lowbit.pylib.tensor_map import TensorMap

FOLDER = "LOWBIT_TEST_CACHE"
MOST_BYTES = 1 << 30
"""A folder that has more is emptied before the tests begin."""

_ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("pylib/emulator/**/*.py", "pylib/tensor_map.py", "passes/launch.py", "dialect/signature.py")
_OWN = ("pytests/kept.py", "pytests/emulated.py")

Memory = Mapping[str, Any]
"""The arguments of a launch by name: arrays of bytes, tensor maps of arrays, and numbers."""


def default_folder() -> str:
    """Where results are kept unless LOWBIT_TEST_CACHE says otherwise."""
    return str(_ROOT / "build" / "test-cache")


def trim(folder: str) -> None:
    """Empty a folder that has grown too large."""
    cache = Cache(Path(folder))
    if cache.info().bytes > MOST_BYTES:
        cache.clear()


def emulate(ptx: str, launch: Launch, memory: Memory, options: Mapping[str, Any], run: Callable[[], None]) -> None:
    """Bring memory into the state after `run`, a launch of `ptx`: from what is kept of it, or else by running it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        run()
        return
    arrays = {name: array for name, value in memory.items() if (array := _array(value)) is not None}

    def changes() -> dict[str, bytes]:
        before = {name: array.tobytes() for name, array in arrays.items()}
        run()
        after = {name: array.tobytes() for name, array in arrays.items()}
        return {name: content for name, content in after.items() if content != before[name]}

    for name, content in Cache(Path(folder)).get_or_build(_key(ptx, launch, memory, options), changes, dict).items():
        arrays[name][:] = np.frombuffer(content, np.uint8)


def _array(value: Any) -> np.ndarray | None:
    held = value.address if isinstance(value, TensorMap) else value
    return held if isinstance(held, np.ndarray) else None


def _key(ptx: str, launch: Launch, memory: Memory, options: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(f"{emulator_fingerprint()}\n{launch}\n{sorted(options.items())}\n{ptx}\n".encode())
    for name, value in sorted(memory.items()):
        digest.update(f"{name} {_about(value)}\n".encode())
        array = _array(value)
        if array is not None:
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _about(value: Any) -> str:
    """Everything about an argument but the contents of memory."""
    if isinstance(value, TensorMap):
        return str({**vars(value), "address": _about(value.address)})
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)


@lru_cache(maxsize=1)
def emulator_fingerprint() -> str:
    """SHA-256 of the emulator's sources and of the versions that it runs in."""
    files = [file for pattern in (*_SOURCES, *_OWN) for file in sorted(_ROOT.glob(pattern))]
    digest = hashlib.sha256(f"{sys.version} {np.__version__}".encode())
    for file in files:
        digest.update(f"{file.relative_to(_ROOT)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()
