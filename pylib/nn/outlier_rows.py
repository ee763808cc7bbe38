"""How the outliers of a weight are spread over its rows: what `lowbit inspect` prints and draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowbit.dialect.errors import SpecError
from lowbit.pylib.weights.packed import PackedWeight

BARS = "▁▂▃▄▅▆▇█"
BINS = 16
PANELS = 4  # of a figure, side by side
HEADER = ("outliers in", "all", "densest row", f"rows by density, in {BINS} steps up to the densest")


@dataclass(frozen=True)
class OutlierRows:
    """The outliers of a weight with so many columns.

    counts   how many each row has
    """

    counts: tuple[int, ...]
    columns: int

    @classmethod
    def of(cls, weight: PackedWeight) -> OutlierRows | None:
        """Returns the outliers of a weight; None for a weight that has no place for any."""
        found = weight.unpack_outliers()
        if found is None:
            return None
        return cls(tuple(found.crow_indices().diff().tolist()), weight.spec.k)

    @property
    def density(self) -> float:
        """Returns the part of all weights that have an outlier."""
        return sum(self.counts) / (len(self.counts) * self.columns)

    @property
    def densest(self) -> float:
        """Returns the part of the weights of the densest row that have an outlier."""
        return max(self.counts) / self.columns

    def histogram(self, bins: int = BINS) -> list[int]:
        """Returns how many rows have a density in each of equal steps, from 0 to that of the densest row. Rows without
        outliers are in the first step."""
        most, found = max(self.counts), [0] * bins
        for count in self.counts:
            found[max(0, -(-count * bins // most) - 1) if most else 0] += 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the outliers in terms of JSON."""
        return {"density": self.density, "densest_row": self.densest, "per_row": list(self.counts)}


def table(layers: Mapping[str, OutlierRows]) -> str:
    """Returns a line for each layer: the density of its outliers, and a histogram of its rows."""
    lines = [HEADER, *((name, *_cells(rows)) for name, rows in layers.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER) - 1)]
    return "\n".join(
        f"{name:{widths[0]}}  {density:>{widths[1]}}  {densest:>{widths[2]}}  {bars}"
        for name, density, densest, bars in lines
    )


def _cells(rows: OutlierRows) -> tuple[str, str, str]:
    return f"{100 * rows.density:.2f} %", f"{100 * rows.densest:.1f} %", bars(rows.histogram())


def bars(counts: list[int]) -> str:
    """Returns a bar for each number; a blank for 0 alone."""
    most = max(counts)
    return "".join(BARS[max(0, -(-count * len(BARS) // most) - 1)] if count else " " for count in counts).rstrip()


def draw(layers: Mapping[str, OutlierRows], file: str) -> None:
    """Write a figure with a panel for each layer: the density of outliers in each of its rows.

    Raises SpecError for the name of a file of no known type, and where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecError("a plot needs matplotlib: pip install matplotlib") from None
    columns = min(PANELS, len(layers))
    lines = -(-len(layers) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.2 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, (name, rows) in zip(panels, layers.items()):
        density = [100 * count / rows.columns for count in rows.counts]
        panel.vlines(range(len(density)), 0, density, linewidth=0.6, color="#0072B2")
        panel.axhline(100 * rows.density, linewidth=0.8, linestyle=":", color="#3C3C3C")
        panel.set_title(f"{name}, {100 * rows.density:.2f} %", fontsize=7)
        panel.set(xlim=(0, len(density)), ylim=(0, None))
        panel.tick_params(labelsize=6)
    for panel in panels[len(layers) :]:
        panel.set_axis_off()
    figure.supxlabel("row", fontsize=8)
    figure.supylabel("outliers, % of the columns", fontsize=8)
    try:
        figure.savefig(file, metadata={"Date": None} if file.endswith((".svg", ".pdf")) else None)
    except ValueError as error:
        raise SpecError(f"{file} can't be drawn: {error}") from None
