"""Compiles kernels ahead of their use, in processes of their own, which put them into the disk cache.

Such a process is `python -m lowbit.pylib.build.ahead`: it reads requests one by one, and answers each when the cache has
its kernel. It is none of multiprocessing's: daemons, as the workers of a server are, may not start those, which would
also import the caller's main module again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import BinaryIO, cast

from lowbit.dialect.errors import LowbitError
from lowbit.passes.kernels.base import KernelRequest
from lowbit.pylib.build import knobs
from lowbit.pylib.build.driver import is_kept, load

MOST_JOBS = 16


class Ahead:
    """Compiles kernels while the caller goes on. Without a disk cache it does nothing.

    jobs      how many processes there may be; None: one for each core, up to MOST_JOBS
    compiled  how many kernels they have been given: those that the cache did not have

    A kernel that can't be compiled is left out: its error comes to whoever asks for the kernel later. `LOWBIT_DUMP`
    names files after the matmul, which no request knows, so nothing is compiled ahead then, either.
    """

    def __init__(self, jobs: int | None = None) -> None:
        jobs = jobs or min(MOST_JOBS, len(os.sched_getaffinity(0)))
        self.compiled = 0
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="lowbit-ahead")
        self._of_thread = threading.local()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._asked: dict[KernelRequest, Future[None]] = {}

    def start(self, kernels: Iterable[KernelRequest]) -> None:
        """Begin to compile kernels, those left out that have been asked for before."""
        if knobs.no_cache() or knobs.dump_dir():
            return
        for kernel in kernels:
            if kernel not in self._asked:
                self._asked[kernel] = self._threads.submit(self._compile, kernel)

    def finish(self) -> None:
        """Wait until the cache has all kernels that could be compiled, and end the processes."""
        wait(self._asked.values())
        self._threads.shutdown()
        for process in self._processes:
            with suppress(OSError):
                process.communicate()

    def _compile(self, kernel: KernelRequest) -> None:
        if is_kept(kernel):
            return
        self.compiled += 1
        with suppress(OSError):  # no process could be started
            process = self._process()
            requests, answers = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
            pickle.dump(kernel, requests)
            requests.flush()
            if not answers.read(1):  # it died of this kernel; others get another process
                self._of_thread.process = None

    def _process(self) -> subprocess.Popen[bytes]:
        """Returns the process of this thread, which is started for the first kernel."""
        found = getattr(self._of_thread, "process", None)
        if found is None:
            found = self._of_thread.process = _started()
            self._processes.append(found)
        return found


def _started() -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "lowbit.pylib.build.ahead"]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def serve() -> None:
    """Compile what comes on the standard input until it ends; on the standard output goes a byte for each."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    while True:
        try:
            kernel = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        with suppress(LowbitError):
            load(kernel, "ahead")
        answers.write(b".")


if __name__ == "__main__":
    serve()
