"""What pictures are made of: values, which a page draws as tables and bars, and a file of its own as SVG.

A picture holds what the compiler, the assembler or the emulator said, cell by cell; how it looks is the business of
`templates/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

HUES = 12
"""Colours that cells have."""


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
