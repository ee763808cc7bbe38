"""The stages of a compilation as lines of HTML, each with the operations of the program that it belongs to."""

from __future__ import annotations

import functools
import linecache
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String, Token

from lowbit.passes.codegen.sass import Sass
from lowbit.passes.origins import Lines, Origins, Place

_AROUND = 2  # lines of Python around those that made an operation


class Line(NamedTuple):
    """A line of a stage.

    html     its text, of Python with colours; the page colours all else
    origins  the numbers of the operations that it belongs to
    number   in its file
    note     beside it: how many warp instructions ran, or a control code
    """

    html: str
    origins: tuple[int, ...] = ()
    number: int = 0
    note: str = ""


@dataclass(frozen=True)
class Pane:
    """A stage: its name, a title, and its lines, or why there are none; what the notes beside them are, and what each
    says where they are codes."""

    name: str
    title: str
    lines: tuple[Line, ...] = ()
    absent: str = ""
    notes: str = ""
    words: dict[str, str] = field(default_factory=dict[str, str])


_DEFINITION = re.compile(r"\s*(?:def|class)\b")
_PYTHON = {Comment: "c", Keyword: "k", Number: "m", String: "s", Name.Function: "v", Name.Class: "v"}


def _lines(text: str) -> list[str]:
    """The lines of a text of IR or assembly as HTML."""
    return escape(text, quote=False).removesuffix("\n").split("\n")


@functools.lru_cache(maxsize=1024)
def coloured_python(text: str) -> list[str]:
    """The lines of Python as HTML."""
    lines = [""]
    for kind, value in PythonLexer(stripnl=False).get_tokens(text):
        short = _class_of(kind)
        for i, part in enumerate(escape(value, quote=False).split("\n")):
            if i:
                lines.append("")
            if part:
                lines[-1] += f"<i class={short}>{part}</i>" if short else part
    return lines


@functools.cache
def _class_of(kind: Any) -> str:
    """The class of a kind of token; "" for what has no colour."""
    while kind is not Token and kind not in _PYTHON:
        kind = kind.parent
    return _PYTHON.get(kind, "")


def stage_pane(name: str, title: str, text: str, numbers: Lines) -> Pane:
    """A stage whose lines have an operation each."""
    origins = (() if number is None else (number,) for number in numbers)
    lines = (Line(html, of, at) for at, (html, of) in enumerate(zip(_lines(text), origins), 1))
    return Pane(name, title, tuple(lines))


def pane_above(name: str, title: str, text: str, places: Sequence[Place | None], origins: Origins) -> Pane:
    """A stage before the operations of the program have numbers: its lines belong to those of the same line of Python.
    An operation on tensors, which has none, became all of them."""
    by_place = _by_place(origins)
    every = tuple(range(1, len(origins.python) + 1))
    lines: list[Line] = []
    for at, (html, line) in enumerate(zip(_lines(text), text.split("\n")), 1):
        place = places[at - 1] if places else None
        whole = not any(places) and "= lowbit." in line
        lines.append(Line(html, tuple(by_place.get(place, ())) if place else every if whole else (), at))
    return Pane(name, title, tuple(lines))


def python_pane(origins: Origins) -> Pane:
    """The lines of Python that made the program, and those around them, file by file: the kernel's own first."""
    by_place = _by_place(origins)
    lines: list[Line] = []
    for file in dict.fromkeys(place[0] for place in by_place):
        lines.append(Line(f"<b>{escape(_shown(file))}</b>"))
        lines += _lines_of(file, {line: of for (path, line), of in by_place.items() if path == file})
    return Pane("python", "Python", tuple(lines), "" if lines else "no line of Python is known")


def _by_place(origins: Origins) -> dict[Place, list[int]]:
    found: dict[Place, list[int]] = {}
    for number, place in enumerate(origins.python, 1):
        if place:
            found.setdefault(place, []).append(number)
    return found


def _shown(file: str) -> str:
    """A file's name in the package, or its last part elsewhere."""
    home = f"{Path(__file__).parents[2]}/"
    return file.removeprefix(home) if file.startswith(home) else Path(file).name


def _lines_of(file: str, made: dict[int, list[int]]) -> Iterable[Line]:
    linecache.checkcache(file)
    source = [line.removesuffix("\n") for line in linecache.getlines(file)]  # as Python decodes and counts them
    if not source:
        return [Line(f"line {line}, of a file that is not here", tuple(of), line) for line, of in sorted(made.items())]
    shown = sorted({at for line in made for at in range(line - _AROUND, line + _AROUND + 1) if 1 <= at <= len(source)})
    ends = {_definition(source, first): end for first, end in runs(shown)}  # a part may begin within a string
    html: dict[int, str] = {}
    for begin, end in ends.items():
        html |= enumerate(coloured_python("\n".join(source[begin - 1 : end - 1])), begin)
    found: list[Line] = []
    for first, end in runs(shown):
        found += [Line("⋯")] * bool(found)
        found += [Line(html[at], tuple(made.get(at, ())), at) for at in range(first, end)]
    return found


def _definition(source: Sequence[str], line: int) -> int:
    """The number of the line with the definition in front of a line, or of the first."""
    return next((at for at in range(line, 0, -1) if _DEFINITION.match(source[at - 1])), 1)


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of rising numbers that follow each other, from the first to behind the last."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def sass_pane(code: Sequence[Sass], lines: Sequence[int]) -> Pane:
    """Machine code with its control codes. lines: the operation of each instruction; 0 for none."""
    found: list[Line] = []
    controls = {each.control for each in code}
    texts = {control: str(control) for control in controls}
    for each, line in zip(code, lines):
        found += [Line(f"<b>{label}:</b>") for label in each.labels]
        html = f"<i class=c>{each.offset:04x}</i> {escape(each.text, quote=False)}"
        found.append(Line(html, (line,) if line else (), 0, texts[each.control]))
    about = "wait barriers : read barrier : write barrier : yield : stall"
    return Pane("sass", "SASS", tuple(found), notes=about, words={str(each): each.words for each in controls})


def with_counts(pane: Pane, counts: Counter[int], by_line: dict[int, int] | None = None) -> Pane:
    """A pane with how many warp instructions ran of each line: `counts` by operation, or exactly, `by_line`."""

    def noted(line: Line) -> Line:
        count = by_line.get(line.number, 0) if by_line is not None else sum(counts[origin] for origin in line.origins)
        return line._replace(note=f"{count:,}") if count else line

    return replace(pane, lines=tuple(map(noted, pane.lines)), notes="warp instructions that ran")
