"""The page: stages and pictures in one file of HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from lowbit.pylib.build.named_files import writing
from lowbit.pylib.explain.figures import HUES, Figure, kind
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
        return _template().render(page=self, kind=kind, hues=HUES)

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


@lru_cache(maxsize=1)
def _template() -> Any:
    """The template of a page."""
    loader = PackageLoader("lowbit.pylib.explain")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template("page.html")


def choices_html(title: str, choices: Mapping[str, Any]) -> str:
    """The kernels of a matmul as a table: what a notebook shows of it."""
    rows = "".join(
        f"<tr><td>{each['first']} to {each['last'] or 'any'}</td><td>{escape(', '.join(each['launches']))}</td></tr>"
        for part in (choices.get("few"), choices)
        for each in (part or {"rows": []})["rows"]
    )
    return f"<table><caption>{escape(title)}</caption><tr><th>rows</th><th>launches</th></tr>{rows}</table>"
