"""What tests keep from one run to the next, and from one worker to the other: compiled kernels, what the assembler made
of them, and what the emulator made of launches.

- A kernel is a function of the request, of the compiler's sources and of the tools' versions: the key of the user's
  cache (`pylib.build.cache.key`). So a change that leaves `dialect/` and `passes/` alone compiles nothing again.
- A cubin, with the assembler's notes, is a function of the PTX, of the target and of the assembler's version.
- A launch in the emulator is a function of the PTX, of what is in memory, of the options and of the emulator. So a
  change of the compiler that leaves a kernel's PTX alone does not emulate it again.

All of it is in the key, with its contents; packing, the reference and its bounds are computed in every run. What fails
is never kept. Nothing is kept or taken while a test has replaced what it is made by (`patches.py`), and nothing is kept
of code that was loaded after a source had changed under a run.

The folder is LOWBIT_TEST_CACHE, or build/test-cache; `pytest --fresh` neither reads nor fills it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache, wraps
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.passes import pipeline
from lowbit.passes.codegen import cubin
from lowbit.passes.codegen.cubin import Cubin, Resources
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.launch import Launch
from lowbit.passes.pipeline import CompiledKernel
from lowbit.passes.target import Target
from lowbit.pylib import emulator
from lowbit.pylib.build import cache
from lowbit.pylib.build.cache import Cache, Files
from lowbit.pylib.emulator import Emulator, Stats, observer
from lowbit.pylib.runtime.tensor_map import TensorMap
from pytests import patches

FOLDER = "LOWBIT_TEST_CACHE"
MOST_BYTES = 1 << 30
"""Before the tests begin, what has not been used for longest is deleted from a folder that has more."""

made: Counter[str] = Counter()
"""How many kernels were compiled, cubins assembled, and launches emulated, to be kept, in this process."""

_ROOT = Path(__file__).resolve().parent.parent
_EMULATOR = (
    *("pylib/emulator/**/*.py", "pylib/runtime/tensor_map.py", "passes/launch.py"),
    *("dialect/signature.py", "dialect/fields.py", "dialect/errors.py"),
)
_ASSEMBLER = ("passes/codegen/cubin.py", "passes/target.py")
_OWN = ("pytests/kept.py",)
_CODE = ("dialect/**/*.py", "passes/**/*.py", "pylib/**/*.py", *_OWN)


def default_folder() -> str:
    """Where results are kept unless LOWBIT_TEST_CACHE says otherwise."""
    return str(_ROOT / "build" / "test-cache")


def use() -> None:
    """From now on compile kernels, and emulate launches, only where nothing is kept of them."""
    patches.watch()
    state_of_sources()
    cache.source_fingerprint()
    pipeline.compile_kernel = kept_kernel(pipeline.compile_kernel)
    cubin.assemble = kept_cubin(cubin.assemble)
    emulator.Emulator = KeptEmulator


def trim(folder: Path, most: int = MOST_BYTES) -> None:
    """Delete what has not been used for longest from a folder that has grown too large, down to half of its limit."""
    entries = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("??/*.kernel"))
    total = sum(size for _, size, _ in entries)
    goal = most // 2 if total > most else total
    for _, size, path in entries:
        if total <= goal:
            break
        path.unlink(missing_ok=True)
        total -= size


# -- kernels


def kept_kernel(compile_kernel: Callable[..., CompiledKernel]) -> Callable[..., CompiledKernel]:
    """Returns `compile_kernel` for tests: it takes what is kept, where no stage but the PTX is asked for."""

    @wraps(compile_kernel)
    def kernel(
        request: KernelRequest, keep: bool = False, lines: bool = False, origins: bool = False
    ) -> CompiledKernel:
        def build() -> Files:
            made["kernel"] += 1
            compiled = compile_kernel(request, False, lines)
            files = {"launch": json.dumps(compiled.launch.to_dict()).encode(), "ptx": compiled.ptx.encode()}
            assert _kernel(request, files) == compiled, "there is more in a kernel than what is kept"
            return files

        if keep or origins or any(map(_compiles, patches.homes())):
            return compile_kernel(request, keep, lines, origins)
        key = cache.key(kernel=request, lines=lines, by=_fingerprint(_OWN))
        return _kernel(request, get_or_make(key, build))

    return kernel


def _kernel(request: KernelRequest, files: Files) -> CompiledKernel:
    launch = Launch.from_dict(json.loads(files["launch"]))
    return CompiledKernel(launch, request.target, request.schedule, {"ptx": files["ptx"].decode()})


def _compiles(home: str) -> bool:
    """Whether a module may have a part in compiling: any but most of pylib, which the compiler does not import."""
    return not home.startswith("lowbit.pylib.") or home.startswith("lowbit.pylib.build")


# -- cubins


def kept_cubin(assemble: Callable[[str, Target], Cubin]) -> Callable[[str, Target], Cubin]:
    """Returns `assemble` for tests."""

    @wraps(assemble)
    def assembled(ptx: str, target: Target) -> Cubin:
        def make() -> Files:
            made["cubin"] += 1
            result = assemble(ptx, target)
            return {"image": result.image, "resources": json.dumps(asdict(result.resources)).encode()}

        if not target.is_gpu or any(map(_compiles, patches.homes())):
            return assemble(ptx, target)
        files = get_or_make(_key(_ASSEMBLER, cubin.assembler().version, target, ptx), make)
        return Cubin(files["image"], Resources(**json.loads(files["resources"])))

    return assembled


# -- launches


class KeptEmulator(Emulator):
    """An emulator that runs a launch once. It reads PTX that an earlier one has read only when it is wanted."""

    def __init__(self, ptx: str) -> None:
        self._ptx, self._reading = ptx, threading.RLock()
        if not _may_keep_launches():
            self._read()
            return

        def read() -> Files:
            self._read()
            return {"read": b"yes"}

        get_or_make(_key(_EMULATOR, "read", ptx), read)

    def _read(self) -> None:
        with self._reading:
            if "module" not in vars(self):
                latest = vars(self).get("stats")
                super().__init__(self._ptx)
                self.stats = latest or self.stats

    def __getattr__(self, name: str) -> Any:
        """Anything that is not there before the PTX is read."""
        if "_reading" in vars(self):
            self._read()
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def run(self, launch: Launch, arguments: Mapping[str, object], **options: Any) -> None:
        """Bring memory into the state after a launch."""
        given = {p.name: arguments.get(p.name, NotImplemented) for p in launch.params}
        arrays = {name: array for name, value in given.items() if (array := _array(value)) is not None}
        if not (_may_keep_launches() and all(map(_is_plain, given.values())) and _are_whole(arrays.values())):
            super().run(launch, arguments, **options)
            return

        def changes() -> Files:
            made["launch"] += 1
            before = {name: array.tobytes() for name, array in arrays.items()}
            super(KeptEmulator, self).run(launch, arguments, **options)
            after = {name: array.tobytes() for name, array in arrays.items()}
            changed = {f"memory {name}": after[name] for name in after if after[name] != before[name]}
            return changed | {"stats": _stats_text(self.stats)}

        files = get_or_make(_key(_EMULATOR, self._ptx, launch, sorted(options.items()), *_told(given)), changes)
        for name, array in arrays.items():
            if content := files.get(f"memory {name}"):
                array.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)
        self.stats = _stats(files["stats"])


def _may_keep_launches() -> bool:
    return observer.current() is None and not any(map(_emulates, patches.homes()))


@lru_cache(maxsize=None)
def _emulates(home: str) -> bool:
    """Whether a module may have a part in emulating: any but those of lowbit that the emulator does not import."""
    modules = (file.removesuffix("/**/*.py").removesuffix(".py").replace("/", ".") for file in _EMULATOR)
    return not home.startswith("lowbit.") or home.startswith(tuple(f"lowbit.{module}" for module in modules))


def _array(value: object) -> np.ndarray | None:
    held = value.address if isinstance(value, TensorMap) else value
    return held if isinstance(held, np.ndarray) else None


def _is_plain(value: object) -> bool:
    """Whether all that there is to say of an argument is in its key."""
    array = _array(value)
    if array is not None:
        return array.flags.c_contiguous and array.flags.writeable and array.dtype != object
    return value is None or isinstance(value, bool | int | float | np.generic)


def _are_whole(arrays: Iterable[np.ndarray]) -> bool:
    """Whether of any two arrays that share memory, each has all of it."""
    return all(_place(a) == _place(b) for a, b in combinations(arrays, 2) if np.may_share_memory(a, b))


def _place(array: np.ndarray) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def _told(given: Mapping[str, object]) -> Iterator[object]:
    """Yields all that is to be known of arguments: their kinds and numbers, the contents of memory, and which of them
    are the same memory."""
    places: list[tuple[int, int]] = []
    for name, value in sorted(given.items()):
        yield name, _about(value)
        array = _array(value)
        if array is not None:
            places.append(_place(array))
            yield places.index(places[-1])
            yield array.tobytes()


def _about(value: object) -> str:
    """Everything about an argument but the contents of memory."""
    if isinstance(value, TensorMap):
        return str({**vars(value), "address": _about(value.address)})
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)


def _stats_text(stats: Stats) -> bytes:
    return json.dumps([dict(stats), stats.global_bytes_loaded, stats.global_bytes_stored]).encode()


def _stats(text: bytes) -> Stats:
    counts, loaded, stored = json.loads(text)
    return Stats(Counter(counts), loaded, stored)


# -- the store


State = list[tuple[Path, int, int]]
"""Files with their sizes and times."""


def get_or_make(key: str, make: Callable[[], Files], sources: State | None = None) -> Files:
    """Returns what is kept under a key, or else what is made, which is kept unless a source of the code has changed."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return make()
    store = Cache(Path(folder))
    found = store.get(key)
    if found is not None:
        _mark_used(store, key)
        return {name: zlib.decompress(content) for name, content in found.items()}
    files = make()
    if _are_as_before(sources) if sources else _is_code_as_before():
        store.put(key, {name: zlib.compress(content, 1) for name, content in files.items()})
    return files


_loaded = 0
"""How many modules there were when the sources were last found to be as they were; 0 where they are to be looked at."""


def _is_code_as_before() -> bool:
    """Tells whether what runs is from the sources as they were when this run began. To look at all of them takes as
    long as to keep something, so it is done where a module has been loaded since: what is in memory stays as it is."""
    global _loaded
    if len(sys.modules) != _loaded:
        if not _are_as_before(state_of_sources()):
            return False
        _loaded = len(sys.modules)
    return True


def _are_as_before(before: State) -> bool:
    return state(file for file, *_ in before) == before


def _mark_used(store: Cache, key: str) -> None:
    with suppress(OSError):  # it is not there any more, or not ours
        os.utime(store.directory / key[:2] / f"{key}.kernel")


def _key(sources: tuple[str, ...], *parts: object) -> str:
    digest = hashlib.sha256(_fingerprint((*sources, *_OWN)).encode())
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode()
        digest.update(f"\n{len(content)}\n".encode() + content)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def state_of_sources() -> State:
    """The files that the code of this run is from, as they were when it began."""
    return state(_files(_CODE))


def state(files: Iterable[Path]) -> State:
    """How files are now."""
    about = ((file, file.stat()) for file in files)
    return [(file, stat.st_size, stat.st_mtime_ns) for file, stat in about]


def emulator_sources() -> list[Path]:
    """The files that decide what becomes of a launch."""
    return _files(_EMULATOR)


@lru_cache(maxsize=None)
def _fingerprint(patterns: tuple[str, ...]) -> str:
    """SHA-256 of sources, and of the versions of Python and NumPy."""
    global _loaded
    _loaded = 0  # a source may have been edited before it was read here
    digest = hashlib.sha256(f"{sys.version} {np.__version__}".encode())
    for file in _files(patterns):
        digest.update(f"{file.relative_to(_ROOT)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _files(patterns: Iterable[str]) -> list[Path]:
    return sorted(file for pattern in patterns for file in _ROOT.glob(pattern))
