"""Results into the documentation: tables between marks, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.plots import plot
from benchmarks.results import Results
from benchmarks.tables import summary, tables
from lowbit.dialect.errors import SpecError

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
TEXTS = {
    "formats": "Speed-ups over cuBLAS f16 by format",
    "layers": "Speed-ups over cuBLAS f16 by layer of models",
    "sweep": "Microseconds over the number of tokens",
    "roofline": "TFLOP/s over operations per byte",
}


def publish(results: Results, root: Path) -> list[Path]:
    """The files that were written. Raises SpecError for a page without the marks."""
    figures = plot(results, root / "docs" / "img")
    pages = {
        root / "README.md": [summary(results)],
        root / "docs" / "benchmarks.md": [*_images(figures, root / "docs"), tables(results)],
    }
    for page, parts in pages.items():
        write_between_marks(page, "\n\n".join(parts))
    return [*pages, *figures]


def _images(figures: Sequence[Path], folder: Path) -> list[str]:
    """Returns figures as markdown, for a page in `folder`."""
    return [f"![{TEXTS[f.stem.partition('_')[0]]}]({f.relative_to(folder).as_posix()})" for f in figures]


def write_between_marks(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Write `text` in place of what stands between a page's marks. Raises SpecError for a page without them."""
    path.write_text(between_marks(path, text, begin, end))


def between_marks(path: Path, text: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with `text` in place of what stands between its marks."""
    before, found, rest = path.read_text().partition(begin)
    _, found_too, after = rest.partition(end)
    if not found or not found_too:
        raise SpecError(f"{path} needs a line {begin} and, below it, a line {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"
