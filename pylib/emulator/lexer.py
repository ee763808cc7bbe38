"""PTX text to tokens. An opcode with its modifiers (`ld.global.L1::no_allocate.v4.u32`) is one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dialect.errors import EmulatorError

_TOKEN = re.compile(
    r"""
    (?P<skip>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | 0[xX][0-9a-fA-F]+U?\b | 0[bB][01]+U?\b
             | \d+\.\d*(?:[eE][+-]?\d+)? | \d+U?\b)
  | (?P<word>[A-Za-z_$%.][\w$%]*(?:(?:\.|::)[\w$%]+)*)
  | (?P<punct>[{}\[\](),;:<>@!+\-=|])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int
    start: int
    end: int


def tokenize(source: str) -> Iterator[Token]:
    """The tokens of `source`, then one of kind "end". Raises EmulatorError at what is no token of PTX."""
    position, line = 0, 1
    while position < len(source):
        match = _TOKEN.match(source, position)
        if match is None:
            text = source[position:].split("\n", 1)[0]
            raise EmulatorError(f"PTX line {line}: cannot read `{text[:60]}`")
        kind, text = str(match.lastgroup), match.group()
        if kind != "skip":
            yield Token(kind, text, line, position, match.end())
        line += text.count("\n")
        position = match.end()
    yield Token("end", "", line, position, position)
