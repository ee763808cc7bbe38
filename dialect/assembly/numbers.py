"""Takes locations out of printed IR, and says which number each line's operation had there.

A location stands behind its operation, of one with regions behind the last brace, so its first line gets the number
when the last one has been read.
"""

from __future__ import annotations

import re

FILE = "number"
"""The file whose lines are numbers."""
_USE = re.compile(r' ?loc\((#loc\d*|unknown|"[^"]*")\)')
_DEFINITION = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_PLACE = re.compile(rf'"{FILE}":(\d+):|\((#loc\d*)\)$')  # a number, or what a name stands in front of


def without_locations(text: str) -> list[tuple[str, int | None]]:
    """The lines of a text without locations, each with the number in the location of its operation."""
    lines = text.split("\n")
    numbers = _numbers(lines)
    kept: list[tuple[str, int | None]] = []
    open_: list[list[int]] = []  # the lines of the operations whose regions are open
    for line in lines:
        if _DEFINITION.match(line):
            continue
        uses, bare = _USE.findall(line), _USE.sub("", line)
        number = numbers.get(uses[-1]) if uses and not bare.lstrip().startswith("^") else None
        mine = [*(open_.pop() if bare.lstrip().startswith("}") else ()), len(kept)]
        kept.append((bare, number))
        if bare.endswith("{"):
            open_.append(mine)
        else:
            for at in mine:
                kept[at] = kept[at][0], number
    return kept


def _numbers(lines: list[str]) -> dict[str, int]:
    """The numbers of the locations that have one, by their names."""
    places = {m[1]: found for line in lines if (m := _DEFINITION.match(line)) and (found := _PLACE.search(m[2]))}
    direct = {name: int(found[1]) for name, found in places.items() if found[1]}
    return direct | {name: direct[found[2]] for name, found in places.items() if found[2] in direct}
