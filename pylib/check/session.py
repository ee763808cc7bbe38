"""Many cases at once: in processes, so that one that dies takes no other with it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice

import torch

from lowbit.dialect.errors import SpecError
from lowbit.pylib.check.cases import Case, draw
from lowbit.pylib.check.trial import Attempt, Outcome, try_case

_AHEAD = 8  # cases that wait for each process
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
    begun: deque[tuple[Case, ProcessPoolExecutor, Future[Outcome] | None]] = deque()
    try:
        while True:
            for case in islice(left, _AHEAD * jobs - len(begun)):
                begun.append((case, pool, _begun(pool, case, attempt)))
            if not begun:
                return
            case, its_pool, future = begun.popleft()
            if outcome := _result(future):
                yield outcome
                continue
            pool = _pool(jobs) if its_pool is pool else pool
            yield _alone(case, attempt)
    finally:
        pool.shutdown(cancel_futures=True)


def _begun(pool: ProcessPoolExecutor, case: Case, attempt: Attempt) -> Future[Outcome] | None:
    """Hands a case to a process; returns None if one has died."""
    try:
        return pool.submit(attempt, case)
    except BrokenProcessPool:
        return None


def _result(future: Future[Outcome] | None) -> Outcome | None:
    """Returns the outcome of a case, or None if a process died that had it or could have had it."""
    try:
        return future.result() if future else None
    except BrokenProcessPool:
        return None


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
