"""Programs for this machine's CPU that run one behind the other in one native call, in torch's threads (`CpuChain`).

A chain is made once for so many tokens. Where its arrays are is given in every call, so it holds no address that could
go stale, and any number of Python's threads may run it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_void_p, cast
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowbit.passes.cpu.layer_plans import STEP_WORDS, Attend, Chain, LayerPlan, Norm, Rope
from lowbit.passes.cpu.task import ENTRY, LINE
from lowbit.pylib.build import knobs
from lowbit.pylib.build.host_programs import load_plan
from lowbit.pylib.runtime import cpu_threads
from lowbit.pylib.runtime.cpu import CpuMatmul
from lowbit.pylib.runtime.machine_code import load

WORKSPACE = 1
"""The argument of a chain that is the address of its workspace; others follow, and argument 0 is the number 0."""


@dataclass(frozen=True)
class Argument:
    """A word of a task that a call gives, plus so many bytes."""

    index: int
    byte: int = 0

    def behind(self, nbytes: int) -> Argument:
        """Returns the place so many bytes further on."""
        return Argument(self.index, self.byte + nbytes)


Word = int | Argument


@dataclass
class Workspace:
    """Memory of a call: buffers on cache lines of their own.

    nbytes   of the most that is taken at once
    """

    nbytes: int = 0
    _taken: int = 0

    def take(self, nbytes: int) -> Argument:
        """Returns where a new buffer begins."""
        start = self._taken
        self._taken += -(-nbytes // LINE) * LINE
        self.nbytes = max(self.nbytes, self._taken)
        return Argument(WORKSPACE, start)

    @contextmanager
    def scope(self) -> Generator[None]:
        """What is taken within is free for the steps behind: a step begins when those before it are done."""
        before = self._taken
        yield
        self._taken = before


@dataclass(frozen=True)
class Step:
    """A program in a chain.

    call      its function, as ctypes has it
    words     of its task, behind the counters
    numbers   that its task has
    """

    call: Any
    words: tuple[Word, ...]
    numbers: int


def between_step(
    plan: Norm | Rope | Attend, pieces: int, x: Word, y: Word, words: Mapping[str, Word], scratch: Word = 0
) -> Step:
    """Returns the step of a program between matmuls. words: by name those of `plan.words` that it reads."""
    more = (words.get(name, 0) for name in plan.words)
    return Step(_function(plan, knobs.cpu()), (pieces, 0, x, y, scratch, 0, *more), pieces)


def matmul_step(
    mm: CpuMatmul, m: int, threads: int, x: Word, y: Word, operands: Sequence[Word], workspace: Workspace
) -> Step:
    """Returns the step of a matmul of m rows, at most `mm.few_tokens`. operands: of `MatmulSpec.call_operands`."""
    program = mm.few()
    parts = program.parts(threads, mm.spec.packing.row_blocks)
    with workspace.scope():
        scratch = workspace.take(program.needs.nbytes(m, threads))
    return Step(program.call, (m, parts, x, y, scratch, 0, *operands), m + parts)


_COUNTERS = 3  # words at the beginning of a task, which start at 0


class CpuChain:
    """Steps that run one behind the other.

    workspace_bytes   of the memory at argument `WORKSPACE`
    """

    def __init__(self, steps: Sequence[Step], workspace: Workspace) -> None:
        self.workspace_bytes = workspace.nbytes
        self._steps, self._call = tuple(steps), _function(Chain(), knobs.cpu())  # which keeps the code in memory
        head, tasks = list[Word]([len(steps)]), list[Word]()
        for step in steps:
            place = 1 + STEP_WORDS * len(steps) + len(tasks)
            head += [cast(step.call, c_void_p).value or 0, 8 * place, step.numbers]
            tasks += [0] * _COUNTERS + [*step.words]
        given = [word if isinstance(word, Argument) else Argument(0, word) for word in (*head, *tasks)]
        self._fixed = np.array([word.byte for word in given], np.int64)
        self._arguments = np.array([word.index for word in given], np.intp)

    def run(self, threads: int, *arguments: Sequence[int] | NDArray[np.int64]) -> None:
        """Runs all steps. arguments: one behind the other, from number `WORKSPACE` on; all memory stays where it is
        until this returns."""
        words = np.concatenate(((0,), *arguments), dtype=np.int64, casting="unsafe")[self._arguments]
        words += self._fixed
        cpu_threads.run(self._call, words.ctypes.data, threads)


@lru_cache(maxsize=256)
def _function(plan: LayerPlan, cpu: str) -> Callable[[int], None]:
    return load(load_plan(plan, cpu), ENTRY)
