"""What many tokens take, into docs/benchmarks.md and README.md: tables between marks, and figures over m."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import describe
from benchmarks.plots import TERAFLOPS, TOKENS_PER_JOULE, save, sweep
from benchmarks.publish import write_between_marks
from benchmarks.results import Record, Results
from benchmarks.tables import (
    find,
    markdown,
    methods,
    notes,
    plain_sizes,
    title,
    token_table,
    tokens_of,
    weight_of,
    weights_of,
)

BEGIN, END = "<!-- prefill: begin -->", "<!-- prefill: end -->"
README_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
LEAST_SIZES = 2  # a weight of one size is a row among others


def publish(runs: Sequence[Results], root: Path) -> list[Path]:
    """Write both pages and the figures, run by run, the latest first; returns the files.

    A weight that a run has measured on several sizes is left out of those that follow. Raises SpecError for a page
    without the marks.
    """
    runs = each_weight_once(runs)
    figures: list[Path] = []
    texts: list[str] = []
    for results in runs:
        drawn = draw(results, root / "docs" / "img")
        figures += drawn
        texts += [*(f"![{text}](img/{path.name})" for path, text in drawn.items()), page(results)]
    pages = {
        root / "README.md": "\n\n".join(map(readme, runs)),
        root / "docs" / "benchmarks.md": "\n\n".join(texts),
    }
    for path, text in pages.items():
        write_between_marks(path, text, BEGIN, END)
    return [*pages, *figures]


def each_weight_once(runs: Sequence[Results]) -> list[Results]:
    """Returns the runs, each without the weights that a run before it has measured on several sizes."""
    known: list[Record] = []
    found: list[Results] = []
    for results in runs:
        rest = Results(None, results.environment)
        rest.measurements = [r for r in results.measurements if weight_of(r) not in known]
        known += _of_many_sizes(rest)
        found.append(rest)
    return found


def draw(results: Results, folder: Path) -> dict[Path, str]:
    """Draw TFLOP/s and tokens per joule over the number of tokens; returns the files, each with what it shows."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[Path, str] = {}
    for weight in _of_many_sizes(results):
        name = "_".join(filter(None, (weight["weight"], weight["act"], weight["compute"]))).replace("+", "_")
        quantities = {"rate": TERAFLOPS} | ({"energy": TOKENS_PER_JOULE} if _has_energy(results, weight) else {})
        for kind, quantity in quantities.items():
            path = folder / f"prefill_{kind}_{name}.svg"
            save(path, lambda w=weight, q=quantity: sweep(results, w, q), results)  # type: ignore[misc]
            found[path] = f"{quantity.label} over the number of tokens, {title(weight)}"
    return found


def page(results: Results) -> str:
    """All tables."""
    parts = [describe(results.environment), "Microseconds per call; in brackets, times as fast as cuBLAS in x's type."]
    for weight in _of_many_sizes(results):
        parts += [f"### Many tokens: {title(weight)}", token_table(results, weight)]
    if others := _of_one_size(results):
        parts += ["### Many tokens: other weights", others_table(results, others)]
    for weight in filter(lambda weight: _has_energy(results, weight), _of_many_sizes(results)):
        parts += [f"### Energy: {title(weight)}", "Millijoules per call; in brackets, tokens per joule."]
        parts.append(energy_table(results, weight))
    return "\n\n".join([*parts, *notes(results)])


def readme(results: Results) -> str:
    """Ours alone, on the first size of the weights that were measured on several."""
    rows: list[list[str]] = []
    for weight in _of_many_sizes(results):
        n, k = plain_sizes(results, weight)[0]
        rows.append([title(weight), f"{n} x {k}", *(_cell(results, weight, n, k, m) for m in README_TOKENS)])
    head = ["weight", "n x k", *(f"m = {m}" for m in README_TOKENS)]
    return f"{markdown(head, rows, text_columns=2)}\n\n{describe(results.environment)}."


def others_table(results: Results, weights: list[Record]) -> str:
    """A row for each weight that was measured on one size."""
    tokens = sorted({m for weight in weights for m in tokens_of(results, weight)})
    rows: list[list[str]] = []
    for weight in weights:
        ((n, k),) = plain_sizes(results, weight)
        rows.append([title(weight), f"{n} x {k}", *(_cell(results, weight, n, k, m) for m in tokens)])
    return markdown(["weight", "n x k", *(f"m = {m}" for m in tokens)], rows, text_columns=2)


def energy_table(results: Results, weight: Record) -> str:
    """A row for each size and method."""
    found = {m for m in tokens_of(results, weight) if _energies(results, weight, m)}
    tokens, rows = sorted(found), list[list[str]]()
    for n, k in plain_sizes(results, weight):
        name = f"{n} x {k}"
        for peer in methods(results, weight):
            records = [find(results, peer, weight, n=n, k=k, m=m) for m in tokens]
            cells = [_energy(record) for record in records]
            if any(cells):
                rows.append([name, peer, *cells])
                name = ""
    return markdown(["n x k", "method", *(f"m = {m}" for m in tokens)], rows, text_columns=2)


def _cell(results: Results, weight: Record, n: int, k: int, m: int) -> str:
    ours = find(results, "lowbit", weight, n=n, k=k, m=m)
    ratio = results.speedup(ours) if ours else None
    return "" if ours is None else f"{ours['us']:.1f}" + ("" if ratio is None else f" ({ratio:.2f})")


def _energy(record: Record | None) -> str:
    value = TOKENS_PER_JOULE.value(record) if record else None
    return f"{record['millijoules']:.1f} ({value:.0f})" if record and value else ""


def _energies(results: Results, weight: Record, m: int) -> list[Record]:
    return [r for r in results.all(**weight, m=m) if "millijoules" in r]


def _has_energy(results: Results, weight: Record) -> bool:
    return any(_energies(results, weight, m) for m in tokens_of(results, weight))


def _of_many_sizes(results: Results) -> list[Record]:
    return [w for w in weights_of(results) if len(plain_sizes(results, w)) >= LEAST_SIZES]


def _of_one_size(results: Results) -> list[Record]:
    return [w for w in weights_of(results) if len(plain_sizes(results, w)) == 1]
