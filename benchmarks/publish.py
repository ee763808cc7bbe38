"""Results into the documentation: tables between marks, and figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.plots import plot
from benchmarks.results import Results
from benchmarks.tables import summary, tables
from dialect.errors import SpecError

PLACES: dict[str, Callable[[Results], str]] = {"README.md": summary, "docs/benchmarks.md": tables}
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def publish(results: Results, root: Path) -> list[Path]:
    """The files that were written. Raises SpecError for a page without the marks."""
    written = []
    for name, make in PLACES.items():
        path = root / name
        path.write_text(between_marks(path, make(results)))
        written.append(path)
    return written + plot(results, root / "docs" / "img")


def between_marks(path: Path, text: str) -> str:
    """The page with `text` in place of what stands between its marks."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SpecError(f"{path} needs a line {BEGIN} and, below it, a line {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"
