"""The disk cache: what is in a key, and that an entry is whole or absent whatever happens to processes."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from lowbit.dialect.errors import SpecError
from lowbit.dialect.signature import parse_grid
from lowbit.passes.cpu.task import Needs
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.launch import Launch
from lowbit.pylib.build import cache, knobs
from lowbit.pylib.build.cache import Cache
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.build.host_programs import HostProgram
from lowbit.pylib.build.installed import versions

KEY = "ab" + "0" * 62
HANG = 600
"""Seconds after which a process hangs, however busy the machine is."""
FILES = {"kernel.cubin": bytes(range(256)) * 40, "kernel.ptx": b".version 8.0\n", "empty": b""}


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def entry(store: Cache) -> Path:
    (path,) = store.directory.glob("??/*.kernel")
    return path


def unwanted() -> dict[str, bytes]:
    raise AssertionError("built although the entry is there")


def test_round_trip(store: Cache) -> None:
    assert store.get(KEY) is None
    store.put(KEY, FILES)
    assert store.get(KEY) == FILES
    assert store.get(KEY[:-1] + "1") is None
    store.put(KEY, {"other": b"x"})
    assert store.get(KEY) == {"other": b"x"}


def test_get_or_build_builds_once_and_keeps_nothing_of_a_failure(store: Cache) -> None:
    def failing() -> dict[str, bytes]:
        raise SpecError("no")

    with pytest.raises(SpecError, match="no"):
        store.get_or_build(KEY, failing, dict)
    assert store.get(KEY) is None
    assert store.get_or_build(KEY, lambda: FILES, dict) == FILES
    assert store.get_or_build(KEY, unwanted, dict) == FILES


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 100, -1])
def test_a_truncated_entry_is_dropped_and_built_again(store: Cache, length: int) -> None:
    store.put(KEY, FILES)
    path = entry(store)
    path.write_bytes(path.read_bytes()[:length])
    assert store.get(KEY) is None
    assert not path.exists()
    assert store.get_or_build(KEY, lambda: FILES, dict) == FILES
    assert store.get(KEY) == FILES


def test_any_flipped_byte_is_found(store: Cache) -> None:
    small = {"a": b"some", "b": b"thing"}
    store.put(KEY, small)
    path = entry(store)
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        assert store.get(KEY) is None, position
    path.write_bytes(good + b"!")
    assert store.get(KEY) is None


def _count_builds(directory: Path, everyone: Barrier) -> None:
    """Want an entry, and go for its lock when everyone has seen that it is not there."""

    def build() -> dict[str, bytes]:
        (directory / f"built-{os.getpid()}").touch()
        return FILES

    class Together(Cache):
        def _lock(self, key: str) -> AbstractContextManager[None]:
            everyone.wait()
            return super()._lock(key)

    if Together(directory).get_or_build(KEY, build, dict) != FILES:
        raise SystemExit(1)


def test_processes_that_want_one_entry_build_it_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    everyone = fork.Barrier(6, timeout=HANG)
    workers = [fork.Process(target=_count_builds, args=(tmp_path, everyone)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(HANG)
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert len(list(tmp_path.glob("built-*"))) == 1


def _rewrite(directory: Path, value: int) -> None:
    while True:
        Cache(directory).put(KEY, {"value": bytes([value]) * 300_000})


def test_readers_see_whole_entries_while_writers_are_killed(store: Cache) -> None:
    """SIGKILL hits writers at any point: of the write, the rename, or holding the lock."""
    fork = multiprocessing.get_context("fork")
    for value in range(8):
        writers = [fork.Process(target=_rewrite, args=(store.directory, 2 * value + i)) for i in range(2)]
        for writer in writers:
            writer.start()
        seen = 0
        while seen < 5:
            assert all(writer.is_alive() for writer in writers)
            if found := store.get(KEY):
                assert len(found["value"]) == 300_000
                assert len(set(found["value"])) == 1
                seen += 1
        for writer in writers:
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
        assert len(set((store.get(KEY) or {})["value"])) == 1
    store.put(KEY, FILES)  # the locks of the dead are free, and what they left is gone
    assert store.get(KEY) == FILES
    assert not list(store.directory.glob("??/*.tmp"))


def _refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def _other_entry(path: Path) -> None:
    path.write_bytes(cache._pack({"kernel.ptx": b"of another spec"}, "cd" + KEY[2:]))


def _right_hash(index: bytes) -> Callable[[Path], None]:
    body = index + b"\nsomething"
    return lambda path: (path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body), None)[1]


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # no blocks of the disk are in use


@pytest.mark.parametrize(
    "damage",
    [
        _other_entry,
        _huge,
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        _right_hash(b"no json"),
        _right_hash(b"[1, 2]"),
        _right_hash(b'{"key": 1}'),
        _right_hash(b'{"key": "%s", "sizes": {"a": "1"}}' % KEY.encode()),
        _right_hash(b"[" * 100_000),
    ],
    ids=("other", "huge", "fifo", "device", "loop", "text", "list", "number", "size", "deep"),
)
def test_what_is_no_entry_is_replaced(store: Cache, damage: Callable[[Path], None]) -> None:
    store.put(KEY, FILES)
    path = entry(store)
    path.unlink()
    damage(path)
    assert store.get(KEY) is None
    assert store.get_or_build(KEY, lambda: FILES, dict) == FILES
    assert store.get(KEY) == FILES


def test_an_entry_that_its_reader_refuses_is_replaced(store: Cache) -> None:
    def parse(files: dict[str, bytes]) -> bytes:
        return files["kernel.ptx"]

    store.put(KEY, {"something": b"else"})
    assert store.get_or_build(KEY, lambda: FILES, parse) == FILES["kernel.ptx"]
    assert store.get_or_build(KEY, unwanted, parse) == FILES["kernel.ptx"]
    entry(store).unlink()
    with pytest.raises(KeyError):  # what `build` made itself is at fault
        store.get_or_build(KEY, dict, parse)
    assert store.get(KEY) is None


def test_a_disk_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    with pytest.warns(UserWarning, match="LOWBIT_CACHE_DIR"):
        assert Cache(blocker / "cache").get_or_build(KEY, lambda: FILES, dict) == FILES


def test_a_damaged_entry_that_cannot_be_replaced_costs_one_warning(
    store: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [KEY, "cd" + KEY[2:]]
    for key in keys:
        store.put(key, FILES)
    for path in store.directory.glob("??/*.kernel"):
        path.write_bytes(path.read_bytes()[:-5])
    for name in ("write_bytes", "unlink", "mkdir", "replace"):
        monkeypatch.setattr(Path, name, _refuse)
    with pytest.warns(UserWarning, match="LOWBIT_CACHE_DIR") as found:
        assert [store.get_or_build(key, lambda: FILES, dict) for key in keys] == [FILES] * 2
    assert len({str(warning.message) for warning in found}) == 1  # Python shows a text once


def test_a_directory_in_the_place_of_an_entry(store: Cache) -> None:
    (store.directory / KEY[:2] / f"{KEY}.kernel").mkdir(parents=True)
    with pytest.warns(UserWarning, match="can't be written"):
        assert store.get_or_build(KEY, lambda: FILES, dict) == FILES
    assert not list(store.directory.glob("??/*.tmp"))
    store.clear()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_leaves_nothing_behind(store: Cache) -> None:
    folder = store.directory / KEY[:2]
    folder.mkdir()
    temporary = folder / f"{KEY}.{os.getpid()}-{threading.get_ident()}.tmp"
    temporary.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="No space left on device"):
        assert store.get_or_build(KEY, lambda: FILES, dict) == FILES
    assert not list(folder.glob("*.tmp")) and not temporary.is_symlink()


@pytest.mark.parametrize(
    ("given", "fault"),
    [("x" * 300, "File name too long"), ("/dev/null", "it is a file"), ("/dev/null/x", "Not a directory"),
     ("~no-such-user-at-all/x", "home directory")],
)  # fmt: skip
def test_a_directory_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, given: str, fault: str) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", given)
    with pytest.raises(SpecError, match=rf"LOWBIT_CACHE_DIR='{given}' can't be used \(.*{fault}.*name a directory"):
        Cache()


def _of_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file or folder look as if another user owned it, whoever runs the test."""
    other = path.stat()

    def real(about: os.stat_result) -> os.stat_result:
        if (about.st_ino, about.st_dev) != (other.st_ino, other.st_dev):
            return about
        return os.stat_result((*about[:4], os.geteuid() + 4321, *about[5:]))

    stat, fstat = os.stat, os.fstat
    monkeypatch.setattr(os, "stat", lambda *args, **options: real(stat(*args, **options)))
    monkeypatch.setattr(os, "fstat", lambda descriptor: real(fstat(descriptor)))


def _writable(bits: int) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda path, _: path.chmod(path.stat().st_mode | bits)


OF_OTHERS = {
    "another user": (_of_another, "it belongs to user .*, and this process runs as user .*; delete it, or set LOWBIT_"),
    "the group": (_writable(0o020), "others may write it .*chmod -R go-w"),
    "everyone": (_writable(0o002), "others may write it .*chmod -R go-w"),
}


@pytest.mark.parametrize("who", OF_OTHERS)
def test_an_entry_that_others_may_have_written_is_not_read(
    store: Cache, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    change, message = OF_OTHERS[who]
    store.put(KEY, {"image": b"of a stranger"})
    change(entry(store), monkeypatch)
    with pytest.warns(UserWarning, match=f"does not execute what {entry(store)} holds: {message}") as found:
        assert store.get(KEY) is None
    assert len(found) == 1
    with pytest.warns(UserWarning, match=message):
        assert store.get_or_build(KEY, lambda: FILES, dict) == FILES
    assert store.get_or_build(KEY, unwanted, dict) == FILES  # it was replaced by one of our own


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("who", OF_OTHERS)
def test_a_folder_that_others_may_write_to_is_left_alone(
    store: Cache, monkeypatch: pytest.MonkeyPatch, who: str, inside: bool
) -> None:
    change, message = OF_OTHERS[who]
    store.put(KEY, {"image": b"of a stranger"})
    folder = entry(store).parent if inside else store.directory
    change(folder, monkeypatch)
    before = {path: path.read_bytes() for path in store.directory.glob("??/*")}
    with pytest.warns(UserWarning, match=f"does not execute what {folder} holds: {message}") as found:
        assert store.get(KEY) is None
        assert store.get_or_build(KEY, lambda: FILES, dict) == FILES
        store.put(KEY, FILES)
    assert len({str(warning.message) for warning in found}) == 1  # Python shows a text once
    assert {path: path.read_bytes() for path in store.directory.glob("??/*")} == before


def test_nobody_else_may_write_what_is_made(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = Cache(tmp_path / "a" / "b")
        store.put(KEY, FILES)
    finally:
        os.umask(before)
    made = list((tmp_path / "a").rglob("*"))
    assert entry(store) in made and len(made) >= 3
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a", *made) if path.is_dir()} == {0o700}


def test_folders_as_they_were_made_before_still_serve(store: Cache) -> None:
    store.put(KEY, FILES)
    for path in (store.directory, entry(store).parent):
        path.chmod(0o755)
    entry(store).chmod(0o644)
    assert store.get_or_build(KEY, unwanted, dict) == FILES


@pytest.mark.parametrize(
    ("code", "needs"), [(b"", {}), (b"code", {"per_worker": -8}), (b"code", {"panel": 1.5})]
)
def test_code_that_cannot_be_loaded_is_a_damaged_entry(store: Cache, code: bytes, needs: dict[str, int]) -> None:
    good = HostProgram(b"code", Needs())
    store.put(KEY, HostProgram(code, Needs(**needs)).to_files())
    assert store.get_or_build(KEY, good.to_files, HostProgram.from_files) == good
    assert store.get_or_build(KEY, unwanted, HostProgram.from_files) == good


def test_an_empty_cubin_is_a_damaged_entry(store: Cache) -> None:
    launch = Launch("kernel", parse_grid((1, 1, 1)), 32, 0, ())
    good = Artifact(launch, "ptx", b"cubin", Schedule())
    store.put(KEY, replace(good, cubin=b"").to_files())
    assert store.get_or_build(KEY, good.to_files, Artifact.from_files) == good


def test_a_lock_that_stays_taken_does_not_stop_a_build(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr(cache, "LOCK_NOTICE", 0)
    monkeypatch.setattr(cache, "LOCK_TIMEOUT", 0)
    store.put(KEY, FILES)
    entry(store).unlink()
    lock = store.directory / KEY[:2] / f"{KEY}.lock"
    with FileLock(lock), pytest.warns(UserWarning, match=f"another process has held {lock}.*compiles it as well"):
        assert store.get_or_build(KEY, lambda: FILES, dict) == FILES
    assert store.get(KEY) == FILES


def test_info_and_clear(store: Cache) -> None:
    assert store.info().entries == 0
    store.put(KEY, FILES)
    store.put("cd" + KEY[2:], FILES)
    info = store.info()
    assert (info.directory, info.entries) == (store.directory, 2)
    assert info.bytes > 2 * sum(map(len, FILES.values()))
    store.clear()
    assert store.info().entries == 0
    assert not [path for path in store.directory.glob("??/*") if path.is_file()]


def test_load_or_build_obeys_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("LOWBIT_NO_CACHE", "1")
    assert cache.load_or_build(KEY, lambda: FILES, dict) == FILES
    assert not (tmp_path / "a").exists()
    monkeypatch.setenv("LOWBIT_NO_CACHE", "0")
    assert cache.load_or_build(KEY, lambda: FILES, dict) == FILES
    assert cache.load_or_build(KEY, unwanted, dict) == FILES
    assert Cache().directory == tmp_path / "a"
    monkeypatch.setenv("LOWBIT_CACHE_DIR", str(tmp_path / "b"))
    assert Cache().get(KEY) is None


def test_a_warm_start_reads_one_file_and_takes_no_lock(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, FILES)
    read: list[Path] = []
    contents = cache._contents
    monkeypatch.setattr(cache, "_contents", lambda path: read.append(path) or contents(path))
    monkeypatch.setattr(Cache, "_lock", unwanted)
    assert store.get_or_build(KEY, unwanted, dict) == FILES
    assert read == [entry(store)]


@dataclass(frozen=True)
class A:
    n: int
    scale: float = 1.0


@dataclass(frozen=True)
class B:
    n: int
    scale: float = 1.0


def test_keys_differ_where_the_inputs_do() -> None:
    parts: list[dict[str, object]] = [
        {"spec": A(1)},
        {"spec": B(1)},
        {"spec": A(2)},
        {"spec": A(1, 1.0 + 2**-52)},
        {"spec": A(1), "schedule": None},
        {"spec": 1},
        {"spec": "1"},
        {"spec": 1.0},
        {"spec": True},
        {"spec": (1, 2)},
        {"spec": ((1,), 2)},
        {"spec": "1,2"},
        {"other": A(1)},
        {"spec": {"a": 1}},
        {"spec": {"a": None}},
    ]
    keys = [cache.key(**part) for part in parts]
    assert len(set(keys)) == len(parts)
    assert keys == [cache.key(**part) for part in parts]
    assert cache.key(a=1, b=2) == cache.key(b=2, a=1)
    with pytest.raises(TypeError, match="object"):
        cache.key(spec=object())


def test_the_key_depends_on_sources_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.key(spec=1)
    monkeypatch.setattr(cache, "source_fingerprint", lambda: "other")
    other_sources = cache.key(spec=1)
    monkeypatch.undo()
    monkeypatch.setattr(cache, "tool_versions", lambda: "other")
    assert len({before, other_sources, cache.key(spec=1)}) == 3
    monkeypatch.undo()
    assert cache.key(spec=1) == before


def test_the_fingerprint_sees_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one byte that leaves size and time alone, a new file, and a renamed one."""
    for folder in ("dialect", "passes/deep", "pylib/build", "pylib/cli"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("build/driver.py", "build/cache.py", "cli/main.py"):
        (tmp_path / "pylib" / name).touch()
    source = tmp_path / "passes/deep/a.py"
    source.write_text("x = 1")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "pylib/build/cache.py"))

    def fingerprint() -> str:
        return cache.source_fingerprint.__wrapped__()

    seen = [fingerprint()]
    stat = source.stat()
    source.write_text("x = 2")
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    seen.append(fingerprint())
    (tmp_path / "passes/table.json").write_text("{}")
    seen.append(fingerprint())
    source.rename(tmp_path / "passes/deep/b.py")
    seen.append(fingerprint())
    (tmp_path / "pylib/build/driver.py").write_text("x = 1")
    seen.append(fingerprint())
    assert len(set(seen)) == 5
    (tmp_path / "pylib/cli/main.py").write_text("x = 1")
    (tmp_path / "passes/__pycache__").mkdir()
    (tmp_path / "passes/__pycache__/a.pyc").write_text("")
    assert fingerprint() == seen[-1]


def test_versions_are_those_that_importlib_finds() -> None:
    names = ("torch", "torch-mlir", "llvmlite", "nvidia-nvjitlink", "PyTest_xdist", "no-such-package")

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    assert versions(*names) == {name: version(name) for name in names}


def test_versions_of_odd_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("One_A-1.0.dist-info", "two.b-2.0.post1-py3.11.egg-info", "three.egg-info", "four-4.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nothing"), str(tmp_path)])
    expected = {"one-a": "1.0", "two.b": "2.0.post1", "three": None, "four": None}
    assert versions(*expected) == expected


def test_bindings_of_another_wheel_have_entries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What imports as torch_mlir need not be torch-mlir, whose version says nothing then."""
    library = tmp_path / "torch_mlir" / "_mlir_libs" / "libMLIR.so"
    library.parent.mkdir(parents=True)
    library.write_text("one")
    monkeypatch.syspath_prepend(tmp_path)
    seen = {cache.tool_versions.__wrapped__()}
    library.write_text("other")
    seen.add(cache.tool_versions.__wrapped__())
    (tmp_path / "torch_mlir-20261001.dist-info").mkdir()
    seen.add(cache.tool_versions.__wrapped__())
    library.write_text("a third")
    seen.add(cache.tool_versions.__wrapped__())
    assert len(seen) == 3


def test_making_a_key_imports_no_compiler(repo: Path) -> None:
    """With a warm cache neither MLIR nor LLVM is loaded; and the key is the same in every process."""
    code = (
        "import sys\n"
        "from lowbit.pylib.build import cache\n"
        "print(cache.key(spec=1))\n"
        "print([m for m in ('torch_mlir', 'mlir', 'llvmlite', 'torch', 'filelock') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [cache.key(spec=1), "[]"]


def test_knobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CACHE_DIR", "NO_CACHE", "DUMP", "CPU", "NUM_THREADS"):
        monkeypatch.delenv(f"LOWBIT_{name}", raising=False)
    assert knobs.cache_dir().name == "lowbit"
    assert (knobs.no_cache(), knobs.dump_dir(), knobs.cpu(), knobs.num_threads()) == (False, None, "", None)
    monkeypatch.setenv("LOWBIT_DUMP", "~/dump")
    monkeypatch.setenv("LOWBIT_NUM_THREADS", "12")
    monkeypatch.setenv("LOWBIT_NO_CACHE", "Yes")
    monkeypatch.setenv("LOWBIT_CPU", "x86-64-v3")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert knobs.dump_dir() == tmp_path / "dump"
    assert (knobs.no_cache(), knobs.cpu(), knobs.num_threads()) == (True, "x86-64-v3", 12)


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "1025", "100000", "9" * 20, "9" * 5000])
def test_knobs_name_a_bad_value(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("LOWBIT_NUM_THREADS", given)
    with pytest.raises(SpecError, match=r"LOWBIT_NUM_THREADS.*whole number from 1 to 1024"):
        knobs.num_threads()
    monkeypatch.setenv("LOWBIT_NO_CACHE", "maybe")
    with pytest.raises(SpecError, match="LOWBIT_NO_CACHE='maybe'; allowed: 1 or 0"):
        knobs.no_cache()
