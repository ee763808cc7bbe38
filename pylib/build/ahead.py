"""Compiles kernels ahead of their use, in processes of their own, which put them into the disk cache.

Such a process is `python -m lowbit.pylib.build.ahead`: it reads requests one by one, and answers each when the cache has
its kernel. It is none of multiprocessing's: daemons, as the workers of a server are, may not start those, which would
also import the caller's main module again.

This process goes on meanwhile. If it loads a kernel that is asked for here, it waits for all of them (`in_flight.py`).
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import BinaryIO, cast

from lowbit.dialect.errors import LowbitError
from lowbit.passes.kernels.base import KernelRequest
from lowbit.pylib.build import in_flight, knobs
from lowbit.pylib.build.driver import is_kept, load

MOST_JOBS = 16
_GIVES_WAY = 10  # added to the niceness of processes, since the caller goes on


class Ahead:
    """Compiles kernels while the caller goes on. Without a disk cache it does nothing.

    jobs      how many processes there may be; None: one for each core, up to MOST_JOBS
    wait      what is called when one of the kernels is loaded for the first time, and calls `finish`; None: `finish`
    compiled  how many kernels they have been given: those that the cache did not have

    A kernel that can't be compiled is left out: its error comes to whoever asks for the kernel later. `LOWBIT_DUMP`
    names files after the matmul, which no request knows, so nothing is compiled ahead then, either.
    """

    def __init__(self, jobs: int | None = None, wait: Callable[[], None] | None = None) -> None:
        self.jobs = jobs or min(MOST_JOBS, len(os.sched_getaffinity(0)))
        self.compiled = 0
        self._wait = wait or self.finish
        self._asked: dict[KernelRequest, None] = {}
        self._left = SimpleQueue[KernelRequest | None]()
        self._threads: list[threading.Thread] = []

    def start(self, kernels: Iterable[KernelRequest]) -> None:
        """Begin to compile kernels, those left out that have been asked for before."""
        if knobs.no_cache() or knobs.dump_dir():
            return
        new = [kernel for kernel in kernels if kernel not in self._asked]
        self._asked |= dict.fromkeys(new)
        in_flight.announce(new, self._wait)
        for kernel in new:
            self._left.put(kernel)
        for _ in range(min(len(new), self.jobs - len(self._threads))):
            self._threads.append(threading.Thread(target=self._work, name="lowbit-ahead", daemon=True))
            self._threads[-1].start()

    @property
    def is_asked(self) -> bool:
        """Whether there are kernels that those who load them wait for."""
        return bool(self._asked)

    def close(self) -> None:
        """Have the processes end when they have compiled what was asked for, whether or not anyone waits for that."""
        for _ in self._threads:
            self._left.put(None)

    def finish(self) -> None:
        """Wait until the cache has all kernels that could be compiled, and the processes have ended."""
        self.close()
        for thread in self._threads:
            thread.join()
        in_flight.take_back(self._asked)

    def _work(self) -> None:
        """Have a process compile what is left, one kernel after the other."""
        process: subprocess.Popen[bytes] | None = None
        while (kernel := self._left.get()) is not None:
            if is_kept(kernel):
                continue
            self.compiled += 1
            try:
                process = process or _started()
                _compile(process, kernel)
            except OSError:  # there is no process, or it died of this kernel; others get another
                process = None
        if process:
            with suppress(OSError):
                pickle.dump(None, cast(BinaryIO, process.stdin))  # a fork of this process keeps its input open
                process.communicate()


def _started() -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "lowbit.pylib.build.ahead"]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _compile(process: subprocess.Popen[bytes], kernel: KernelRequest) -> None:
    """Returns when a process has compiled a kernel. Raises OSError for one that has ended."""
    requests, answers = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
    pickle.dump(kernel, requests)
    requests.flush()
    if not answers.read(1):
        raise BrokenPipeError


def serve() -> None:
    """Compile what comes on the standard input until it ends, or None comes; on the standard output goes a byte for
    each."""
    os.nice(_GIVES_WAY)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    with suppress(EOFError, BrokenPipeError):  # the caller has ended, or wants no more
        while kernel := pickle.load(sys.stdin.buffer):
            with suppress(LowbitError):
                load(kernel, "ahead")
            answers.write(b".")


if __name__ == "__main__":
    serve()
