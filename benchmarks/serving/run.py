"""Measures a model in vLLM in several formats, and keeps what was found in a file of results.

    {"environment": {...}, "settings": {...}, "measurements": [{...}, ...]}

A measurement has

    model, name                  what was served; together they are its key
    kernels                      of vLLM, where its log names them
    start_s, together            seconds until an engine with empty caches is up; engines that were started at once
    warm_start_s                 seconds until it is up when it finds what it compiled before
    start_parts_s, warm_start_parts_s  what these were spent on, by the engine's log
    step_ms                      by the number of requests that are decoded at once
    prefill_tokens_per_s
    throughput                   requests, output tokens and tokens a second, of requests of different lengths
    online                       by the number of users: ttft_ms, tpot_ms, their 99th percentiles, output_tokens_per_s
    failed                       instead of the rest: why it is missing
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from compileall import compile_dir
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from benchmarks import record_lines
from benchmarks.environment import environment
from benchmarks.serving.checkpoints import GPTQ, make
from benchmarks.serving.engine import SETTINGS, Failed, Process, Start
from benchmarks.serving.requests import Load, Record
from lowbit.dialect.errors import SpecError
from lowbit.pylib.cli.bench_model import quantizations
from lowbit.pylib.model_speed.config import model_config
from lowbit.pylib.quantization.config import QuantConfig

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("lowbit", "dialect", "passes", "pylib")

PEERS: dict[str, tuple[str | None, Record]] = {
    "bf16": (None, {}),
    "fp8": (None, {"quantization": "fp8"}),
    "gptq": (GPTQ, {}),
    "gptq+humming": (GPTQ, {"linear_backend": "humming", "moe_backend": "humming"}),
    "gptq+lowbit": (GPTQ, {"quantization": "lowbit"}),
}
"""What others have written: the weights of the folder, and settings of the engine."""


@dataclass(frozen=True)
class Job:
    """A model in a format: a name of PEERS, or a format of lowbit such as u4 or u4:f8e4m3."""

    model: str
    layers: int | None
    name: str
    group_size: int = 128

    @property
    def title(self) -> str:
        return f"{self.model}, {self.layers} layers" if self.layers else self.model

    @property
    def weight(self) -> QuantConfig | str | None:
        """What `checkpoints.make` writes. Raises SpecError for an unknown format."""
        return PEERS[self.name][0] if self.name in PEERS else quantizations(self.name, self.group_size)[0]

    def folder(self, work: Path) -> Path:
        """Returns where the model is, or will be."""
        stored = (self.weight or "bf16") if self.name in PEERS else self.name.replace(":", "-")
        return work / f"{self.title} {stored}".replace(", ", "-").replace(" ", "-")

    def start(self, work: Path, mixture: bool) -> Start:
        """Returns how its engine is started."""
        settings, at = PEERS.get(self.name, (None, {}))[1], self.folder(work)
        name = f"{at.name}-{self.name}".replace(":", "-").replace("+", "-")
        return Start(self.name, at, work / "caches" / name, work / f"{name}.log", settings, mixture)


def serve(
    jobs: Sequence[Job], work: Path, out: Path, together: int, warm: bool, limit: float, log: Callable[[str], None],
    commit: str | None = None,
) -> list[Record]:  # fmt: skip
    """Measure jobs of one model; returns the measurements.

    together  engines that are started at the same time, and measured one after the other
    warm      start engines twice
    limit     seconds after which an engine that says nothing is given up

    Raises SpecError without vLLM, and for models and formats that are not known.
    """
    if find_spec("vllm") is None:
        raise SpecError("this is measured inside vLLM: pip install vllm (docs/howto/vllm.md)")
    config = model_config(jobs[0].model, jobs[0].layers)
    mixture = bool(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None))
    work.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:  # an installed package has its bytecode, and a checkout may not keep it
        compile_dir(ROOT / package, quiet=2)
    make_folders(jobs, work, log)
    load, found = Load(config.vocab_size), list[Record]()
    for at in range(0, len(jobs), together):
        starts = [(job, job.start(work, mixture)) for job in jobs[at : at + together]]
        for record in wave(starts, load, warm, limit, log):
            found = [*(each for each in found if each["name"] != record["name"]), record]
            write(found, out, commit)
    return found


def make_folders(jobs: Sequence[Job], work: Path, log: Callable[[str], None]) -> None:
    """Write the models that are not there yet, each by a process of its own."""
    missing = {job.folder(work): job for job in jobs if not (job.folder(work) / "config.json").exists()}
    with ProcessPoolExecutor(max(1, len(missing)), get_context("spawn")) as processes:
        made = {
            folder: processes.submit(make, folder, job.model, job.layers, job.weight) for folder, job in missing.items()
        }
        for folder, done in made.items():
            done.result()
            log(f"made {folder}")


def wave(
    starts: Sequence[tuple[Job, Start]], load: Load, warm: bool, limit: float, log: Callable[[str], None]
) -> Iterator[Record]:
    """Starts engines at the same time, then measures each; yields a record whenever there is more of it."""
    for _, start in starts:
        start.empty_caches()
    processes = [Process(start, limit) for _, start in starts]
    ready: list[tuple[Job, Process, Record]] = []
    for (job, _), process in zip(starts, processes):
        record: Record = {"model": job.title, "name": job.name, "together": len(starts)}
        with _noting(record, log, process):
            record |= _up("start", process, log)
            ready.append((job, process, record))
        yield record
    for job, process, record in ready:
        with _noting(record, log, process):
            record["kernels"] = process.start.kernels()
            for part in process.measured(load):
                log(f"{job.name}: {json.dumps(part)}")
                for name, value in part.items():
                    record[name] = record[name] | value if isinstance(record.get(name), dict) else value
                yield record
            process.close()
        if warm and "failed" not in record:
            again = Process(process.start, limit)
            with _noting(record, log, again):
                record |= _up("warm_start", again, log)
                again.close()
        yield record


def _up(kind: str, process: Process, log: Callable[[str], None]) -> Record:
    """Returns after how many seconds an engine is up, and what they were spent on."""
    seconds, parts = process.up(), process.parts()
    log(f"{process.start.name}: {kind.replace('_', ' ')} took {seconds:.1f} s: {json.dumps(parts)}")
    return {f"{kind}_s": seconds, f"{kind}_parts_s": parts}


@contextmanager
def _noting(record: Record, log: Callable[[str], None], process: Process) -> Iterator[None]:
    """Notes in a record that an engine failed, and ends its process."""
    try:
        yield
    except Failed as error:
        process.close()
        record["failed"] = str(error)
        log(str(error))


def write(found: Sequence[Record], out: Path, commit: str | None) -> None:
    """Put measurements into a file of results, in place of those of the same model and format."""
    begun = {"environment": environment(commit), "settings": SETTINGS, "measurements": []}
    known = read(out) if out.exists() else begun
    keys = {(record["model"], record["name"]) for record in found}
    kept = [record for record in known["measurements"] if (record["model"], record["name"]) not in keys]
    record_lines.write(out, known | {"measurements": kept + [*found]})


def read(path: Path) -> Record:
    """Returns a file of results. Raises SpecError for a file of another kind."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        assert {"environment", "settings", "measurements"} <= known.keys()
        return known
    except (OSError, ValueError, AssertionError, AttributeError) as error:
        raise SpecError(f"{path} is no file of `benchmarks vllm` ({error!r})") from None
