"""The text of MLIR as tokens: enough of its grammar to find operations and their parts in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from lowbit.dialect.errors import LowbitError

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*)
      | (?P<string>"(?:[^"\\]|\\.)*")
      | (?P<word>[%!#@^][\w$.\-]+(?:\#\d+)?|[\w$.]+)
      | (?P<mark>->|::|[^\s])""",
    re.VERBOSE,
)
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_OPENING = {closing: opening for opening, closing in _CLOSING.items()}


class SyntaxFault(LowbitError):
    """Raised for text that is no operation of the dialect, with its place in the text."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class Token(NamedTuple):
    """A comment, string, word (an identifier with its sigil, or a number) or mark, and where it begins."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class Reader:
    """A place in a text, from which its parts are read one after the other.

    at, end: the next token and the one behind the last; closing: of an opening bracket, the closing one
    """

    def __init__(self, text: str, tokens: list[Token], closing: dict[int, int], at: int, end: int) -> None:
        self.text, self.tokens, self.closing, self.at, self.end = text, tokens, closing, at, end

    @staticmethod
    def of(text: str) -> Reader:
        """The beginning of a text. Comments are left out."""
        found = [Token(m.lastgroup or "", m.group(), m.start()) for m in _TOKEN.finditer(text)]
        tokens = [token for token in found if token.kind != "comment"]
        return Reader(text, tokens, _pairs(tokens), 0, len(tokens))

    def _part(self, at: int, end: int) -> Reader:
        return Reader(self.text, self.tokens, self.closing, at, end)

    @property
    def next(self) -> Token:
        """The next token; an empty one at the end."""
        if self.at < self.end:
            return self.tokens[self.at]
        return Token("end", "", self.tokens[self.end - 1].end if self.end else 0)

    def sees(self, text: str) -> bool:
        return self.next.text == text

    def take(self) -> Token:
        token = self.next
        self.at += 1
        return token

    def skip(self, text: str) -> bool:
        """Goes past a token if it is the next one, and says whether it was."""
        found = self.sees(text)
        self.at += found
        return found

    def expect(self, text: str) -> None:
        if not self.skip(text):
            self.fail(f"expected {text!r}")

    def fail(self, message: str) -> NoReturn:
        """Raises SyntaxFault at the next token."""
        got = repr(self.next.text) if self.next.text else "the end"
        raise SyntaxFault(f"{message}, got {got}", self.next.start)

    def group(self) -> Reader:
        """Goes past a pair of brackets and returns what is between them."""
        end = self.closing.get(self.at)
        if end is None or end >= self.end:
            raise SyntaxFault(f"nothing closes {self.next.text!r}", self.next.start)
        inner = self._part(self.at + 1, end)
        self.at = end + 1
        return inner

    def parts(self) -> Iterator[Reader]:
        """What is left, cut at the commas outside of brackets."""
        while self.at < self.end:
            start = self.at
            while self.at < self.end and not self.sees(","):
                self.at = self.closing.get(self.at, self.at) + 1
            yield self._part(start, self.at)
            self.at += 1

    def type(self) -> str:
        """Goes past a type: a word, and parameters in <> right behind it."""
        if self.next.kind != "word":
            self.fail("expected a type")
        word = last = self.take()
        if self.sees("<") and self.next.start == word.end:
            self.group()
            last = self.tokens[self.at - 1]
        return self.text[word.start : last.end]

    def types(self) -> list[str]:
        """Goes past types with commas between them."""
        found = [self.type()]
        while self.skip(","):
            found.append(self.type())
        return found

    @property
    def span(self) -> str:
        """The text of what is left."""
        if self.at >= self.end:
            return ""
        return self.text[self.tokens[self.at].start : self.tokens[self.end - 1].end]


def _pairs(tokens: list[Token]) -> dict[int, int]:
    """The closing bracket of every opening one that has one."""
    pairs: dict[int, int] = {}
    open_: list[int] = []
    for i, token in enumerate(tokens):
        if token.text in _CLOSING:
            open_.append(i)
        elif token.text in _OPENING:
            while open_:
                start = open_.pop()
                if tokens[start].text == _OPENING[token.text]:
                    pairs[start] = i
                    break
    return pairs
