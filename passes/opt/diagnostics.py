"""Diagnostics as values, and the `expected-error` comments that a test file checks them against.

    // expected-error @+1 {{'lowbit.mma' op needs}}      on the next line; also @-2, @above, @below, @unknown
    // expected-note  @below {{prior use here}}          -error, -warning, -remark, -note

The text in braces has to be part of the message. As in mlir-opt, every diagnostic must be expected and every
expectation met; @above and @below skip lines that hold nothing but other expectations, and @unknown means a
diagnostic without a place in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from lowbit.dialect.bindings import ir

Severity = Literal["error", "warning", "remark", "note"]

_EXPECTATION = re.compile(
    r"expected-(?P<severity>error|warning|remark|note)\s*"
    r"(?:@(?P<where>[+-]\d+|above|below|unknown))?\s*\{\{(?P<text>.*)\}\}\s*$"
)


@dataclass(frozen=True)
class Diagnostic:
    """A report of the parser, a verifier or a pass. Line and column count from 1; 0 where the place is unknown."""

    severity: Severity
    message: str
    line: int = 0
    column: int = 0
    notes: tuple[Diagnostic, ...] = ()

    @classmethod
    def from_mlir(cls, diagnostic: ir.Diagnostic) -> Diagnostic:
        severity: Severity = _SEVERITIES[diagnostic.severity]
        notes = tuple(cls.from_mlir(note) for note in diagnostic.notes)
        return cls(severity, diagnostic.message, *position(diagnostic.location), notes)

    def flat(self) -> Iterator[Diagnostic]:
        """The diagnostic and its notes, but for MLIR's print of the operation: no test wants to spell it."""
        yield self
        yield from (note for note in self.notes if not note.message.startswith("see current operation"))

    def render(self, file: str, source: list[str]) -> str:
        """`file:line:col: error: message` and the line with a caret, as compilers have it; then the notes."""
        place = f"{file}:{self.line}:{self.column}: " if self.line else ""
        text = f"{place}{self.severity}: {self.message}"
        if 0 < self.line <= len(source):
            text += f"\n{source[self.line - 1]}\n{' ' * (self.column - 1)}^"
        return "\n".join([text, *(note.render(file, source) for note in self.notes)])


_SEVERITIES: dict[ir.DiagnosticSeverity, Severity] = {
    ir.DiagnosticSeverity.ERROR: "error",
    ir.DiagnosticSeverity.WARNING: "warning",
    ir.DiagnosticSeverity.REMARK: "remark",
    ir.DiagnosticSeverity.NOTE: "note",
}


def position(location: ir.Location | None) -> tuple[int, int]:
    """Line and column of the first file position in a location; (0, 0) if it has none."""
    # LLVM 23's bindings hand over the location of a diagnostic without its type.
    location = location and ir.Location.from_attr(location.attr, location.context)
    match location:
        case ir.FileLineColLoc():
            return location.start_line, location.start_col
        case ir.NameLoc():
            return position(location.child_loc)
        case ir.CallSiteLoc():
            return position(location.callee)
        case ir.FusedLoc():
            return next(filter(any, map(position, location.locations)), (0, 0))
        case _:
            return 0, 0


@dataclass(frozen=True)
class Expectation:
    """An `expected-...` comment, itself on line `written`; the diagnostic has to be on `line` (0: none)."""

    severity: Severity
    text: str
    line: int
    written: int

    def matches(self, diagnostic: Diagnostic) -> bool:
        same_place = (self.severity, self.line) == (diagnostic.severity, diagnostic.line)
        return same_place and self.text in diagnostic.message


def expectations(text: str) -> list[Expectation]:
    """All expectations in the text of a file, in order."""
    lines = text.split("\n")
    alone = [line.lstrip().startswith("//") and bool(_EXPECTATION.search(line)) for line in lines]
    found: list[Expectation] = []
    for index, line in enumerate(lines):
        if m := _EXPECTATION.search(line):
            target = _target(m["where"], index, alone)
            found.append(Expectation(m["severity"], m["text"], target, index + 1))  # type: ignore[arg-type]
    return found


def _target(where: str | None, index: int, alone: list[bool]) -> int:
    """The line number, from 1, that an expectation on line `index`, from 0, speaks of."""
    if where == "unknown":
        return 0
    if where in ("above", "below"):
        step = -1 if where == "above" else 1
        index += step
        while 0 <= index < len(alone) and alone[index]:
            index += step
        return index + 1
    return index + 1 + int(where or 0)


def mismatches(diagnostics: Iterable[Diagnostic], expected: Iterable[Expectation]) -> list[Diagnostic]:
    """Returns why a test fails: diagnostics that nothing expects, and expectations that nothing met."""
    wanted = list(expected)
    wrong: list[Diagnostic] = []
    for got in (d for diagnostic in diagnostics for d in diagnostic.flat()):
        match = next((e for e in wanted if e.matches(got)), None)
        if match is None:
            message = f'unexpected {got.severity}: "{got.message}"'
            wrong.append(Diagnostic("error", message, got.line, got.column))
        else:
            wanted.remove(match)
    for e in wanted:
        where = f"on line {e.line}" if e.line else "without a location"
        message = f'expected {e.severity} "{e.text}" {where} was not produced'
        wrong.append(Diagnostic("error", message, e.written, 1))
    return wrong
