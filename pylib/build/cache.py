"""The disk cache of compiled kernels.

An entry is one file, named by its key: the SHA-256 of the rest, an index (the key, names and sizes), and the contents.
It appears whole by a rename, or not at all, and is checked whenever it is read: whatever is not what was built for this
key is dropped and built again. Several processes that want the same kernel at once wait for the one that compiles it. A
directory that can't be written costs a warning and the time to compile.

Entries are machine code that is executed. So what others own or may write is not read, with a warning
(`private_files`); in a directory of others nothing is written, either.

The key holds everything that can change the result: what the caller names (spec, schedule, target), the
versions of the tools, and the compiler's own sources.
"""

import hashlib
import json
import os
import shutil
import stat
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from lowbit.pylib.build import knobs
from lowbit.pylib.build import private_files
from lowbit.pylib.build.installed import versions

LOCK_NOTICE = 10.0
"""Seconds to wait for another process that builds the same entry, before saying so."""
LOCK_TIMEOUT = 600.0
"""Seconds to wait after that, before building it as well."""
MAX_ENTRY_BYTES = 1 << 28
"""The largest file that is read as an entry; kernels have a thousandth of it."""

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

Files = dict[str, bytes]
"""The files that the cache keeps of a compilation: contents by name."""
T = TypeVar("T")


def load_or_build(key: str, build: Callable[[], Files], parse: Callable[[Files], T]) -> T:
    """Returns what `parse` reads from the files of entry `key` in the user's cache, or else from what `build` makes.

    Under LOWBIT_NO_CACHE always the latter.
    """
    return parse(build()) if knobs.no_cache() else Cache().get_or_build(key, build, parse)


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
    """Returns the SHA-256 of the compiler's sources: dialect/, passes/, and the files of pylib that decide what is in an
    entry.

    Tables of schedules do not count: a schedule is in the key itself, and a new entry leaves other kernels alone.
    The contents of files count, not their times, which reproducible images and packages make all alike.
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
    """Contents of a cache."""

    directory: Path
    entries: int
    bytes: int


@dataclass(frozen=True)
class Cache:
    """A directory of entries; safe under any number of threads and processes, and when one is killed."""

    directory: Path = field(default_factory=knobs.cache_dir)

    def get(self, key: str) -> Files | None:
        """The files of an entry by name, or None where there is none; one that is damaged is deleted."""
        return None if self._is_of_others(key) else self._read(key, dict)

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Make or replace an entry. A disk that can't be written, or that others may write, costs a warning."""
        if self._is_of_others(key):
            return
        with self._lock(key):
            self._write(key, files)

    def get_or_build(self, key: str, build: Callable[[], Files], parse: Callable[[Files], T]) -> T:
        """Returns what `parse` reads from the entry, or else from what `build` makes, which is then kept.

        An entry that `parse` can't read is built anew. Exceptions of `build` pass through. Where others may write to the
        directory, nothing is read or kept.
        """
        if self._is_of_others(key):
            return parse(build())
        found = self._read(key, parse)
        if found is not None:
            return found
        with self._lock(key):
            found = self._read(key, parse)  # another process may have built it while this one waited
            if found is None:
                files = build()
                found = parse(files)
                self._write(key, files)
        return found

    def info(self) -> CacheInfo:
        """Returns the folder of the cache, the number of its entries and their bytes."""
        sizes: list[int] = []
        for path in self.directory.glob("??/*.kernel"):
            with suppress(OSError):  # another process may have deleted it
                sizes.append(path.lstat().st_size)
        return CacheInfo(self.directory, len(sizes), sum(sizes))

    def clear(self) -> None:
        """Delete every entry, and what killed processes left behind."""
        for suffix in ("kernel", "tmp", "lock"):
            for path in self.directory.glob(f"??/*.{suffix}"):
                _delete(path)

    def _path(self, key: str, suffix: str = "kernel") -> Path:
        return self.directory / key[:2] / f"{key}.{suffix}"

    def _is_of_others(self, key: str) -> bool:
        """Tells whether others may put entries into the directory, or into that of this key; if so, warns."""
        for folder in (self.directory, self.directory / key[:2]):
            with suppress(OSError):  # it is made when something is written
                if private_files.warn_of_others(folder, folder.stat()):
                    return True
        return False

    def _read(self, key: str, parse: Callable[[Files], T]) -> T | None:
        """Returns what `parse` makes of an entry, or None where there is none; a file that can't be read as one is deleted."""
        path = self._path(key)
        try:
            return parse(_unpack(_contents(path), key))
        except OSError:
            return None
        except Exception:  # An error of `parse` itself comes up again, when it reads what was just built.
            _delete(path)
            return None

    def _write(self, key: str, files: Mapping[str, bytes]) -> None:
        path = self._path(key)
        temporary = self._path(key, f"{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            private_files.write(temporary, _pack(files, key))
            temporary.replace(path)
            for leftover in path.parent.glob(f"{key}.*.tmp"):  # of a killed process: this one holds the lock
                _delete(leftover)
        except OSError as error:
            # The same text for every kernel, so that Python shows it once.
            warnings.warn(
                f"lowbit's cache in {self.directory} can't be written ({error.strerror}), so every process compiles its "
                "kernels anew; set LOWBIT_CACHE_DIR to a directory that can be",
                stacklevel=2,
            )
        finally:
            _delete(temporary)

    @contextmanager
    def _lock(self, key: str) -> Generator[None]:
        """Hold the entry's lock, or go on without where there is none: the rename keeps entries whole."""
        from filelock import FileLock, Timeout

        path = self._path(key, "lock")
        lock = FileLock(path, mode=0o600)
        try:
            private_files.make_folder(path.parent)
            try:
                lock.acquire(timeout=LOCK_NOTICE)
            except Timeout:
                _warn_of_wait(path)
                lock.acquire(timeout=LOCK_TIMEOUT)
        except (OSError, NotImplementedError):  # Timeout is an OSError
            pass
        try:
            yield
        finally:
            lock.release()


def _warn_of_wait(path: Path) -> None:
    warnings.warn(
        f"another process has held {path} for {LOCK_NOTICE:.0f} s, to compile the kernel that this one wants; after "
        f"{LOCK_TIMEOUT:.0f} s more, this one compiles it as well (LOWBIT_NO_CACHE=1 does not wait)",
        stacklevel=2,
    )


def _contents(path: Path) -> bytes:
    """The contents of a file. Raises ValueError for what is no file (to read a FIFO would never end) or too large, and
    PermissionError for what others may have written."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_ENTRY_BYTES:
            raise ValueError(f"{path} is no entry of a cache")
        if private_files.warn_of_others(path, about):
            raise PermissionError(f"{path} may be of others")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(about.st_size)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    """Delete a file, if it is there and can be deleted."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _pack(files: Mapping[str, bytes], key: str) -> bytes:
    index = {"key": key, "sizes": {name: len(content) for name, content in files.items()}}
    body = b"\n".join([json.dumps(index).encode(), b"".join(files.values())])
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unpack(data: bytes, key: str) -> Files:
    """The files. Raises an exception of some kind if `data` is not what `_pack` makes for this key."""
    digest, _, body = data.partition(b"\n")
    if digest != hashlib.sha256(body).hexdigest().encode():
        raise ValueError("the contents do not have this hash")
    line, _, contents = body.partition(b"\n")
    index = json.loads(line)
    if index["key"] != key:
        raise ValueError(f"the entry is that of {index['key']}, not of {key}")
    files: Files = {}
    start = 0
    for name, size in index["sizes"].items():
        files[name] = contents[start : start + size]
        start += size
    return files
