"""The command `lowbit tune`. What is slow to import is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from dialect.errors import SpecError

if TYPE_CHECKING:
    from passes.schedule_tables import Entry, Table
    from pylib.tuner import Problem

console = Console(stderr=True, highlight=False)


def tune(
    what: Annotated[list[str], typer.Argument(help="Sizes such as 4096x11008, models, or layers: Llama-2-7B/qkv.")],
    weights: Annotated[str, typer.Option("--weights", "-w", help="Formats.")] = "u4",
    group_sizes: Annotated[str, typer.Option(help="Columns that share a scale; row for one scale per row.")] = "128",
    tokens: Annotated[str, typer.Option("--tokens", "-m", help="Token tiles.")] = "1,8,16,32,64",
    acts: Annotated[str, typer.Option(help="Types of x.")] = "f16",
    zeros: Annotated[str, typer.Option(help="Kinds of zero points.")] = "none",
    scale: Annotated[str | None, typer.Option(help="Type of the scales; without it, as x.")] = None,
    keep: Annotated[int | None, typer.Option(help="Candidates per matmul and token tile.", min=1)] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Processes that compile.", min=1)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Table to add to.")] = None,
    log: Annotated[Path | None, typer.Option(help="Measurements; a session goes on where its log ends.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Join tables, given as files, instead.")] = False,
) -> None:
    """Search for the fastest schedules on this machine's GPU. Lists are separated by commas.

    The winners go into the user's table for the GPU, which goes before the ones that come with lowbit.

    [bold]Examples[/]

      lowbit tune Llama-3.1-8B --weights u4,u8 --group-sizes 128,row

      lowbit tune 8192x8192 8192x28672 -w nf4 --group-sizes 64 -m 1,16 --acts f16,bf16

      lowbit tune --merge a.json b.json -o nvidia_h200.json
    """
    if merge:
        _merge([Path(name) for name in what], output)
        return
    import pylib
    from passes.schedule_tables import Table, read_table
    from pylib import models, schedules, tuner

    work = tuner.problems(
        models.shapes(what),
        _list(weights),
        [None if size == "row" else _integer("--group-sizes", size) for size in _list(group_sizes)],
        [_integer("--tokens", tile) for tile in _list(tokens)],
        _list(acts),
        _list(zeros),
        scale,
    )
    gpu, target = tuner.this_gpu()
    path = output or schedules.user_file(gpu)
    table = read_table(path) if path.exists() else Table(gpu, target.capability, tuner.MADE, {})
    if table.gpu != gpu:
        raise SpecError(f"{path} is a table for {table.gpu}, but this GPU is {gpu}; name another with -o")
    measured = tuner.Log(log or path.with_suffix(".jsonl"), gpu)
    timer = tuner.GraphTimer(target)
    with tuner.compile_pool(target, jobs) as submit, TuneProgress() as progress:
        search = tuner.Tuner(
            target, pylib.__version__, measured, timer, tuner.check_on_gpu, submit, progress, keep or tuner.KEEP
        )
        for entry in search.run(work):
            table = table.replaced(entry)
            write(table, path)
    console.print(f"wrote {path}: {len(table.entries)} schedules", markup=False)


class TuneProgress:
    """Two bars, one for compiling and one for timing, with the time that is left; and a line per matmul."""

    def __init__(self) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bars = Bars(TextColumn("{task.description}"), *columns, console=console, speed_estimate_period=120)
        self._compile = self._bars.add_task("compile", total=None)
        self._time = self._bars.add_task("time", total=None)

    def __enter__(self) -> TuneProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, compilations: int, timings: int) -> None:
        self._bars.update(self._compile, total=compilations)
        self._bars.update(self._time, total=timings)

    def compiled(self) -> None:
        self._bars.advance(self._compile)

    def timed(self) -> None:
        self._bars.advance(self._time)

    def finished(self, problem: Problem, entry: Entry | None) -> None:
        found = "[bold red]no schedule gives the right result[/]"
        if entry:
            s = entry.schedule
            found = f"{entry.microseconds:.2f} µs with {s.row_blocks} row blocks, {s.warps_n} x {s.warps_k} warps, "
            found += f"steps of {s.step_k}, {s.stages} stages, {s.splits} splits"
        console.print(f"{escape(str(problem))}: {found}")


def write(table: Table, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(table.to_text(), encoding="utf-8")
    temporary.replace(path)


def _merge(paths: list[Path], output: Path | None) -> None:
    from passes.schedule_tables import merge, read_table
    from pylib import schedules

    table = merge([read_table(path) for path in paths])
    path = output or schedules.user_file(table.gpu)
    write(table, path)
    console.print(f"wrote {path}: {len(table.entries)} schedules for {table.gpu}", markup=False)


def _list(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def _integer(option: str, text: str) -> int:
    if not text.isdecimal():
        raise SpecError(f"{option}: {text!r} must be a whole number")
    return int(text)
