"""Every environment variable that lowbit reads. Each is read anew at every use, so a program may set it late.

| variable           | meaning                                                              |
|--------------------|----------------------------------------------------------------------|
| LOWBIT_CACHE_DIR   | where compiled kernels are kept; default: the user's cache directory |
| LOWBIT_NO_CACHE    | 1: compile anew; nothing is read from disk or written to it          |
| LOWBIT_DUMP        | a directory: every stage of every compilation is written there       |
| LOWBIT_LINEINFO    | 1: machine code for GPUs says which line of a program made it        |
| LOWBIT_CPU         | processor to make CPU code for ("x86-64-v3"); default: this one      |
| LOWBIT_NUM_THREADS | threads of a CPU kernel; default: torch's number                     |
| LOWBIT_VLLM        | 1: vLLM runs other libraries' checkpoints in lowbit's kernels        |
"""

import os
import stat
from pathlib import Path

from lowbit.dialect.errors import SpecError

MOST_THREADS = 1024
"""Threads of a CPU kernel. An OpenMP runtime ends the process where it can't have as many as it is asked for."""
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


def cache_dir() -> Path:
    """LOWBIT_CACHE_DIR, or the user's cache directory (``~/.cache/lowbit`` on Linux).

    Raises SpecError for a LOWBIT_CACHE_DIR that can't be a directory.
    """
    if given := os.environ.get("LOWBIT_CACHE_DIR"):
        return _directory("LOWBIT_CACHE_DIR", given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit"
    except RuntimeError:  # no home: a container's odd user, say, who is told that nothing can be kept here
        return Path("/nonexistent/lowbit")


def no_cache() -> bool:
    """LOWBIT_NO_CACHE."""
    return _flag("LOWBIT_NO_CACHE")


def dump_dir() -> Path | None:
    """LOWBIT_DUMP, or None to dump nothing."""
    given = os.environ.get("LOWBIT_DUMP")
    return Path(given).expanduser() if given else None


def line_info() -> bool:
    """LOWBIT_LINEINFO."""
    return _flag("LOWBIT_LINEINFO")


def cpu() -> str:
    """LOWBIT_CPU, or "" for this machine's processor."""
    return os.environ.get("LOWBIT_CPU", "")


def num_threads() -> int | None:
    """LOWBIT_NUM_THREADS, or None where it is not set."""
    given = os.environ.get("LOWBIT_NUM_THREADS")
    if not given:
        return None
    if not given.isdecimal() or len(given) > len(str(MOST_THREADS)) or not 1 <= int(given) <= MOST_THREADS:
        raise SpecError(f"LOWBIT_NUM_THREADS={given!r}; allowed: a whole number from 1 to {MOST_THREADS}")
    return int(given)


def takes_over_vllm() -> bool:
    """LOWBIT_VLLM."""
    return _flag("LOWBIT_VLLM")


def vllm_is_invariant() -> bool:
    """VLLM_BATCH_INVARIANT, which is vLLM's own."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "").strip().lower() in _YES


def _flag(name: str) -> bool:
    given = os.environ.get(name, "").strip().lower()
    if given not in _YES | _NO:
        raise SpecError(f"{name}={given!r}; allowed: 1 or 0")
    return given in _YES


def _directory(name: str, given: str) -> Path:
    """The directory that a variable names: one that is there, or one that can be made."""
    try:
        path = Path(given).expanduser()
        if stat.S_ISDIR(path.stat().st_mode):
            return path
        fault = "it is a file"
    except (FileNotFoundError, PermissionError):
        return path
    except (OSError, RuntimeError) as error:  # a RuntimeError: the user in ~user is unknown
        fault = getattr(error, "strerror", None) or str(error)
    raise SpecError(f"{name}={given!r} can't be used ({fault}); name a directory, which need not exist yet")
