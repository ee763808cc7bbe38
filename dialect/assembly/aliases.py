"""Short names for the types of printed IR, which are defined in front of it.

    !reg_64x16xf32 = !lowbit.reg<[64, 16], f32, "local(1, 2).column_spatial(64, 8)">

An alias says what kind of type it is, its shape (n: a size known at run time) and its element; types that have these in
common get a number each.
"""

from __future__ import annotations

import re

from lowbit.dialect.assembly.statement import plain
from lowbit.dialect.assembly.tokens import Reader

_PREFIX = "!lowbit."
_STRING = r'"(?:[^"\\]|\\.)*"'
_BEGIN = re.compile(rf"{_STRING}|//[^\n]*|({re.escape(_PREFIX)}[\w$.\-]+)")
_MARK = re.compile(rf"{_STRING}|->|[<>]")


def with_aliases(text: str) -> str:
    """The text with aliases for all types of the dialect."""
    aliases: dict[str, str] = {}
    written: list[str] = []
    start = 0
    for found in _BEGIN.finditer(text):
        if not found[1] or found.start() < start:  # a string, a comment, or within a type
            continue
        end = _end(text, found.end())
        type_ = plain(text[found.start() : end])
        if type_ not in aliases:
            aliases[type_] = _unused(_stem(type_), aliases)
        written += [text[start : found.start()], aliases[type_]]
        start = end
    definitions = [f"{alias} = {type_}\n" for type_, alias in aliases.items()]
    return "".join([*definitions, *written, text[start:]])


def _end(text: str, at: int) -> int:
    """Where a type ends whose name ends at a place: behind its parameters, if it has some."""
    depth = 0
    for mark in _MARK.finditer(text, at) if text.startswith("<", at) else ():
        depth += {"<": 1, ">": -1}.get(mark[0], 0)
        if not depth:
            return mark.end()
    return at


def _stem(type_: str) -> str:
    """What an alias says of a type: kind, shape and element."""
    reader = Reader.of(type_)
    kind = reader.take().text.removeprefix(_PREFIX)
    shape, element, *_ = (part.span for part in reader.group().parts())
    sizes = [size.strip().replace("-1", "n") for size in shape.strip("[]").split(",")]
    return f"!{kind}_{'x'.join([*sizes, _element(element)])}"


def _element(text: str) -> str:
    """An element as a part of a name: the name of a format, the letter v for a vector."""
    named = re.match(r'#lowbit\.format<"(\w+)"', text)
    name = named[1] if named else text.replace("vector<", "v")
    return re.sub(r"\W", "", name)


def _unused(stem: str, aliases: dict[str, str]) -> str:
    taken = set(aliases.values())
    numbered = [stem, *(f"{stem}_{i}" for i in range(1, len(taken) + 1))]
    return next(name for name in numbered if name not in taken)
