"""Many cases at once: in processes, so that one that dies takes no other with it."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
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
    while some := list(islice(left, _AHEAD * jobs)):
        try:
            futures = [pool.submit(attempt, case) for case in some]
            wait(futures)
            done = [None if isinstance(future.exception(), BrokenProcessPool) else future for future in futures]
        except BrokenProcessPool:  # before all were handed out
            done = [None] * len(some)
        yield from (future.result() if future else _alone(case, attempt) for case, future in zip(some, done))
        if None in done:
            pool = _pool(jobs)
    pool.shutdown()


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
    """Prepares a process: it has one thread, and keeps kernels to itself."""
    os.environ["LOWBIT_NO_CACHE"] = "1"
    torch.set_num_threads(1)
