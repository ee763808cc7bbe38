"""Language models with random weights, in several formats: each has a process that makes and compiles its model, at the
same time as the others, and then they are timed one after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from lowbit.dialect.errors import LowbitError, SpecError
from lowbit.pylib.model_speed.measure import Measurement, Options, measure_prepared, prepare
from lowbit.pylib.model_speed.random_model import random_model
from lowbit.pylib.model_speed.runner import Step
from lowbit.pylib.model_speed.shapes import model_config
from lowbit.pylib.quantization.config import QuantConfig

Save = Callable[[Sequence[Measurement]], None]
PREPARE, TIME = "prepare", "time"
COMPILE_THREADS = 3
"""Of torch's compiler in each process."""


@dataclass(frozen=True)
class Job:
    """A model in one format. None stands for bf16."""

    model: str
    layers: int | None
    quantization: QuantConfig | None
    steps: tuple[Step, ...]
    options: Options

    @property
    def name(self) -> str:
        weight = "bf16" if self.quantization is None else self.quantization.weight
        return f"{self.model}, {weight}{', lm_head' * self.options.lm_head}{', not fused' * (not self.options.fuse)}"


def jobs_of(
    model: str,
    formats: Sequence[QuantConfig | None],
    steps: tuple[Step, ...],
    options: Options,
    *,
    layers: int | None = None,
    with_lm_head: bool = True,
) -> list[Job]:
    """Returns a job for each format, and for each low-bit one another with a low-bit output layer."""
    jobs = [Job(model, layers, quantization, steps, options) for quantization in formats]
    if with_lm_head:
        both = replace(options, lm_head=True)
        jobs += [Job(model, layers, each, steps, both) for each in formats if each is not None]
    return jobs


def measure_models(jobs: Sequence[Job], log: Callable[[str], None], save: Save) -> None:
    """Run jobs side by side; `save` is given all measurements whenever each has done another of its steps.

    A step is timed when all processes have compiled theirs and wait: no other work is on the GPU. A job that fails is
    left out from there on, and the log says why.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(COMPILE_THREADS))
    workers = [Worker(job) for job in jobs]
    measured: list[Measurement] = []
    while workers:
        workers = [worker for worker in workers if worker.ask(PREPARE, log)]
        workers = [worker for worker in workers if worker.answer(log)]
        for worker in workers:
            result = worker.ask(TIME, log) and worker.answer(log)
            if result:
                measured.append(result)
                log(f"{result.name}, {result.step}: {result.seconds * 1e3:.3f} ms")
        save(measured)


class Worker:
    """The process of a job."""

    def __init__(self, job: Job) -> None:
        context = get_context("spawn")
        self.job, self.left = job, len(job.steps)
        self.connection, there = context.Pipe()
        context.Process(target=_work, args=(job, there), daemon=True).start()
        there.close()

    def ask(self, what: str, log: Callable[[str], None]) -> bool:
        """Tells the process what to do next; returns whether there is something left to do."""
        self.left -= what == PREPARE
        if self.left < 0:
            return False
        try:
            self.connection.send(what)
        except OSError:
            log(f"{self.job.name}: its process has ended")
            return False
        return True

    def answer(self, log: Callable[[str], None]) -> Any:
        """Returns what the process sends next, or None if it has failed."""
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            result = Failure("its process has ended")
        if isinstance(result, Failure):
            log(f"{self.job.name}: {result}")
            return None
        return result


class Failure(str):
    """Why a job can't go on."""


def _work(job: Job, connection: Connection) -> None:
    """Make a model. Compile each step when told to, say so, and send what it takes when told to."""
    try:
        config, options = model_config(job.model, job.layers), job.options
        model = random_model(config, job.quantization, options.device, fuse=options.fuse, lm_head=options.lm_head)
        for step in job.steps:
            connection.recv()  # PREPARE
            runner = prepare(model, step, options)
            connection.send("ready")
            connection.recv()  # TIME
            connection.send(measure_prepared(model, job.quantization, runner, options, with_split=True))
    except (LowbitError, RuntimeError) as error:
        connection.send(Failure(f"{type(error).__name__}: {error}"))


def write(measured: Sequence[Measurement], model: str, path: Path, commit: str | None) -> None:
    """Add measurements of a model to a file of results, or begin one."""
    known = json.loads(path.read_text()) if path.exists() else {"environment": environment(commit), "models": {}}
    known["models"][model] = [each.to_dict() for each in measured]
    path.write_text(json.dumps(known, indent=1) + "\n")


def read(path: Path) -> dict[str, list[Measurement]]:
    """Returns the measurements of a file, by model. Raises SpecError for a file of another kind."""
    try:
        models = json.loads(path.read_text())["models"]
        return {name: [Measurement.from_dict(each) for each in rows] for name, rows in models.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path} is no file of `benchmarks models` ({error!r})") from None
