"""The page: stages and pictures in one file of HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from lowbit.pylib.build.named_files import writing
from lowbit.pylib.explain.figures import HUES, Bars, Cell, Figure, Grid, kind
from lowbit.pylib.explain.text import Pane


@dataclass(frozen=True)
class Page:
    """A kernel, explained. Notebooks show it.

    title     what is computed, and on what
    about     the kernel that does it, in words
    panes     the stages, from Python to machine code
    figures   pictures and tables
    """

    title: str
    about: str
    panes: tuple[Pane, ...]
    figures: tuple[Figure, ...]

    @property
    def html(self) -> str:
        """The page as one file, which asks for nothing from the network."""
        return _template("page.html").render(page=self, kind=kind, hues=HUES, items=_items, cells=_cells, bars=_bars)

    def save(self, path: str | Path) -> None:
        """Writes the page to a file. Raises SpecError where it can't be written."""
        html = self.html
        with writing(path):
            Path(path).write_text(html, encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style is not the notebook's."""
        style = "width:100%;height:80vh;border:1px solid #8888"
        return f'<iframe title="{escape(self.title)}" style="{style}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"Page({self.title}: {', '.join(pane.name for pane in self.panes)})"


def svg(figure: Grid | Bars) -> str:
    """A picture as a file that a page of documentation shows, in light and dark."""
    return _template("picture.svg").render(figure=figure, kind=kind, hues=HUES)


@lru_cache
def _template(name: str) -> Any:
    """A template by the name of its file."""
    loader = PackageLoader("lowbit.pylib.explain")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(name)


# What a page has thousands of, as text: a template takes five times as long.


def _items(pane: Pane) -> Markup:
    """The lines of a stage. One has a number where that is not the number behind that of the line in front."""

    def items() -> Iterator[str]:
        last = 0
        for html, origins, number, note in pane.lines:
            of = f' data-o="{" ".join(map(str, origins))}"' if origins else ""
            counted = "" if number == last + 1 else f" value={number}" if number else " class=plain"
            last = number
            yield f"<li{of}{counted}>{f'<u>{note}</u>' if note else ''}{html}"

    return Markup("\n".join(items()))


def _cells(cells: tuple[Cell, ...]) -> Markup:
    """A row of a grid."""

    def drawn() -> Iterator[str]:
        for text, title, hue in cells:
            yield f'<td{f" class=h{hue % HUES}" if hue >= 0 else ""} title="{escape(title)}">{escape(text)}'

    return Markup("".join(drawn()))


def _bars(figure: Bars, row: int) -> Markup:
    """A row of bars."""

    def drawn() -> Iterator[str]:
        for begin, end, title, hue, text in figure.rows[row][1]:
            left, width = (100 * part / figure.end for part in (begin, end - begin))
            style = f"left:{left:.3f}%;width:{width:.3f}%"
            yield f'<b class=h{hue % HUES} title="{escape(title)}" style="{style}">{escape(text)}</b>'

    return Markup("".join(drawn()))


def choices_html(title: str, choices: Mapping[str, Any]) -> str:
    """The kernels of a matmul as a table: what a notebook shows of it."""
    rows = "".join(
        f"<tr><td>{_range(each['first'], each['last'])}</td><td>{escape(', '.join(each['launches']))}</td></tr>"
        for part in (choices.get("few"), choices)
        for each in (part or {"rows": []})["rows"]
    )
    return f"<table><caption>{escape(title)}</caption><tr><th>rows</th><th>launches</th></tr>{rows}</table>"


def _range(first: int, last: int | None) -> str:
    return str(first) if first == last else f"{first} to {last or 'any'}"
