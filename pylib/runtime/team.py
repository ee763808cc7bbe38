"""The threads of the CPU target: those that torch has, from the OpenMP runtime that torch was linked with.

A pool of our own would compete with torch's: after its own work a thread of torch's waits for more without sleeping, on
a core that ours would want. And waking a thread takes 50 us in Python, but 1 us in that runtime. Where it can't be had
(on macOS, or in a process that was forked, whose OpenMP threads are gone), threads of Python's do the work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch


def run(function: Callable[[int], None], code: int, task: int, threads: int) -> None:
    """Call a native function, whose address is `code`, with the address of a task in `threads` threads at once: this
    one and others. The function must do all the work in whichever threads come; what they call is `passes.cpu.task`."""
    if threads == 1:
        function(task)
    elif _parallel is not None:
        _parallel(code, task, threads, 0)
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


def _openmp() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags), which GCC's, LLVM's and Intel's runtimes have on Linux."""
    libraries = Path(torch.__file__).parent / "lib"
    try:  # a symbol of a library is looked for in those that it was linked with, too
        parallel = ctypes.CDLL(str(libraries / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _forget_openmp() -> None:
    """In a forked process: its threads did not come along, and the runtime would wait for them for ever."""
    global _parallel
    _parallel = None


_parallel = _openmp()
os.register_at_fork(after_in_child=_forget_openmp)
