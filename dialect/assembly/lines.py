"""Folds long lines of IR, in which a line break means no more than a space."""

from __future__ import annotations

import re

_WIDTH = 150  # columns, but for text that has no place to break
_INDENT = "    "
_PLACES = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?P<part> (?=: |attributes \{)|(?<!=)(?<!attributes) (?=\{.))|(?P<place> (?=-> )|(?<=,) )'
)


def folded(text: str) -> str:
    """The text with no line of more than 150 columns, as far as there are places to break it."""
    return "\n".join(part for line in text.split("\n") for part in _fold(line))


def _fold(line: str) -> list[str]:
    """A line as several, of which all but the first are indented."""
    if line.lstrip().startswith("//"):
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + _INDENT
    lines: list[str] = []
    while len(line) > _WIDTH and (at := _place(line, len(indent))):
        lines.append(line[:at])
        line = indent + line[at + 1 :]
    return [*lines, line]


def _place(line: str, least: int) -> int | None:
    """Where to break a line: in front of its attributes or types if the rest fits then, else as late as possible."""
    places = [m for m in _PLACES.finditer(line) if (m["part"] or m["place"]) and least < m.start() <= _WIDTH]
    parts = [m.start() for m in places if m["part"] and least + len(line) - m.start() <= _WIDTH]
    return max(parts or (m.start() for m in places), default=None)
