"""What whole models take, into docs/models.md: tables between marks, and a figure of tokens per second."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.models import read
from benchmarks.plots import GREY, compact, style
from benchmarks.publish import write_between_marks
from benchmarks.tables import markdown
from lowbit.pylib.model_speed.measure import Measurement
from lowbit.pylib.model_speed.runner import Step
from lowbit.pylib.model_speed.table import speedup, split_table, steps_of, table

BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
COLOURS = ("#3C3C3C", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00")
COLOURS += ("#888888", "#004B76", "#A8D8F4", "#66C5AB", "#F4CC7A", "#E3B9D0", "#EFA070")


def publish(results: Sequence[Path], root: Path) -> list[Path]:
    """Write docs/models.md and its figures from files of `benchmarks models`, in this order; return these."""
    page = root / "docs" / "models.md"
    parts: list[str] = []
    figures: list[Path] = []
    for path in results:
        where = describe(json.loads(path.read_text())["environment"])
        source = f"[results](results/{path.name})"
        parts.append(f"{where} ({source}). Tokens per second; in brackets, times as fast as bf16.")
        for name, measured in sorted(read(path).items()):
            figure = root / "docs" / "img" / f"model_{_words(name)}{'_libraries' * _has_others(measured)}.svg"
            draw(name, measured, where, figure)
            figures.append(figure)
            parts += _about(name, measured, figure)
    write_between_marks(page, "\n\n".join(parts), BEGIN, END)
    return [page, *figures]


def _words(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def _has_others(measured: Sequence[Measurement]) -> bool:
    return any(each.library for each in measured)


def _about(name: str, measured: Sequence[Measurement], figure: Path) -> list[str]:
    """Returns the parts of a page that are about a model; beside other libraries, without what the time goes to."""
    compared = _has_others(measured)
    head, *rows = table(measured)
    title = f"### {name}{', with other libraries' * compared}"
    parts = [title, f"![Times as fast as bf16](img/{figure.name})", markdown(head, rows)]
    steps = [] if compared else steps_of(measured)
    return parts + [f"What the time of {step} goes to:\n\n{_split(measured, step)}" for step in steps]


def _split(measured: Sequence[Measurement], step: Step) -> str:
    """Returns a table of microseconds by kind of kernel, a column for each format."""
    head, *rows = split_table([each for each in measured if each.step == step])
    names = [cell.removesuffix(f", {step}") for cell in head]
    return markdown(names, rows)


def draw(name: str, measured: Sequence[Measurement], where: str, path: Path) -> None:
    """Draw bars: how many times as fast as bf16 each format is, step by step."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        axis: Any = figure.subplots()
        steps = steps_of(measured)
        names = list(dict.fromkeys(each.name for each in measured))
        width = 0.86 / len(names)
        for at, (kind, colour) in enumerate(zip(names, cycle(COLOURS))):
            found = {steps.index(each.step): speedup(each, measured) for each in measured if each.name == kind}
            heights = {place: ratio for place, ratio in found.items() if ratio is not None}
            places = [place + (at - (len(names) - 1) / 2) * width for place in heights]
            bars = axis.bar(places, list(heights.values()), 0.92 * width, color=colour, label=kind)
            axis.bar_label(bars, fmt="%.2f", fontsize=6, padding=1.2)
        axis.axhline(1, color=GREY, linewidth=1, linestyle=(0, (4, 2)))
        axis.set_xticks(range(len(steps)), [str(step) for step in steps])
        axis.set_ylabel("times as fast as bf16")
        axis.set_title(name)
        figure.legend(loc="outside right center", fontsize=7.5)
        figure.supxlabel(where, fontsize=6.5, color=GREY, x=0.99, ha="right")
        figure.savefig(path, metadata={"Date": None})
    path.write_text(compact(path.read_text()))
