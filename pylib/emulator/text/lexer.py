"""PTX text to tokens. An opcode with its modifiers (`ld.global.L1::no_allocate.v4.u32`) is one of them.

One regular expression goes over the whole text once. A token is then a number, its place among all of them: texts are
compared all the time, but kinds and lines are wanted seldom, and are looked up when they are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property

from lowbit.dialect.errors import EmulatorError

_TOKEN = re.compile(
    r"""
    (?:\s+|//[^\n]*|/\*.*?\*/)*+
    (?:
        (?P<word>[A-Za-z_$%.][\w$%]*(?:(?:\.|::)[\w$%]+)*)
      | (?P<punct>[{}\[\](),;:<>@!+\-=|])
      | (?P<number>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | 0[xX][0-9a-fA-F]+U?\b | 0[bB][01]+U?\b
                 | \d+\.\d*(?:[eE][+-]?\d+)? | \d+U?\b)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<end>\Z)
      | (?P<unknown>.)
    )
    """,
    re.VERBOSE | re.DOTALL,
)


def integer_value(text: str) -> int:
    """An integer constant, written as in C (PTX ISA 4.5.1)."""
    text = text.lower().removesuffix("u")
    return int(text, 8) if len(text) > 1 and text[0] == "0" and text.isdigit() else int(text, 0)


class TokenStream:
    """The tokens of a source and a place among them, `at`; the last one is of kind "end" and has the text "".

    Raises EmulatorError at what is no token of PTX.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self._matches = list(_TOKEN.finditer(source))
        self.texts: list[str] = [match[match.lastgroup or 0] for match in self._matches]
        for token, match in enumerate(self._matches):
            if match.lastgroup == "unknown":
                rest = source[self.start(token) :].split("\n", 1)[0]
                raise EmulatorError(f"PTX line {self.line(token)}: cannot read `{rest[:60]}`")

    @property
    def text(self) -> str:
        """The text of the current token."""
        return self.texts[self.at]

    @property
    def kind(self) -> str:
        """The kind of the current token: "word", "punct", "number", "string" or "end"."""
        return str(self._matches[self.at].lastgroup)

    def start(self, token: int) -> int:
        """The place in the source where a token begins."""
        match = self._matches[token]
        return match.start(match.lastgroup or 0)

    def line(self, token: int) -> int:
        """The line of a token; the first is 1."""
        return bisect_right(self._lines, self.start(token))

    @cached_property
    def _lines(self) -> list[int]:
        """The places in the source where lines begin."""
        return [0, *(match.end() for match in re.finditer("\n", self.source))]

    def take(self) -> str:
        """The text of the current token; the next one is then the current one. Raises EmulatorError at the end."""
        text = self.texts[self.at]
        if not text:
            raise self.error("the text ends where more must follow; was it cut off, or is a `}` missing?")
        self.at += 1
        return text

    def accept(self, text: str) -> bool:
        """Takes the current token if it is `text`; tells whether it was."""
        if self.texts[self.at] == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.error(f"expected `{text}`, found `{self.text}`")

    def error(self, message: str, token: int | None = None) -> EmulatorError:
        """An error at a token, by default at the current one."""
        number = self.line(self.at if token is None else token)
        line = self.source.split("\n")[number - 1]
        return EmulatorError(f"PTX line {number}: `{line.strip()}`: {message}")

    def skip_line(self) -> None:
        line = self.line(self.at)
        while self.line(self.at) == line and self.kind != "end":
            self.at += 1

    def word(self) -> str:
        if self.kind != "word":
            raise self.error(f"expected a name, found `{self.text}`")
        return self.take()

    def integer(self) -> int:
        negative = self.accept("-")
        token, kind, text = self.at, self.kind, self.take()
        if kind != "number" or "." in text or text[:2] in ("0f", "0F", "0d", "0D"):
            raise self.error(f"expected an integer, found `{text}`", token)
        value = integer_value(text)
        return -value if negative else value
