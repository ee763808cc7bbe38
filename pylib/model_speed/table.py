"""Measurements of a model as a table: a row per format, a column per step."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.pylib.model_speed.measure import BASELINE, Measurement
from lowbit.pylib.model_speed.runner import Step


def table(measured: Sequence[Measurement]) -> list[list[str]]:
    """Returns rows of cells, the header first: tokens per second, and how many times as fast as bf16 that is."""
    steps = steps_of(measured)
    rows = [["weights", "GB", *(f"{step}: tokens/s" for step in steps)]]
    for name in dict.fromkeys(each.name for each in measured):
        ours = {each.step: each for each in measured if each.name == name}
        size = next(iter(ours.values())).nbytes
        rows.append([name, f"{size / 1e9:.2f}", *(_cell(ours.get(step), measured) for step in steps)])
    return rows


def steps_of(measured: Sequence[Measurement]) -> list[Step]:
    """Returns the steps that were measured: decoding first, by batch, then prefill, by length."""
    return sorted({each.step for each in measured}, key=lambda step: (step.is_prefill, step.batch, step.tokens))


def speedup(measurement: Measurement, measured: Sequence[Measurement]) -> float | None:
    """Returns how many times as fast as bf16 a step is; None if bf16 was not measured."""
    base = next((each for each in measured if each.weight == BASELINE and each.step == measurement.step), None)
    return None if base is None else base.seconds / measurement.seconds


def split_table(measured: Sequence[Measurement]) -> list[list[str]]:
    """Returns rows of cells, the header first: microseconds of a step by kind of kernel."""
    split = [each for each in measured if each.split]
    kinds = list(dict.fromkeys(kind for each in split for kind in each.split or {}))
    rows = [["microseconds of a step", *(f"{each.name}, {each.step}" for each in split)]]
    rows += [[kind, *(f"{(each.split or {}).get(kind, 0.0) * 1e6:.0f}" for each in split)] for kind in kinds]
    return [*rows, ["all, measured", *(f"{each.seconds * 1e6:.0f}" for each in split)]]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as text, the columns one below the other: the first to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )


def _cell(measurement: Measurement | None, measured: Sequence[Measurement]) -> str:
    if measurement is None:
        return ""
    ratio = speedup(measurement, measured)
    times = "" if ratio is None or measurement.weight == BASELINE else f" ({ratio:.2f}x)"
    return f"{measurement.tokens_per_second:.0f}{times}"
