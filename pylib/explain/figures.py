"""What pictures are made of: values, which the page draws as tables and bars, and which files have as SVG.

A picture holds what the compiler, the assembler or the emulator said, cell by cell; how it looks is the template's
business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

HUES = 12
"""Colours that cells have."""
_SIZE, _LEFT, _TOP = 22, 74, 20


class Cell(NamedTuple):
    """One cell of a grid: its text, what it is in words, and the number of its colour; -1: none."""

    text: str
    title: str
    hue: int = -1


@dataclass(frozen=True)
class Grid:
    """A table of cells, with the names of its rows and columns. corner: what these names are."""

    title: str
    about: str
    corner: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]

    @property
    def cells(self) -> Iterator[Cell]:
        return (cell for _, cells in self.rows for cell in cells)

    def svg(self) -> str:
        """The grid as a file that a page of documentation shows, in light and dark."""
        width = _LEFT + _SIZE * len(self.columns) + 4
        height = _TOP + _SIZE * len(self.rows) + 4
        parts = [f'<text x="{_LEFT - 6}" y="14" text-anchor="end">{escape(self.corner)}</text>']
        for i, name in enumerate(self.columns):
            parts.append(f'<text x="{_LEFT + _SIZE * (i + 0.5)}" y="14">{escape(name)}</text>')
        for j, (name, cells) in enumerate(self.rows):
            y = _TOP + _SIZE * j
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
            for i, cell in enumerate(cells):
                x, hue = _LEFT + _SIZE * i, cell.hue % HUES * 360 // HUES
                fill = f"hsl({hue} 60% 55% / .45)" if cell.hue >= 0 else "none"
                text = f'<text x="{x + _SIZE / 2}" y="{y + 15}">{escape(cell.text)}</text>' if cell.text else ""
                rect = f'<rect x="{x}" y="{y}" width="{_SIZE}" height="{_SIZE}" fill="{fill}"/>'
                parts.append(f"<g>{rect}{text}<title>{escape(cell.title)}</title></g>")
        return _svg(self.title, width, height, parts)


def _svg(title: str, width: int, height: int, parts: list[str]) -> str:
    """A file of SVG with these parts."""
    style = (
        "text{font:9px ui-monospace,monospace;text-anchor:middle;fill:#222}rect{stroke:#8888}"
        "text[text-anchor=end]{text-anchor:end}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{escape(title)}</title><style>{style}</style>{"".join(parts)}</svg>\n'
    )


class Bar(NamedTuple):
    """A bar from one place to another, what it is in words, the number of its colour, and a text on it."""

    begin: float
    end: float
    title: str
    hue: int = 0
    text: str = ""


@dataclass(frozen=True)
class Bars:
    """Rows of bars along one axis from 0 to `end`, whose unit is `unit`."""

    title: str
    about: str
    unit: str
    end: float
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]

    def svg(self) -> str:
        """The bars as a file that a page of documentation shows, in light and dark."""
        left, width = 2 * _LEFT, 640
        parts = [f'<text x="{left}" y="14">0</text>']
        parts.append(f'<text x="{left + width}" y="14" text-anchor="end">{self.end:,.0f} {escape(self.unit)}</text>')
        for j, (name, bars) in enumerate(self.rows):
            y = _TOP + _SIZE * j
            parts.append(f'<text x="{left - 6}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
            for bar in bars:
                x, long = (round(width * part / self.end, 1) for part in (bar.begin, bar.end - bar.begin))
                fill = f"hsl({bar.hue % HUES * 360 // HUES} 60% 55% / .45)"
                rect = f'<rect x="{left + x}" y="{y}" width="{long}" height="{_SIZE - 2}" fill="{fill}"/>'
                text = f'<text x="{left + x + long / 2:.1f}" y="{y + 15}">{escape(bar.text)}</text>' if bar.text else ""
                parts.append(f"<g>{rect}{text}<title>{escape(bar.title)}</title></g>")
        return _svg(self.title, left + width + 4, _TOP + _SIZE * len(self.rows) + 4, parts)


@dataclass(frozen=True)
class Table:
    """Rows of text under names of columns. A number is that of an operation, whose lines can be picked by it."""

    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]


Figure = Grid | Bars | Table


def cut(count: int, most: int, what: str) -> str:
    """A sentence that says how many of so many are shown; nothing where all are."""
    return f" The first {most} of {count:,} {what} are shown." if count > most else ""


def kind(figure: Figure) -> str:
    """The name that the template has for a kind of figure."""
    return type(figure).__name__.lower()


def facts(title: str, about: str, values: dict[str, object]) -> Table:
    """A table of names and values."""
    return Table(title, about, ("", "value"), tuple((name, str(value)) for name, value in values.items()))
