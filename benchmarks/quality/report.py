"""The table of docs/quality.md and its figure, from docs/results/quality.json: `python -m benchmarks.quality.report`.

The figure needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.quality.measure import SECTION
from benchmarks.quality.section import DOCS, Record

FIGURE = DOCS / "img" / "quality.svg"
BITS = "bits per weight, scales and zeros included"
COLOURS = {  # told apart by the colour-blind, too (Okabe and Ito)
    "RTN, min/max": "#8A8A8A",
    "RTN": "#3C3C3C",
    "HQQ": "#E69F00",
    "AWQ": "#56B4E9",
    "GPTQ": "#0072B2",
    "GPTQ, 8 beams": "#00204D",
    "SignRound": "#D55E00",
    "floats, RTN": "#CC79A7",
    "floats, GPTQ": "#009E73",
}


def lines(records: list[Record]) -> dict[str, dict[int, Record]]:
    """Returns for each line its records by bits; presets and single formats are no lines."""
    found: dict[str, dict[int, Record]] = {}
    for record in records[1:]:
        found.setdefault(record["line"], {})[record["bits"]] = record
    return {line: by_bits for line, by_bits in found.items() if len(by_bits) > 1}


def tables(records: list[Record]) -> str:
    """Returns the page's tables: perplexity and divergence by method and bits, then the formats that stand alone."""
    return "\n\n".join(
        [
            f"Perplexity; the float model has {records[0]['perplexity']:.2f}:",
            _table(records, lambda record: f"{record['perplexity']:.2f}"),
            "By how many percent the perplexity is above the float model's, with a 95 % interval:",
            _table([record for record in records if record["line"] not in _without_interval(records)], _above),
            "Divergence from the float model's predictions, in thousandths of a nat:",
            _table(records, lambda record: f"{1000 * record['divergence']:.3g}"),
            "Formats and recipes that stand alone:",
            _single(records),
        ]
    )


def _without_interval(records: list[Record]) -> set[str]:
    """Returns the lines with a record of a time before intervals were measured."""
    return {record["line"] for record in records if "above" not in record}


def _above(record: Record) -> str:
    """Returns a change in percent, and its interval, with a sign and no more digits than these deserve."""
    change, width = record["above"]
    digits = 1 if width >= 0.2 else 2 if width >= 0.02 else 3
    return f"{change:+.{digits}f} ± {width:.{digits}f}"


def _table(records: list[Record], cell: Callable[[Record], str]) -> str:
    found = lines(records)
    widths = sorted({bits for by_bits in found.values() for bits in by_bits}, reverse=True)
    rows = [["", *(f"{bits} bits" for bits in widths)], ["---", *("---:" for _ in widths)]]
    for line, by_bits in found.items():
        rows.append([line, *(cell(by_bits[bits]) if bits in by_bits else "" for bits in widths)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _single(records: list[Record]) -> str:
    rows = ["| | bits per weight | perplexity | divergence, thousandths |", "| --- | ---: | ---: | ---: |"]
    for record in records[1:]:
        if record["line"] not in lines(records):
            quality = f"{record['perplexity']:.2f} | {1000 * record['divergence']:.3g}"
            rows.append(f"| {record['line']} | {record['bits_per_weight']:.2f} | {quality} |")
    return "\n".join(rows)


def draw(records: list[Record], file: Path) -> None:
    """Write the figure: perplexity and divergence against bits per weight, a line for each method."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from benchmarks.plots import STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for line, by_bits in lines(records).items():
            if line in COLOURS:
                for axes, value in ((left, "perplexity"), (right, "divergence")):
                    found = [(record["bits_per_weight"], record[value]) for record in by_bits.values()]
                    axes.plot(*zip(*found), "o-", color=COLOURS[line], label=line, markersize=3, linewidth=1.2)
        left.axhline(records[0]["perplexity"], color="#8A8A8A", linewidth=0.8, linestyle=":")
        left.set(title="Perplexity (dotted: the float model)", xlabel=BITS, xlim=(2.2, 5.7))
        right.set(title="Divergence from the float model, nats", xlabel=BITS, yscale="log")
        left.legend(fontsize=8)
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Write the page and the figure."""
    records = SECTION.records()
    SECTION.path.write_text(SECTION.with_table(tables(records)))
    draw(records, FIGURE)


if __name__ == "__main__":
    main()
