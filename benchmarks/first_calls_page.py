"""How good first calls are, into docs/tuning.md: what `lowbit tune --check` has measured of sizes in no table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.publish import write_between_marks
from benchmarks.tables import markdown
from lowbit.dialect.errors import SpecError
from lowbit.pylib.tune.check import GOOD

BEGIN, END = "<!-- first calls: begin -->", "<!-- first calls: end -->"
Call = Mapping[str, Any]


def publish(results: Path, root: Path) -> list[Path]:
    """Write docs/tuning.md; returns it. Raises SpecError for a file that holds no first calls."""
    page = root / "docs" / "tuning.md"
    write_between_marks(page, text_of(results), BEGIN, END)
    return [page]


def text_of(results: Path) -> str:
    """A line of sums, and a table: a row for each size, a column for each weight and number of tokens."""
    try:
        found = json.loads(results.read_text())
        calls: Sequence[Call] = found["calls"]
        line = f"{found['gpu']}, {found['date']}: {_sums(calls)}."
        return f"{line}\n\n{_table(calls)}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{results} has no first calls ({error!r}); make it with lowbit tune --check -o") from None


def _sums(calls: Sequence[Call]) -> str:
    ratios = [_ratio(call) for call in calls]
    good = sum(ratio <= GOOD for ratio in ratios)
    share = f"{good} of {len(ratios)} within {GOOD - 1:.0%} of the best that was found"
    return f"{share}, {statistics.mean(ratios):.3f} on average, {max(ratios):.2f} at worst"


def _table(calls: Sequence[Call]) -> str:
    columns = _unique(_column(call) for call in calls)
    sizes = _unique((call["n"], call["k"]) for call in calls)
    cells = {((call["n"], call["k"]), _column(call)): _cell(call) for call in calls}
    rows = [[f"{n} x {k}", *(cells.get(((n, k), column), "") for column in columns)] for n, k in sizes]
    return markdown(["n x k", *columns], rows)


def _column(call: Call) -> str:
    group = f"g{call['group_size']}" if call["group_size"] else "per row"
    return f"{call['weight']} {group}, m = {call['tokens']}"


def _cell(call: Call) -> str:
    return f"{call['microseconds']:.2f} ({_ratio(call):.2f})"


def _ratio(call: Call) -> float:
    return call["microseconds"] / call["best_microseconds"]


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
