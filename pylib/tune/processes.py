"""The processes of a tuning session: many that compile, and one that owns the GPU.

Kernels get from the first to the last through the disk cache. Whatever a kernel does, the session goes on: one that
crashes its compiler costs a new pool, one that fails on the GPU, or never ends, costs a new GPU process (a CUDA context
does not survive an illegal access, and only the end of its process ends a kernel).
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from lowbit.dialect.errors import LowbitError, SpecError, TargetError
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.build import knobs
from lowbit.pylib.tune.problem import Problem

MOST_JOBS = 16  # they compile 50 kernels a second; the GPU times 20
START_SECONDS = 180.0  # for the GPU process to load torch and make a context
LIMIT_SECONDS = 20.0  # for one request to it, new weights included
MOST_DEATHS = 5  # of processes, in a row

# Not forked: a CUDA context does not survive that.
_processes = multiprocessing.get_context("spawn")


class Failed(Exception):
    """One schedule can't be compiled or measured, for the reason given; others may."""


class Compilers:
    """Processes that compile into the disk cache, below everyone else's priority. Raises SpecError if there is no
    cache, TargetError if there is no compiler.

    jobs: how many processes; without it one per core, up to MOST_JOBS
    """

    def __init__(self, target: Target, jobs: int | None = None) -> None:
        if knobs.no_cache():
            raise SpecError("tuning hands kernels over through the disk cache; unset LOWBIT_NO_CACHE")
        import_module("lowbit.dialect.bindings")  # here once, rather than a failure for every schedule
        self._target = target
        self._jobs = jobs or min(MOST_JOBS, len(os.sched_getaffinity(0)))
        self._deaths = 0
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._jobs, mp_context=_processes, initializer=_stand_back)

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, problem: Problem, schedule: KernelSchedule) -> Future[str]:
        """Compile a kernel. The result is its `kernel_id`, or what went wrong, as Failed."""
        work = _compile, problem, self._target.name, schedule
        try:
            return self._pool.submit(*work)
        except BrokenProcessPool:
            self._deaths += 1
            if self._deaths >= MOST_DEATHS:
                raise LowbitError(
                    f"{MOST_DEATHS} times a process died that compiled kernels, now for ({problem}), perhaps for want "
                    "of memory; start again with fewer --jobs: what has been measured is kept"
                ) from None
            self._pool = self._start()
            return self._pool.submit(*work)


def _stand_back() -> None:
    """Leave the processors to the process that measures, and what to do about Ctrl-C to the first."""
    os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile(problem: Problem, target: str, schedule: KernelSchedule) -> str:
    try:
        artifact = problem.kernel(schedule, parse_target(target))
    except LowbitError as error:
        raise Failed(str(error)) from None
    return kernel_id(artifact.ptx)


def kernel_id(ptx: str) -> str:
    """Tells kernels apart: 12 hexadecimal digits."""
    return hashlib.sha256(ptx.encode()).hexdigest()[:12]


class GpuProcess:
    """Measures and checks kernels in a process of its own, which is started when it is needed.

    Methods raise Failed for a kernel that can't be launched or does not end, and TargetError if the process dies
    whatever it is asked.
    """

    def __init__(self, target: Target, serve: Callable[[Connection, str], None] | None = None) -> None:
        self._target, self._serve = target, serve or _serve
        self._process: Any = None
        self._deaths = 0

    def __enter__(self) -> GpuProcess:
        self._start()  # now, or the first matmul's share of a session's time would go into it
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def time(self, problem: Problem, schedule: KernelSchedule, replays: int) -> float:
        """Microseconds per call."""
        return self._ask("time", problem, schedule, replays)

    def check(self, problem: Problem, schedule: KernelSchedule) -> bool:
        """Tells whether every output is within what rounding explains."""
        return self._ask("check", problem, schedule)

    def _ask(self, *request: object) -> Any:
        if self._process is None:
            self._start()
        try:
            self._pipe.send(request)
            value, failed = self._receive(LIMIT_SECONDS)
        except (EOFError, OSError, TimeoutError) as error:
            self._stop()
            self._deaths += 1
            what = str(error) if isinstance(error, TimeoutError) else "the process that used the GPU died"
            if self._deaths >= MOST_DEATHS:
                what = f"{what}, {MOST_DEATHS} times in a row"
                raise TargetError(f"{what}; see nvidia-smi, start again: what has been measured is kept") from None
            raise Failed(what) from None
        self._deaths = 0
        if failed:
            raise Failed(failed)
        return value

    def _start(self) -> None:
        self._pipe, other = _processes.Pipe()
        self._process = _processes.Process(target=self._serve, args=(other, self._target.name), daemon=True)
        self._process.start()
        other.close()
        try:
            self._receive(START_SECONDS)
        except (EOFError, OSError, TimeoutError) as error:
            self._stop()
            raise TargetError(f"no process could be started that uses the GPU ({error}); see nvidia-smi") from None

    def _receive(self, seconds: float) -> tuple[Any, str]:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer from the GPU in {seconds:.0f} s")
        return self._pipe.recv()

    def _stop(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(pipe: Connection, target: str) -> None:
    """The GPU process: answers (value, "") or (None, what went wrong), and ends when nobody listens."""
    import torch

    from lowbit.pylib.tune.gpu import Stand

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stand = Stand(parse_target(target))
    pipe.send((None, ""))
    while True:
        try:
            what, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(stand, what)(*arguments), ""
        except LowbitError as error:  # such as more registers than a block may have
            torch.cuda.synchronize()  # ends the process where no other kernel would run either
            answer = None, str(error)
        pipe.send(answer)
