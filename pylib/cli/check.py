"""The command `lowbit check`: its options and its report. Slow imports wait until it runs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lowbit.pylib.cli.output import Json, errors, show_json
from lowbit.pylib.cli.spec_options import TargetName

if TYPE_CHECKING:
    from lowbit.pylib.check.trial import Outcome

MOST_JOBS = 16
_JOBS = f"Processes: one for each CPU, at most {MOST_JOBS}, by default."
_REASONS = 10  # for refusals that are shown


def check(
    count: Annotated[int, typer.Option(min=1, max=10**6, help="Matmuls to check.")] = 100,
    seed: Annotated[int, typer.Option(help="Other seeds draw other matmuls.")] = 0,
    target: TargetName = None,
    seconds: Annotated[float, typer.Option(min=0, help="No case begins after so many.")] = math.inf,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, max=256, help=_JOBS)] = None,
    as_json: Json = False,
) -> None:
    """Check random matmuls on this machine: on its GPU, its CPU, or in the emulator.

    Each has random formats, groups, scales, zeros, types, outliers and sizes. Its result is compared with a definition
    in float64 that shares no code with the compiler. The exit code is 1 if one is wrong; then a minimal spec that is
    wrong as well is shown. Ctrl-C, or --seconds, ends it early, with a report of what was checked.

    [bold]Examples[/]

      lowbit check --count 1000

      lowbit check -t emulator:sm_90a --count 50 --seed 7
    """
    import torch

    from lowbit.pylib.check.session import Drawn, outcomes
    from lowbit.pylib.check.trial import minimal
    from lowbit.pylib.runtime.devices import target_named
    from lowbit.pylib.runtime.gpu import check_device

    parsed = target_named(target)
    if parsed.kind == "cuda" and not torch.cuda.is_available():
        check_device(parsed, -1)
    drawn = Drawn(parsed.name, count, seed)
    processes = min(jobs or min(MOST_JOBS, len(os.sched_getaffinity(0))), count)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    found: list[Outcome] = []
    begin = monotonic()
    with Progress(*columns, console=errors, transient=True) as progress, suppress(KeyboardInterrupt):
        in_time = takewhile(lambda _: monotonic() - begin < seconds, drawn)
        for outcome in progress.track(outcomes(in_time, processes), count, description=f"checking on {parsed.name}"):
            found.append(outcome)
            if outcome.verdict == "wrong":
                progress.console.print(f"wrong: {outcome.case}: {outcome.detail}", markup=False)
    wrong = next((outcome for outcome in found if outcome.verdict == "wrong"), None)
    least = minimal(wrong) if wrong else None
    if as_json:
        show_json(_facts(found, drawn.refused, least))
    else:
        _report(found, drawn.refused, least)
    if wrong:
        raise typer.Exit(1)


def _facts(found: list[Outcome], not_drawn: Mapping[str, int], least: Outcome | None) -> dict[str, Any]:
    """Returns the outcomes as JSON has them."""
    wrong = [{"case": str(each.case), "detail": each.detail} for each in found if each.verdict == "wrong"]
    return {
        "checked": len(found),
        "kernels": _by_kernel(found),
        "worst_error_of_allowed": max((each.worst for each in found if each.verdict == "right"), default=0.0),
        "refused": dict(Counter(each.detail for each in found if each.verdict == "refused")),
        "not_drawn": sum(not_drawn.values()),
        "wrong": wrong,
        "minimal": str(least.case) if least else None,
    }


def _by_kernel(found: list[Outcome]) -> dict[str, dict[str, int]]:
    """Returns how many were right, wrong and refused, by the families of kernels that computed them."""
    counts: dict[str, Counter[str]] = {}
    for each in found:
        counts.setdefault(each.kernels or "none", Counter())[each.verdict] += 1
    return {kernels: dict(counts[kernels]) for kernels in sorted(counts)}


def _report(found: list[Outcome], not_drawn: Mapping[str, int], least: Outcome | None) -> None:
    """Prints the outcomes: a table of kernels, why matmuls were refused, and what is wrong."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table("kernels", *(f"[bold]{verdict}" for verdict in ("right", "wrong", "refused")))
    for kernels, counts in _by_kernel(found).items():
        table.add_row(kernels, *(str(counts.get(verdict, 0)) for verdict in ("right", "wrong", "refused")))
    console.print(table)
    worst = max((each.worst for each in found if each.verdict == "right"), default=0.0)
    console.print(f"largest error of a right one: {worst:.0%} of what rounding explains")
    console.print(f"{sum(not_drawn.values())} more were drawn whose fields do not go together")
    for reason, times in Counter(each.detail for each in found if each.verdict == "refused").most_common(_REASONS):
        console.print(f"refused {times} times: {escape(reason)}")
    for each in found:
        if each.verdict == "wrong":
            console.print(f"[bold red]wrong[/]: {escape(str(each.case))}: {escape(each.detail)}")
    if least:
        console.print(f"[bold]minimal[/]: {escape(str(least.case))}: {escape(least.detail)}")
