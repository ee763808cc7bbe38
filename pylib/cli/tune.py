"""The command `lowbit tune`. What is slow to import is imported when it runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from lowbit.dialect.errors import SpecError

if TYPE_CHECKING:
    from lowbit.passes.kernels.base import KernelSchedule
    from lowbit.passes.scheduling.tables import Entry, Table
    from lowbit.pylib.tune.check import FirstCall
    from lowbit.pylib.tune.problem import Problem

console = Console(stderr=True, highlight=False, soft_wrap=True)


def tune(
    what: Annotated[
        list[str] | None, typer.Argument(help="Sizes (4096x11008), models, layers (Llama-2-7B/qkv).")
    ] = None,
    weights: Annotated[str, typer.Option("--weights", "-w", help="Formats.")] = "u4",
    group_sizes: Annotated[
        str, typer.Option("--group-sizes", "-g", help="Columns that share a scale; row for one scale per row.")
    ] = "128",
    tokens: Annotated[str, typer.Option("--tokens", "-m", help="Token tiles.")] = "1,8,16,32,64",
    acts: Annotated[str, typer.Option(help="Types of x.")] = "f16",
    zeros: Annotated[str, typer.Option(help="Kinds of zero points.")] = "none",
    scale: Annotated[str | None, typer.Option(help="Type of the scales; without it, as x.")] = None,
    compute: Annotated[str, typer.Option(help="Types of products: none (of x), f8e4m3, f8e4m3+fold, i8.")] = "none",
    preset: Annotated[
        str | None,
        typer.Option(help="What the tables that come with lowbit have: decode, prefill, eight_bit; or not: unknown."),
    ] = None,
    candidates: Annotated[int | None, typer.Option(help="Schedules per matmul and token tile.", min=1)] = None,
    seconds: Annotated[float, typer.Option(help="For all: less time, fewer candidates each.", min=1)] = math.inf,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Processes that compile.", min=1)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Table to add to.")] = None,
    log: Annotated[Path | None, typer.Option(help="Measurements; a session goes on where its log ends.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Join tables, the latest last, instead.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Measure first calls against a table, or a search for sizes, instead.")
    ] = False,
    stale: Annotated[bool, typer.Option("--stale", help="List what is out of date in a table instead.")] = False,
) -> None:
    """Search for the fastest schedules on this machine's GPU. Lists are separated by commas.

    The winners go into the user's table for the GPU, which goes before the ones that come with lowbit.

    [bold]Examples[/]

      lowbit tune Llama-3.1-8B -w u4,u8 -g 128,row

      lowbit tune 8192x8192 8192x28672 -w nf4 -g 64 -m 1,16 --acts f16,bf16

      lowbit tune 8192x8192 -m 512,1024,8192 --compute none,f8e4m3

      lowbit tune --preset decode --seconds 480

      lowbit tune --check nvidia_h200.json          how good is what a matmul gets that is not in the table?

      lowbit tune --check --preset unknown          and what matmuls get that no table has?

      lowbit tune --stale nvidia_h200.json          which measurements are of kernels that have changed since?

      lowbit tune --merge old.json new.json -o nvidia_h200.json
    """
    names = what or []
    of_table = all(name.endswith(".json") for name in names) and not preset
    if merge or stale or (check and of_table):
        _use_tables(names, merge, check, stale, jobs, output)
        return
    work = _preset(preset) if preset else []
    if names or not preset:
        work += _problems(names, weights, group_sizes, tokens, acts, zeros, scale, compute)
    work = list(dict.fromkeys(work))
    if check:
        _check_unknown(work, candidates, seconds, jobs, output)
    else:
        _tune(work, candidates, seconds, jobs, output, log)


def _use_tables(
    names: list[str], merge: bool, check: bool, stale: bool, jobs: int | None, output: Path | None
) -> None:
    """What is done with tables that are there, in place of a search."""
    if merge + check + stale > 1:
        raise SpecError("--merge, --check and --stale are different things to do; give one of them")
    if merge:
        _merge([Path(name) for name in names], output)
    elif check:
        _check(_table(names), jobs)
    else:
        _stale(_table(names), jobs)


def _preset(name: str) -> list[Problem]:
    from lowbit.pylib.tune import session as tuner

    return tuner.preset_problems(name)


def _problems(
    names: list[str],
    weights: str,
    group_sizes: str,
    tokens: str,
    acts: str,
    zeros: str,
    scale: str | None,
    compute: str,
) -> list[Problem]:
    from lowbit.pylib.tune import models
    from lowbit.pylib.tune import session as tuner

    if not names:
        raise SpecError("lowbit tune needs shapes: sizes such as 4096x11008, models or their layers, or --preset")
    groups = [None if size == "row" else _integer("--group-sizes", size) for size in _list(group_sizes)]
    tiles = [_integer("--tokens", tile) for tile in _list(tokens)]
    more = _list(acts), _list(zeros), scale, _list(compute)
    return tuner.problems(models.shapes(names), _list(weights), groups, tiles, *more)


def _tune(
    work: list[Problem],
    candidates: int | None,
    seconds: float,
    jobs: int | None,
    output: Path | None,
    log: Path | None,
) -> None:
    import lowbit
    from lowbit.passes.scheduling.tables import Table, read_table
    from lowbit.pylib.build import cache
    from lowbit.pylib.build import user_tables as schedules
    from lowbit.pylib.tune import processes as tune_processes
    from lowbit.pylib.tune import session as tuner

    gpu, target = tuner.this_gpu()
    work = tuner.with_kernels(work, target)
    path = output or schedules.user_file(gpu)
    table = read_table(path) if path.exists() else Table(gpu, target.capability, tuner.MADE, {})
    if table.gpu != gpu:
        raise SpecError(f"{path} is a table for {table.gpu}, but this GPU is {gpu}; name another with -o")
    measured = tuner.Log(log or path.with_suffix(".jsonl"), gpu)
    version = f"{lowbit.__version__}+{cache.source_fingerprint()[:8]}"
    with (
        tune_processes.Compilers(target, jobs) as compilers,
        tune_processes.GpuProcess(target) as stand,
        TuneProgress() as progress,
    ):
        search = tuner.Tuner(
            target, version, measured, stand, compilers.submit, progress, candidates or tuner.CANDIDATES, seconds
        )
        found = 0
        for entry in search.run(work):
            table = table.replaced(entry)
            write(table, path)
            found += 1
    console.print(f"{found} of {len(work)} matmuls measured", markup=False)
    console.print(f"wrote {path}: {len(table.entries)} schedules", markup=False)


class TuneProgress:
    """A bar of matmuls, and a line for each that is done; the lines alone where there is no terminal."""

    def __init__(self) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal)
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
        console.print(f"{problem}: {found}", markup=False)


def brief(s: KernelSchedule) -> str:
    """A schedule in a line."""
    from lowbit.passes.scheduling.tables import spelled_out

    return ", ".join(f"{name}={value}" for name, value in spelled_out(s).items())


def write(table: Table, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(table.to_text(), encoding="utf-8")
    temporary.replace(path)


def _merge(paths: list[Path], output: Path | None) -> None:
    from lowbit.passes.scheduling.tables import merge, read_table
    from lowbit.pylib.build import user_tables as schedules

    if not paths:
        raise SpecError("lowbit tune --merge needs tables, such as a.json b.json")
    table = merge([read_table(path) for path in paths])
    path = output or schedules.user_file(table.gpu)
    write(table, path)
    console.print(f"wrote {path}: {len(table.entries)} schedules for {table.gpu}", markup=False)


def _table(names: list[str]) -> Table:
    """The one in a file, or the first that a user of this machine has."""
    from lowbit.passes.scheduling.tables import read_table, shipped_tables
    from lowbit.pylib.build import user_tables as schedules

    if len(names) > 1:
        raise SpecError(f"one table at a time, not {', '.join(names)}; --merge joins them")
    return read_table(Path(names[0])) if names else (*schedules.user_tables(), *shipped_tables())[0]


def _check(table: Table, jobs: int | None) -> None:
    from lowbit.pylib.tune import check as tune_check
    from lowbit.pylib.tune import processes as tune_processes
    from lowbit.pylib.tune import session as tuner

    gpu, target = tuner.this_gpu()
    if table.gpu != gpu:
        raise SpecError(f"the table is for {table.gpu}, but this GPU is {gpu}; give another")
    calls: list[tune_check.FirstCall] = []
    with tune_processes.Compilers(target, jobs) as compilers, tune_processes.GpuProcess(target) as stand:
        for call in tune_check.first_calls(table, target, stand, compilers.submit):
            calls.append(call)
            _print_call(call)
    console.print(tune_check.summary(calls), markup=False)


def _check_unknown(
    work: list[Problem], candidates: int | None, seconds: float, jobs: int | None, output: Path | None
) -> None:
    """First calls of these matmuls against a search, whose log nobody needs later; with `output`, as JSON."""
    from tempfile import TemporaryDirectory

    from lowbit.pylib.tune import check as tune_check
    from lowbit.pylib.tune import processes as tune_processes
    from lowbit.pylib.tune import session as tuner

    gpu, target = tuner.this_gpu()
    work = tuner.with_kernels(work, target)
    calls: list[tune_check.FirstCall] = []
    with (
        TemporaryDirectory() as folder,
        tune_processes.Compilers(target, jobs) as compilers,
        tune_processes.GpuProcess(target) as stand,
    ):
        measured = tuner.Log(Path(folder) / "log.jsonl", gpu)
        many = candidates or tuner.CANDIDATES
        search = tuner.Tuner(target, "", measured, stand, compilers.submit, tuner.Silent(), many, seconds)
        for call in tune_check.first_calls_of_unknown(work, search):
            calls.append(call)
            _print_call(call)
            if output:
                output.write_text(tune_check.to_text(calls, gpu), encoding="utf-8")
    console.print(tune_check.summary(calls), markup=False)


def _print_call(call: FirstCall) -> None:
    from lowbit.pylib.tune.check import problem

    times = f"{call.time:.2f} µs, best known {min(call.time, call.best):.2f}"
    console.print(f"{call.ratio:.3f}  {problem(call.entry.key)}: {times}", markup=False)


def _stale(table: Table, jobs: int | None) -> None:
    from lowbit.passes.target import target_of_gpu
    from lowbit.pylib.tune import check as tune_check
    from lowbit.pylib.tune import processes as tune_processes

    target = target_of_gpu(table.capability)
    if target is None:
        raise SpecError(f"the table is for {table.gpu}, sm_{table.capability}, which no target is for")
    with tune_processes.Compilers(target, jobs) as compilers:
        found = tune_check.stale(table, compilers.submit)
    for entry in found:
        about = f"{entry.microseconds:.2f} µs, {entry.date}, {entry.version}"
        console.print(f"{tune_check.problem(entry.key)}: {about}", markup=False)
    console.print(f"{len(found)} of {len(table.entries)} entries are out of date", markup=False)


def _list(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _integer(option: str, text: str) -> int:
    if not text.isdecimal():
        raise SpecError(f"{option}: {text!r} must be a whole number")
    return int(text)
