"""The disk cache of compiled kernels.

An entry is one file, named by its key: the SHA-256 of the rest, an index (names and sizes), and the contents.
It appears whole by a rename, or not at all, and is checked whenever it is read; a damaged one is dropped and
built again. Several processes that want the same kernel at once wait for the one that compiles it.

The key holds everything that can change the result: what the caller names (spec, schedule, target), the
versions of the tools, and the compiler's own sources.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from lowbit.pylib import knobs
from lowbit.pylib.build.installed import versions

LOCK_TIMEOUT = 600.0
"""Seconds to wait for another process that builds the same entry, before building it as well."""

_TOOLS = (
    "mlir-python-bindings",
    "torch-mlir",
    "llvmlite",
    "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12",
    "nvidia-cuda-nvcc",
)
_MLIR = {"mlir": "mlir_python_bindings", "torch_mlir": "torch_mlir"}
"""MLIR's packages, and the wheel that each is from unless it is a build tree or somebody else's wheel."""
_SOURCES_OF_ENTRIES = ("build/driver.py", "build/cache.py")


def load_or_build(key: str, build: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    """The user's cache's entry `key`, or what `build` makes; always the latter under LOWBIT_NO_CACHE."""
    return build() if knobs.no_cache() else Cache().get_or_build(key, build)


def key(**parts: object) -> str:
    """The key (64 hexadecimal digits) of a compilation with these inputs, by these tools and these sources.

    Parts are dataclasses, mappings, sequences, strings, bytes, numbers, booleans and None, nested at will.
    """
    everything = {"parts": parts, "tools": tool_versions(), "sources": source_fingerprint()}
    return hashlib.sha256(_text(everything).encode()).hexdigest()


def _text(value: object) -> str:
    """A text that differs where the values do: types are spelled out, and floats are exact."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = ((f.name, getattr(value, f.name)) for f in fields(value))
        return f"{type(value).__name__}({','.join(f'{name}={_text(v)}' for name, v in inside)})"
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{_text(k)}:{_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    raise TypeError(f"a {type(value).__name__} can't be part of a cache key; give its text")


@lru_cache(maxsize=1)
def tool_versions() -> str:
    """Versions of the packages that compile, found without importing them."""
    found = versions(*_TOOLS)
    # An MLIR build tree, and a ptxas on the PATH, have no version that can be asked for without running them.
    found |= {package: _libraries(package, wheel) for package, wheel in _MLIR.items()}
    nvjitlink = found["nvidia-nvjitlink"] or found["nvidia-nvjitlink-cu12"]
    if not nvjitlink and (ptxas := shutil.which("ptxas")):
        found["ptxas"] = f"{ptxas} {Path(ptxas).stat().st_mtime_ns}"
    return _text(found)


def _libraries(package: str, wheel: str) -> str | None:
    """Returns sizes and times of the libraries of an MLIR package, or None where the wheel that has a version gave it."""
    spec = find_spec(package)
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    if all(any(root.parent.glob(f"{wheel}-*.dist-info")) for root in roots):
        return None
    files = sorted(file.stat() for root in roots for file in root.glob("_mlir_libs/*.so*"))
    return " ".join(f"{file.st_size}:{file.st_mtime_ns}" for file in files)


@lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """SHA-256 of the compiler's sources: dialect/, passes/, and what of pylib decides what is in an entry.

    Not the tables of schedules: a schedule is in the key itself, and a new entry leaves other kernels alone.
    Of their contents: images and packages that are built to be reproducible give every file the same time.
    """
    root = str(Path(__file__).resolve().parent.parent.parent)
    sources = [f"{root}/pylib/{name}" for name in _SOURCES_OF_ENTRIES]
    for package in ("dialect", "passes"):
        for folder, inside, names in os.walk(f"{root}/{package}"):
            inside[:] = set(inside) - {"data"}
            sources += [f"{folder}/{name}" for name in names if name.endswith((".py", ".json", ".mlir"))]
    digest = hashlib.sha256()
    for path in sorted(sources):
        content = Path(path).read_bytes()
        digest.update(f"{path.removeprefix(root)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


@dataclass(frozen=True)
class CacheInfo:
    """What is in a cache."""

    directory: Path
    entries: int
    bytes: int


@dataclass(frozen=True)
class Cache:
    """A directory of entries; safe under any number of threads and processes, and when one is killed."""

    directory: Path = field(default_factory=knobs.cache_dir)

    def get(self, key: str) -> dict[str, bytes] | None:
        """The files of an entry by name, or None where there is none; one that is damaged is deleted."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        files = _unpack(data)
        if files is None:
            path.unlink(missing_ok=True)
        return files

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Make or replace an entry. A disk that can't be written costs a warning."""
        with self._lock(key):
            self._write(key, files)

    def get_or_build(self, key: str, build: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        """The entry, or else what `build` makes, which is then kept; what `build` raises comes through."""
        found = self.get(key)
        if found is not None:
            return found
        with self._lock(key):
            found = self.get(key)  # another process may have built it while this one waited
            if found is None:
                found = build()
                self._write(key, found)
        return found

    def info(self) -> CacheInfo:
        """Where the cache is and what it holds."""
        sizes = [path.stat().st_size for path in self.directory.glob("??/*.kernel")]
        return CacheInfo(self.directory, len(sizes), sum(sizes))

    def clear(self) -> None:
        """Delete every entry, and what killed processes left behind."""
        for suffix in ("kernel", "tmp", "lock"):
            for path in self.directory.glob(f"??/*.{suffix}"):
                path.unlink(missing_ok=True)

    def _path(self, key: str, suffix: str = "kernel") -> Path:
        return self.directory / key[:2] / f"{key}.{suffix}"

    def _write(self, key: str, files: Mapping[str, bytes]) -> None:
        path = self._path(key)
        temporary = self._path(key, f"{os.getpid()}.tmp")
        try:
            temporary.write_bytes(_pack(files))
            temporary.replace(path)
            for leftover in path.parent.glob(f"{key}.*.tmp"):  # of a killed process: this one holds the lock
                leftover.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"lowbit's cache can't be written: {error}; set LOWBIT_CACHE_DIR", stacklevel=2)

    @contextmanager
    def _lock(self, key: str) -> Generator[None]:
        """Hold the entry's lock, or go on without where there is none: the rename keeps entries whole."""
        from filelock import FileLock, Timeout

        path = self._path(key, "lock")
        lock = FileLock(path, timeout=LOCK_TIMEOUT)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, Timeout, NotImplementedError):
            pass
        try:
            yield
        finally:
            lock.release()


def _pack(files: Mapping[str, bytes]) -> bytes:
    index = json.dumps({name: len(content) for name, content in files.items()}).encode()
    body = b"\n".join([index, b"".join(files.values())])
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unpack(data: bytes) -> dict[str, bytes] | None:
    """The files, or None if `data` is not what `_pack` made."""
    digest, _, body = data.partition(b"\n")
    if digest != hashlib.sha256(body).hexdigest().encode():
        return None
    index, _, contents = body.partition(b"\n")
    files: dict[str, bytes] = {}
    start = 0
    for name, size in json.loads(index).items():
        files[name] = contents[start : start + size]
        start += size
    return files
