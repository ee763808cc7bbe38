"""Which line of the program each line of every stage came from.

A program's operations are numbered once, when it is complete (stage "tile" of a GPU, "vector" of a CPU). Passes hand an
operation's location on, so its number comes along, as a line of a file of its own name, down to `.loc` in assembly and
line information in machine code. A stage is printed with numbers, which are taken out again: what is left is
`print_module`'s text, and a number for every line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lowbit.dialect.assembly import print_numbered
from lowbit.dialect.bindings import ir
from lowbit.passes.builder.locations import user_line

FILE = "program"
_NUMBER = re.compile(rf'"{FILE}":(\d+):')
_DEBUG_LOCATION = re.compile(r"^(!\d+) = (?:distinct )?!DILocation\(line: (\d+)")
_DEBUG_USE = re.compile(r",? !dbg (!\d+)")
_LOC = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)")
_OF_LINES = re.compile(r"^\s*\.(?:file|cfi_\w+|section\s+\.debug_\w+)\b|^(?:\$|\.)L_*(?:tmp|func_begin|func_end)\d+:$")

Place = tuple[str, int]
"""A file and a line of it."""

Lines = tuple[int | None, ...]
"""For each line of a text the number of the program's operation that it came from; None for those of none."""


@dataclass
class Origins:
    """The operations of a program by number, from 1 on, and where the lines of its stages came from.

    helpers   names of files whose functions the program is written with, and whose lines tell nothing
    python    the file and the line that made each operation; None for what passes made of their own accord
    above     the same of the lines of the stages before the operations have numbers, by the stage's name
    lines     the origins of the lines of all other stages
    assembly  PTX, or a CPU's assembly, with `.loc` directives whose lines are numbers
    """

    helpers: tuple[str, ...] = ()
    python: list[Place | None] = field(default_factory=list["Place | None"])
    above: dict[str, tuple[Place | None, ...]] = field(default_factory=dict[str, "tuple[Place | None, ...]"])
    lines: dict[str, Lines] = field(default_factory=dict[str, Lines])
    assembly: str = ""

    def number(self, module: ir.Module) -> None:
        """Numbers a module's operations in the order in which they are printed; the numbers are their locations."""
        for op in _operations(module):
            self.python.append(user_line(op.location, self.helpers))
            op.location = ir.Location.file(FILE, len(self.python), 0)

    def recorded(self, stage: str, module: ir.Module) -> str:
        """Returns `print_module`'s text, and notes where its lines came from."""
        if self.python:
            text, self.lines[stage] = _numbered(module, number_of)
            return text
        places: list[Place | None] = []

        def new_number(location: Any) -> int:
            places.append(user_line(location, self.helpers))
            return len(places)

        text, numbers = _numbered(module, new_number)
        self.above[stage] = tuple(places[number - 1] if number else None for number in numbers)
        return text

    def recorded_llvm(self, text: str) -> str:
        """Returns LLVM IR without its debug information, and notes where its lines came from."""
        body, _, metadata = text.partition("\n!llvm.dbg.cu")
        found = [m for line in metadata.splitlines() if (m := _DEBUG_LOCATION.match(line))]
        numbers = {m[1]: int(m[2]) for m in found}
        body = body.rstrip("\n")
        uses = [_DEBUG_USE.search(line) for line in body.splitlines()]
        self.lines["ll"] = tuple(numbers.get(use[1]) or None if use else None for use in uses)
        return _DEBUG_USE.sub("", body) + "\n"

    def recorded_assembly(self, stage: str, text: str) -> str:
        """Returns PTX or a CPU's assembly without its `.loc` directives, and notes where its lines came from."""
        self.assembly = text
        here: int | None = None
        kept: list[str] = []
        numbers: list[int | None] = []
        for line in text.splitlines():
            if found := _LOC.match(line):
                here = int(found[1]) or None
            elif not _OF_LINES.match(line):
                kept.append(line)
                numbers.append(here if line.startswith("\t") or line.endswith(";") else None)  # inline, without a tab
        self.lines[stage] = tuple(numbers)
        return "\n".join(kept) + "\n"


def number_of(location: Any) -> int | None:
    """Returns the first number in a location: of operations that were fused, that of the first one."""
    found = _NUMBER.search(str(location))
    return int(found[1]) if found else None


def _numbered(module: ir.Module, numbered: Callable[[Any], int | None]) -> tuple[str, Lines]:
    text, numbers = print_numbered(module, numbered)
    return text, tuple(numbers[: len(text.splitlines())])


def _operations(module: ir.Module) -> list[Any]:
    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found
