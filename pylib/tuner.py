"""`lowbit tune`: measures schedules and writes the fastest into a table.

For every matmul and token tile: the candidates of `pylib.search_space` are compiled by other processes, which hand the
kernels over through the disk cache; each is timed shortly, and the best third at length; the winner's output is
checked against the definition before it is recorded. Every measurement is a line of a log, so that a session that was
interrupted goes on where it stopped. Measurements of other sources of the compiler do not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Protocol, cast

from dialect.errors import LowbitError, SpecError, TargetError
from dialect.spec import MatmulSpec
from passes.schedule import Schedule
from passes.schedule_choice import check_tile
from passes.schedule_tables import Entry, Key
from passes.target import Target, parse_target
from pylib import cache, knobs
from pylib.search_space import KEEP, candidates

SHORT, LONG = 3, 15  # replays of a timing
FINALISTS = 1 / 3
MADE = "lowbit tune: the fastest of the candidates of pylib.search_space, in CUDA graphs over 400 MB of weights"


@dataclass(frozen=True)
class Problem:
    """What to find a schedule for: a matmul and a token tile."""

    spec: MatmulSpec
    tile: int

    @property
    def key(self) -> Key:
        return Key.of(self.spec, self.tile)

    def __str__(self) -> str:
        return f"{self.spec}, m = {self.tile}"


def problems(
    shapes: Iterable[tuple[int, int]],
    weights: Sequence[str],
    group_sizes: Sequence[int | None],
    tiles: Sequence[int],
    acts: Sequence[str] = ("f16",),
    zeros: Sequence[str] = ("none",),
    scale: str | None = None,
) -> list[Problem]:
    """All combinations that are matmuls, the tiles of one weight next to each other. scale: None for that of act.

    Raises SpecError if there is none, for the reason that the first has.
    """
    for tile in tiles:
        check_tile(tile)
    found: list[Problem] = []
    refused: list[SpecError] = []
    for (n, k), weight, group, act, zero in product(shapes, weights, group_sizes, acts, zeros):
        given: dict[str, Any] = {"group_size": group, "act": act, "zeros": zero, "scale": scale or act}
        try:
            spec = MatmulSpec(n, k, weight, **given)
        except SpecError as error:
            refused.append(error)
            continue
        found += [Problem(spec, tile) for tile in tiles]
    if refused and not found:
        raise refused[0]
    return found


class Log:
    """Measurements by (matmul, schedule, what was done), each a line of a file: microseconds, 1 or 0 for a check;
    null, which reads as infinity, for what could not be compiled or run."""

    def __init__(self, path: Path, gpu: str) -> None:
        self._path = path
        self._of = {"gpu": gpu, "sources": cache.source_fingerprint()[:16]}
        self._known: dict[tuple[Key, Schedule, str], float] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):  # the process died while it wrote
            path.write_text(text := text[: text.rfind("\n") + 1], encoding="utf-8")
        for line in text.splitlines():
            values = json.loads(line)
            if {name: values[name] for name in self._of} == self._of:
                known = Key(**values["key"]), Schedule(**values["schedule"]), values["what"]
                self._known[known] = math.inf if values["value"] is None else values["value"]

    def get(self, key: Key, schedule: Schedule, what: str) -> float | None:
        return self._known.get((key, schedule, what))

    def add(self, key: Key, schedule: Schedule, what: str, value: float) -> None:
        self._known[key, schedule, what] = value
        about = {"key": asdict(key), "schedule": asdict(schedule), "what": what}
        line = json.dumps(self._of | about | {"value": value if math.isfinite(value) else None})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Progress(Protocol):
    """Who wants to know how far it is."""

    def start(self, compilations: int, timings: int) -> None: ...

    def compiled(self) -> None: ...

    def timed(self) -> None: ...

    def finished(self, problem: Problem, entry: Entry | None) -> None: ...


Timer = Callable[[Problem, Schedule, int], float]  # replays -> microseconds per call
Check = Callable[[Problem, Schedule], bool]
Submit = Callable[[MatmulSpec, Schedule], "Future[str]"]  # compile it: "" or what is wrong


@dataclass
class Tuner:
    """The search, apart from what needs a GPU: `timer` and `check`."""

    target: Target
    version: str
    log: Log
    timer: Timer
    check: Check
    submit: Submit
    progress: Progress
    keep: int = KEEP

    def run(self, work: Sequence[Problem]) -> Iterator[Entry]:
        """The fastest right schedule of each problem, as soon as it is known. Raises LowbitError if a process that
        compiles dies."""
        plan = [(problem, candidates(problem.spec, problem.tile, self.target, self.keep)) for problem in work]
        missing = [(p, [s for s in each if self.log.get(p.key, s, "short") is None]) for p, each in plan]
        finalists = sum(self._finalists(len(each)) for _, each in plan)
        self.progress.start(sum(len(each) for _, each in missing), sum(len(each) for _, each in plan) + finalists)
        compiling = [{s: self._compile(p, s) for s in each} for p, each in missing]
        for (problem, each), futures in zip(plan, compiling):
            entry = self._best(problem, each, futures)
            self.progress.finished(problem, entry)
            if entry:
                yield entry

    def _compile(self, problem: Problem, schedule: Schedule) -> Future[str]:
        future = self.submit(problem.spec, schedule)
        future.add_done_callback(lambda _: self.progress.compiled())
        return future

    @staticmethod
    def _finalists(count: int) -> int:
        return math.ceil(count * FINALISTS)

    def _best(self, problem: Problem, each: list[Schedule], compiling: dict[Schedule, Future[str]]) -> Entry | None:
        key = problem.key
        for schedule, future in compiling.items():
            if self._result(problem, future):
                self.log.add(key, schedule, "short", math.inf)
        short = {s: self._time(problem, s, SHORT, "short") for s in each}
        best = sorted(short, key=lambda s: short[s])[: self._finalists(len(each))]
        long = {s: self._time(problem, s, LONG, "long") if math.isfinite(short[s]) else math.inf for s in best}
        for schedule in sorted(long, key=lambda s: long[s]):
            if not math.isfinite(long[schedule]):
                break
            right = self.log.get(key, schedule, "right")
            if right is None:
                right = float(self.check(problem, schedule))
                self.log.add(key, schedule, "right", right)
            if right:
                return Entry(key, schedule, long[schedule], date.today().isoformat(), self.version)
        return None

    def _result(self, problem: Problem, future: Future[str]) -> str:
        try:
            return future.result()
        except BrokenProcessPool:
            raise LowbitError(
                f"a process died while it compiled kernels of ({problem}), perhaps for want of memory; start again "
                "with fewer --jobs: what has been measured is kept"
            ) from None

    def _time(self, problem: Problem, schedule: Schedule, replays: int, what: str) -> float:
        known = self.log.get(problem.key, schedule, what)
        if known is None:
            known = self.timer(problem, schedule, replays)
            self.log.add(problem.key, schedule, what, known)
        self.progress.timed()
        return known


@contextmanager
def compile_pool(target: Target, jobs: int | None = None) -> Generator[Submit]:
    """Processes that compile into the disk cache, one per core unless told otherwise. Raises SpecError if there is no
    cache."""
    import multiprocessing

    if knobs.no_cache():
        raise SpecError("tuning hands kernels over through the disk cache; unset LOWBIT_NO_CACHE")
    # Not forked: this process may hold a CUDA context, which a fork would break.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield lambda spec, schedule: pool.submit(_compile, spec, target.name, schedule)
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(spec: MatmulSpec, target: str, schedule: Schedule) -> str:
    from pylib.artifact import Artifacts

    try:
        Artifacts(spec, parse_target(target), schedule).kernel(schedule.tokens)
    except LowbitError as error:
        return str(error)
    return ""


class GraphTimer:
    """Times on this machine's GPU, with the weights of one matmul kept from call to call."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._spec: MatmulSpec | None = None
        self._weights: list[Any] = []

    def __call__(self, problem: Problem, schedule: Schedule, replays: int) -> float:
        import torch

        from pylib import timing
        from pylib.matmul import Matmul
        from pylib.packed import TORCH

        spec = problem.spec
        if spec is not self._spec:
            self._weights.clear()
            torch.cuda.empty_cache()
            self._spec, self._weights = spec, timing.copies(timing.random_weight(spec))
        try:
            mm = Matmul(spec, self._target, schedule)
            x = torch.randn(problem.tile, spec.k, device="cuda").to(TORCH[spec.act])
            calls = [partial(mm, x, w) for w in self._weights]
            return timing.graph_time(calls, replays, least_us=1000.0 if replays == SHORT else 2000.0).median
        except LowbitError:  # such as more registers than a block may have
            return math.inf


def check_on_gpu(problem: Problem, schedule: Schedule) -> bool:
    """Whether every output is within what rounding explains."""
    from pylib.trial import run_trial

    return run_trial(problem.spec, problem.tile, schedule=schedule).right


def this_gpu() -> tuple[str, Target]:
    """Name and target of the GPU to tune for. Raises TargetError where there is none."""
    import torch

    from pylib.matmul import this_machine

    if not torch.cuda.is_available():
        raise TargetError(
            "lowbit tune measures kernels and needs an NVIDIA GPU; tables from other machines are joined by "
            "lowbit tune --merge A.json B.json"
        )
    return cast(str, torch.cuda.get_device_name()), parse_target(this_machine())
