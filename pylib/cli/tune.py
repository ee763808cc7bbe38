"""The command `lowbit tune`: its options, and the search. Slow imports wait until it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from lowbit.dialect.errors import SpecError
from lowbit.dialect.fields import MOST
from lowbit.pylib.cli.output import errors
from lowbit.pylib.cli.spec_options import TopK
from lowbit.pylib.cli.tune_tables import print_call, use_tables, write

if TYPE_CHECKING:
    from lowbit.passes.kernels.base import KernelSchedule
    from lowbit.passes.scheduling.tables import Entry
    from lowbit.passes.target import Target
    from lowbit.pylib.tune.log import Log
    from lowbit.pylib.tune.problem import Problem
    from lowbit.pylib.tune.session import Progress, Tuner

Names = Annotated[list[str] | None, typer.Argument(help="Sizes (4096x11008), models, layers (Llama-2-7B/qkv).")]
GroupSizes = Annotated[
    str, typer.Option("--group-sizes", "-g", help="Columns that share a scale; row for one scale per row.")
]
Tokens = Annotated[str, typer.Option("--tokens", "-m", help="Token tiles; any numbers for experts.")]
Preset = Annotated[
    str | None,
    typer.Option(
        help="What the tables that come with lowbit have: decode, models, prefill, eight_bit; or not: unknown."
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Measure first calls against a table, or a search for sizes, instead.")
]


@dataclass(frozen=True)
class Limits:
    """Limits of a search.

    candidates   schedules per matmul and token tile; None: as many as pay
    seconds      in all
    jobs         processes that compile; None: one per core
    """

    candidates: int | None
    seconds: float
    jobs: int | None


def tune(
    what: Names = None,
    weights: Annotated[str, typer.Option("--weights", "-w", help="Formats.")] = "u4",
    group_sizes: GroupSizes = "128",
    tokens: Tokens = "1,8,16,32,64",
    acts: Annotated[str, typer.Option(help="Types of x.")] = "f16",
    zeros: Annotated[str, typer.Option(help="Kinds of zero points.")] = "none",
    scale: Annotated[str | None, typer.Option(help="Type of the scales; without it, as x.")] = None,
    compute: Annotated[str, typer.Option(help="Types of products: none (of x), f8e4m3, i8, i8+fold ...")] = "none",
    experts: Annotated[
        int, typer.Option("--experts", min=1, max=MOST, help="Experts that share the rows of sizes, n in all.")
    ] = 1,
    top_k: TopK = None,
    preset: Preset = None,
    candidates: Annotated[
        int | None, typer.Option(help="Schedules per matmul and token tile.", min=1, max=MOST)
    ] = None,
    seconds: Annotated[float, typer.Option(help="For all: less time, fewer candidates each.", min=1)] = math.inf,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Processes that compile.", min=1, max=1024)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Table to add to.")] = None,
    log: Annotated[Path | None, typer.Option(help="Measurements; a session goes on where its log ends.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Join tables, the latest last, instead.")] = False,
    check: Check = False,
    stale: Annotated[bool, typer.Option("--stale", help="List what is out of date in a table instead.")] = False,
) -> None:
    """Search for the fastest schedules on this machine's GPU. Lists are separated by commas.

    The winners go into the user's table for the GPU, which goes before the ones that come with lowbit.

    [bold]Examples[/]

      lowbit tune Llama-3.1-8B -w u4,u8 -g 128,row

      lowbit tune 8192x8192 8192x28672 -w nf4 -g 64 -m 1,16 --acts f16,bf16

      lowbit tune 8192x8192 -m 512,1024,8192 --compute none,f8e4m3

      lowbit tune Qwen3-30B-A3B -w u4 -m 1,8,64,512       experts, as those of 196608x2048 --experts 128 --top-k 8

      lowbit tune --preset decode --seconds 480

      lowbit tune --check nvidia_h200.json          how good is what a matmul gets that is not in the table?

      lowbit tune --check --preset unknown          and what matmuls get that no table has?

      lowbit tune --stale nvidia_h200.json          which measurements are of kernels that have changed since?

      lowbit tune --merge old.json new.json -o nvidia_h200.json
    """
    names = what or []
    of_tables = all(name.endswith(".json") for name in names) and not preset
    if merge or stale or (check and of_tables):
        use_tables(names, merge, check, stale, jobs, output)
        return
    work = _problems(names, preset, weights, group_sizes, tokens, acts, zeros, scale, compute, experts, top_k)
    if check:
        _check_unknown(work, Limits(candidates, seconds, jobs), output)
    else:
        _search(work, Limits(candidates, seconds, jobs), output, log)


def _top_k(experts: int, top_k: int | None) -> int:
    """Returns how many experts a token has. Raises SpecError where there are not so many."""
    if experts == 1 and top_k is not None:
        raise SpecError(f"--top-k={top_k} says how many experts a token has: give their number, --experts")
    found = min(2, experts) if top_k is None else top_k
    if found > experts:
        raise SpecError(f"--top-k={top_k} must be in 1..{experts}, the experts that there are (--experts)")
    return found


def _problems(
    names: list[str],
    preset: str | None,
    weights: str,
    group_sizes: str,
    tokens: str,
    acts: str,
    zeros: str,
    scale: str | None,
    compute: str,
    experts: int = 1,
    top_k: int | None = None,
) -> list[Problem]:
    """Returns the matmuls of a preset, then those of sizes, models and layers."""
    from lowbit.pylib.tune.model_shapes import matmul_sizes
    from lowbit.pylib.tune.work import preset_problems, problems

    of_preset = preset_problems(preset) if preset else []
    if preset and not names:
        return of_preset
    if not names:
        raise SpecError("lowbit tune needs shapes: sizes such as 4096x11008, models or their layers, or --preset")
    groups = [None if size == "row" else _integer("--group-sizes", size) for size in _list(group_sizes)]
    tiles = [_integer("--tokens", tile) for tile in _list(tokens)]
    more = _list(acts), _list(zeros), scale, _list(compute)
    sizes = matmul_sizes(names, experts, _top_k(experts, top_k))
    of_sizes = problems(sizes, _list(weights), groups, tiles, *more)
    return list(dict.fromkeys([*of_preset, *of_sizes]))


def _search(work: list[Problem], limits: Limits, output: Path | None, log: Path | None) -> None:
    """Search for schedules, and write the table anew after each matmul."""
    import lowbit
    from lowbit.passes.scheduling.tables import Table, read_table
    from lowbit.pylib.build import cache
    from lowbit.pylib.build import user_tables as schedules
    from lowbit.pylib.tune import session as tuner
    from lowbit.pylib.tune.log import Log
    from lowbit.pylib.tune.work import with_kernels

    gpu, target = tuner.this_gpu()
    work = with_kernels(work, target)
    path = output or schedules.user_file(gpu)
    table = read_table(path) if path.exists() else Table(gpu, target.capability, tuner.MADE, {})
    if table.gpu != gpu:
        raise SpecError(f"{path} is a table for {table.gpu}, but this GPU is {gpu}; name another with -o")
    measured = Log(log or path.with_suffix(".jsonl"), gpu)
    version = f"{lowbit.__version__}+{cache.source_fingerprint()[:8]}"
    found = 0
    with TuneProgress() as progress, _tuner(target, measured, limits, progress, version) as search:
        for entry in search.run(work):
            table = table.replaced(entry)
            write(table, path)
            found += 1
    errors.print(f"{found} of {len(work)} matmuls measured", markup=False)
    errors.print(f"wrote {path}: {len(table.entries)} schedules", markup=False)


def _check_unknown(work: list[Problem], limits: Limits, output: Path | None) -> None:
    """Measure first calls of these matmuls against a search, whose log nobody needs later; with `output`, as JSON."""
    from lowbit.pylib.tune import check as tune_check
    from lowbit.pylib.tune import session as tuner
    from lowbit.pylib.tune.log import Log
    from lowbit.pylib.tune.work import with_kernels

    gpu, target = tuner.this_gpu()
    work = with_kernels(work, target)
    calls: list[tune_check.FirstCall] = []
    with TemporaryDirectory() as folder:
        measured = Log(Path(folder) / "log.jsonl", gpu)
        with _tuner(target, measured, limits, tuner.Silent()) as search:
            for call in tune_check.first_calls_of_unknown(work, search):
                calls.append(call)
                print_call(call)
                if output:
                    output.write_text(tune_check.to_text(calls, gpu), encoding="utf-8")
    errors.print(tune_check.summary(calls), markup=False)


@contextmanager
def _tuner(target: Target, log: Log, limits: Limits, progress: Progress, version: str = "") -> Iterator[Tuner]:
    """Yields a tuner whose processes for the compiler and the GPU end with the context."""
    from lowbit.pylib.tune import processes as tune_processes
    from lowbit.pylib.tune import session as tuner

    many = limits.candidates or tuner.CANDIDATES
    compilers, stand = tune_processes.Compilers(target, limits.jobs), tune_processes.GpuProcess(target)
    with compilers, stand:
        yield tuner.Tuner(target, version, log, stand, compilers.submit, progress, many, limits.seconds)


class TuneProgress:
    """A bar of matmuls, and a line for each that is done; the lines alone where there is no terminal."""

    def __init__(self) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, TextColumn("{task.description}"), console=errors, disable=not errors.is_terminal)
        self._bar = self._bars.add_task("", total=None)

    def __enter__(self) -> TuneProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, problems: int) -> None:
        self._bars.update(self._bar, total=problems)

    def timed(self, problem: Problem, count: int) -> None:
        self._bars.update(self._bar, description=f"{problem}: {count}")

    def finished(self, problem: Problem, entry: Entry | None, first: float, timed: int) -> None:
        self._bars.advance(self._bar)
        found = "no schedule gives the right result"
        if entry:
            gain = f"{first / entry.microseconds:.2f} x the rule's" if math.isfinite(first) else "the rule's fails"
            found = f"{entry.microseconds:.2f} µs ({gain}, best of {timed}) with {brief(entry.schedule)}"
        errors.print(f"{problem}: {found}", markup=False)


def brief(s: KernelSchedule) -> str:
    """A schedule in a line."""
    from lowbit.passes.scheduling.tables import spelled_out

    return ", ".join(f"{name}={value}" for name, value in spelled_out(s).items())


def _list(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _integer(option: str, text: str) -> int:
    if not text.isdecimal():
        raise SpecError(f"{option}: {text!r} must be a whole number")
    return int(text)
