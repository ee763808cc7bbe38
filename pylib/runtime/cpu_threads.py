"""The threads of the CPU target: those that torch has, from the OpenMP runtime that torch was linked with.

A pool of our own would compete with torch's: after its own work a thread of torch's waits for more without sleeping, on
a core that ours would want. And waking a thread takes 50 us in Python, but 1 us in that runtime. Where it can't be had
(on macOS, or in a process that was forked, whose OpenMP threads are gone), threads of Python's do the work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch


def run(function: Callable[[int], None], task: int, threads: int) -> None:
    """Calls a native function with the address of a task in `threads` threads at once: this one and others.

    The function must do all the work in whichever threads come (`passes.cpu.task`).
    """
    if threads == 1:
        function(task)
    elif _parallel is not None:
        _parallel(function, task, threads, 0)
    else:
        _run_in_python(function, task, threads)


def _run_in_python(function: Callable[[int], None], task: int, threads: int) -> None:
    others = [_pool(os.getpid(), threads).submit(function, task) for _ in range(threads - 1)]
    function(task)
    for other in others:
        if not other.cancel():  # it may not have begun: then all is done already
            other.result()


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads besides the caller's. A forked process has none of its parent's: it makes its own."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="lowbit")


@contextmanager
def alone() -> Generator[None]:
    """Inside, torch's operations in this thread are done by this thread alone: hundreds of small ones are not worth a
    team each, least of all where other processes keep its members from running."""
    before = torch.get_num_threads()
    if _set_threads:
        _set_threads(1)
    try:
        yield
    finally:
        if _set_threads:
            _set_threads(before)


def _openmp(name: str, *types: type[ctypes.c_uint] | type[ctypes.c_void_p]) -> Callable[..., None] | None:
    """A function of the OpenMP runtime that torch has loaded, or None where there is none."""
    libraries = Path(torch.__file__).parent / "lib"
    try:  # a symbol of a library is looked for in those that it was linked with, too
        function = getattr(ctypes.CDLL(str(libraries / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = types, None
    return function


def _forget_openmp() -> None:
    """Forget OpenMP's team in a forked process: its threads did not come along, and would be waited for for ever."""
    global _parallel
    _parallel = None


# GOMP_parallel(function, argument, threads, flags), which GCC's, LLVM's and Intel's runtimes have on Linux.
_parallel = _openmp("GOMP_parallel", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_set_threads = _openmp("omp_set_num_threads", ctypes.c_uint)  # of teams that the calling thread will lead
os.register_at_fork(after_in_child=_forget_openmp)
