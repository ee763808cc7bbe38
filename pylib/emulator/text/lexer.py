"""PTX text to tokens. An opcode with its modifiers (`ld.global.L1::no_allocate.v4.u32`) is one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.dialect.errors import EmulatorError

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


def integer_value(text: str) -> int:
    """An integer constant, written as in C (PTX ISA 4.5.1)."""
    text = text.lower().removesuffix("u")
    return int(text, 8) if len(text) > 1 and text[0] == "0" and text.isdigit() else int(text, 0)


class TokenStream:
    """Tokens and a place among them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = list(tokenize(source))
        self.at = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.token
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.token.text == text and self.token.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"expected `{text}`, found `{self.token.text}`")

    def error(self, message: str, token: Token | None = None) -> EmulatorError:
        token = token or self.token
        line = self.source.splitlines()[token.line - 1] if self.source else ""
        return EmulatorError(f"PTX line {token.line}: `{line.strip()}`: {message}")

    def skip_line(self) -> None:
        line = self.token.line
        while self.token.line == line and self.token.kind != "end":
            self.at += 1

    def word(self) -> str:
        if self.token.kind != "word":
            raise self.error(f"expected a name, found `{self.token.text}`")
        return self.take().text

    def integer(self) -> int:
        negative = self.accept("-")
        token = self.take()
        if token.kind != "number" or "." in token.text or token.text[:2] in ("0f", "0F", "0d", "0D"):
            raise self.error(f"expected an integer, found `{token.text}`", token)
        value = integer_value(token.text)
        return -value if negative else value
