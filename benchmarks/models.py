"""Language models with random weights, in several formats: each has a process that makes and compiles its model, at the
same time as the others, and then they are timed one after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import record_lines
from benchmarks.environment import environment
from benchmarks.peers import MODEL_PEERS
from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import choice
from lowbit.pylib.model_speed.config import model_config
from lowbit.pylib.model_speed.measure import (
    Measurement,
    Options,
    format_name,
    measure_prepared,
    model_bytes,
    prepare,
)
from lowbit.pylib.model_speed.random_model import random_model
from lowbit.pylib.model_speed.runner import Runner, Step
from lowbit.pylib.quantization.config import QuantConfig

Save = Callable[[Sequence[Measurement]], None]
PREPARE, TIME = "prepare", "time"
COMPILE_THREADS = 3
"""Of torch's compiler in each process."""
WORKSPACE = 5
"""GB that a process takes besides its weights."""


@dataclass(frozen=True)
class Job:
    """A model in one format. None stands for bf16.

    peer   another library whose layers the model has, by its name among `MODEL_PEERS`; "" for none
    """

    model: str
    layers: int | None
    quantization: QuantConfig | None
    steps: tuple[Step, ...]
    options: Options
    peer: str = ""

    @property
    def name(self) -> str:
        weight = self.peer or format_name(self.quantization)
        return f"{self.model}, {weight}{', lm_head' * self.options.lm_head}{', not fused' * (not self.options.fuse)}"

    def make_model(self, device: str | None = None) -> nn.Module:
        """Returns the model. On "meta" it takes no memory, and peers' layers are left out."""
        config, options = model_config(self.model, self.layers), self.options
        make = MODEL_PEERS[self.peer].linear if self.peer else None
        make = (lambda _: nn.Identity()) if make and device == "meta" else make
        place = device or options.device
        return random_model(config, self.quantization, place, fuse=options.fuse, lm_head=options.lm_head, make=make)

    @cached_property
    def gigabytes(self) -> float:
        """About what it takes in memory: weights, a cache, what is in between, and the compiled kernels."""
        most = replace(self, quantization=QuantConfig("u8", None), peer="") if self.peer else self  # more than any peer
        return model_bytes(most.make_model("meta")) / 1e9 + WORKSPACE


def jobs_of(
    model: str,
    formats: Sequence[QuantConfig | None],
    steps: tuple[Step, ...],
    options: Options,
    *,
    layers: int | None = None,
    with_lm_head: bool = True,
    peers: Sequence[str] = (),
) -> list[Job]:
    """Returns a job for each format and peer, and another one with a low-bit output layer for the first low-bit format.

    Raises SpecError for a peer that is unknown or not installed.
    """
    for name in peers:
        if missing := MODEL_PEERS[choice("peer", name, tuple(MODEL_PEERS))].missing():
            raise SpecError(f"peer {name!r}: {missing}")
    jobs = [Job(model, layers, quantization, steps, options) for quantization in formats]
    if with_lm_head:
        both = replace(options, lm_head=True)
        first = next((each for each in formats if each and not each.compute), None)
        jobs += [Job(model, layers, first, steps, both)] if first else []
    return jobs + [Job(model, layers, None, steps, replace(options, fuse=False), name) for name in peers]


def measure_models(jobs: Sequence[Job], log: Callable[[str], None], save: Save) -> None:
    """Run jobs side by side; `save` is given all measurements whenever each has done another of its steps.

    A step is timed when all processes have compiled theirs and wait: no other work is on the GPU. A job that fails is
    left out from there on, and the log says why.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(COMPILE_THREADS))
    measured: list[Measurement] = []
    for wave in waves(jobs):
        workers = [Worker(job) for job in wave]
        while workers:
            workers = [worker for worker in workers if worker.ask(PREPARE, log)]
            workers = [worker for worker in workers if worker.answer(log)]
            for worker in workers:
                result = worker.ask(TIME, log) and worker.answer(log)
                if result:
                    measured.append(result)
                    log(f"{result.name}, {result.step}: {result.seconds * 1e3:.3f} ms")
            save(measured)


def waves(jobs: Sequence[Job], gigabytes: float | None = None) -> list[list[Job]]:
    """Returns jobs in groups whose models are in memory at the same time; on a CPU one group.

    gigabytes   of memory that there are; None: those of the GPU
    """
    if gigabytes is None and not any(job.options.device == "cuda" for job in jobs):
        return [list(jobs)]
    room = torch.cuda.get_device_properties(0).total_memory / 1e9 if gigabytes is None else gigabytes
    found: list[list[Job]] = [[]]
    for job in jobs:
        if found[-1] and sum(other.gigabytes for other in found[-1]) + job.gigabytes > room:
            found.append([])
        found[-1].append(job)
    return found


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
        model = job.make_model()
        for step in job.steps:
            connection.recv()  # PREPARE
            runner, compiled = _prepared(job, model, step)
            connection.send("ready")
            connection.recv()  # TIME
            measured = measure_prepared(model, job.quantization, runner, job.options, with_split=True)
            connection.send(_labelled(measured, job, model, compiled))
    except Exception as error:  # of another library it may be any
        connection.send(Failure(f"{type(error).__name__}: {error}"))


def _prepared(job: Job, model: nn.Module, step: Step) -> tuple[Runner, bool]:
    """Returns a step that is ready to be timed, and whether it is compiled: not every peer's layers can be."""
    try:
        return prepare(model, step, job.options), job.options.compiled
    except Exception:
        if not job.peer or not job.options.compiled:
            raise
        return prepare(model, step, replace(job.options, compiled=False)), False


def _labelled(measured: Measurement, job: Job, model: nn.Module, compiled: bool) -> Measurement:
    """Returns a measurement that says what peer it is of."""
    if not job.peer:
        return measured
    peer = MODEL_PEERS[job.peer]
    weight, group_size = peer.model_format or ("", None)
    size = measured.nbytes + sum(map(peer.hidden_bytes, model.modules()))
    return replace(measured, weight=weight, group_size=group_size, nbytes=size, library=job.peer, compiled=compiled)


def write(measured: Sequence[Measurement], model: str, path: Path, commit: str | None) -> None:
    """Add measurements of a model to a file of results, or begin one."""
    known = json.loads(path.read_text()) if path.exists() else {"environment": environment(commit), "models": {}}
    known["models"][model] = [each.to_dict() for each in measured]
    record_lines.write(path, known)


def read(path: Path) -> dict[str, list[Measurement]]:
    """Returns the measurements of a file, by model. Raises SpecError for a file of another kind."""
    try:
        models = json.loads(path.read_text())["models"]
        return {name: [Measurement.from_dict(each) for each in rows] for name, rows in models.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path} is no file of `benchmarks models` ({error!r})") from None
