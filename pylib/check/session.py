"""Many cases at once: in processes, so that one that dies takes no other with it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice

import torch

from lowbit.dialect.errors import SpecError
from lowbit.pylib.check.cases import Case, draw
from lowbit.pylib.check.trial import Attempt, Outcome, try_case

_AHEAD = 8  # cases for each process, until the next are handed out
_processes = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork


class Drawn:
    """Random cases of a target: as many as are wanted, and the choices that `MatmulSpec` refuses on the way.

    Case i of a seed is the same, however many are drawn.
    """

    def __init__(self, target: str, wanted: int, seed: int) -> None:
        self.target, self.wanted, self.seed = target, wanted, seed
        self.refused: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Case]:
        return islice(self._legal(), self.wanted)

    def _legal(self) -> Iterator[Case]:
        for number in count():
            try:
                yield draw(random.Random(f"{self.seed} {number}"), self.target, number)
            except SpecError as error:
                self.refused[str(error)] += 1


def outcomes(cases: Iterable[Case], jobs: int, attempt: Attempt = try_case) -> Iterator[Outcome]:
    """Yields what becomes of each case, in order, from so many processes. Kernels are not kept in the disk cache.

    attempt: makes an outcome of a case, in another process
    """
    left, pool = iter(cases), _pool(jobs)
    try:
        while some := list(islice(left, _AHEAD * jobs)):
            done = _done(pool, some, attempt)
            yield from (future.result() if future else _alone(case, attempt) for case, future in zip(some, done))
            if None in done:
                pool = _pool(jobs)
    finally:
        pool.shutdown(cancel_futures=True)


def _done(pool: ProcessPoolExecutor, cases: Sequence[Case], attempt: Attempt) -> list[Future[Outcome] | None]:
    """Returns the futures of cases when all have ended; None for those that a process took with it that died."""
    try:
        futures = [pool.submit(attempt, case) for case in cases]
    except BrokenProcessPool:  # before all were handed out
        return [None] * len(cases)
    wait(futures)
    return [None if isinstance(future.exception(), BrokenProcessPool) else future for future in futures]


def _alone(case: Case, attempt: Attempt) -> Outcome:
    """Returns what becomes of a case in a process of its own, which may die of it."""
    with _pool(1) as pool:
        try:
            return pool.submit(attempt, case).result()
        except BrokenProcessPool:
            return Outcome(case, "wrong", detail="its process died")


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=_processes, initializer=_begin)


def _begin() -> None:
    """Prepares a process: it has one thread, keeps kernels to itself, and leaves Ctrl-C to the process that reports."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["LOWBIT_NO_CACHE"] = "1"
    torch.set_num_threads(1)
