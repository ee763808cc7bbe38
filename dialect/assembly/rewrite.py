"""Rewrites a text of IR from MLIR's generic form to ours, and back, operation by operation."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from lowbit.dialect.assembly.declared import declarations
from lowbit.dialect.assembly.statement import (
    Statement,
    generic_head,
    generic_tail,
    has_own_form,
    own_head,
    own_types,
    read_generic,
    read_own,
)
from lowbit.dialect.assembly.tokens import Reader, SyntaxFault, Token

_Rewrite = Callable[[Reader, Token], str | None]  # writes the operation that begins with a token; None if none does


def to_own(text: str) -> str:
    """The text with every operation of the dialect in our form, as far as it has one there."""
    return _rewritten(Reader.of(text), 0, len(text), _own) if '"lowbit.' in text else text


def to_generic(text: str) -> str:
    """The text with every operation of the dialect in the generic form, on the same line. Raises SyntaxFault."""
    return _rewritten(Reader.of(text), 0, len(text), _generic)


def _rewritten(reader: Reader, start: int, end: int, rewrite: _Rewrite) -> str:
    """The text from start to end, of which the reader has the tokens."""
    written: list[str] = []
    while reader.at < reader.end:
        token = reader.take()
        new = rewrite(reader, token)
        if new is not None:
            written += [reader.text[start : token.start], new]
            start = reader.tokens[reader.at - 1].end
    return "".join([*written, reader.text[start:end]])


def _bodies(statement: Statement, rewrite: _Rewrite) -> list[str]:
    """The bodies of a statement's regions, from one brace to the other."""
    return [_rewritten(r.body, *_extent(r.body), rewrite) for r in statement.regions]


def _extent(body: Reader) -> tuple[int, int]:
    """Where the text of a body begins and ends, with the space around it."""
    return body.tokens[body.at - 1].end, body.tokens[body.end].start


def _own(reader: Reader, token: Token) -> str | None:
    declaration = declarations().get(token.text[1:-1]) if token.kind == "string" and reader.sees("(") else None
    if declaration is None:
        return None
    at = reader.at
    statement = read_generic(declaration, reader)
    if not has_own_form(statement):
        reader.at = at
        return None
    bodies = [f" {{{body}}}" for body in _bodies(statement, _own)]
    return own_head(statement) + "".join(bodies) + own_types(statement)


def _generic(reader: Reader, token: Token) -> str | None:
    if token.kind != "word" or reader.sees("=") or not token.text.startswith("lowbit."):
        return None
    declaration = declarations().get(token.text)
    if declaration is None:
        _check_known(reader, token)
        return None
    statement = read_own(declaration, reader)
    end = reader.tokens[reader.at - 1].end
    if not statement.regions:
        return generic_head(statement) + generic_tail(statement) + _lines(reader.text, token.start, end)
    (region,) = statement.regions
    arguments = f" ^bb0({region.arguments}):" if region.arguments is not None else ""
    first, last = _extent(region.body)
    (body,) = _bodies(statement, _generic)
    head = f"{generic_head(statement)} ({{{arguments}{_lines(reader.text, token.start, first)}"
    return f"{head}{body}}}){generic_tail(statement)}{_lines(reader.text, last, end)}"


def _lines(text: str, start: int, end: int) -> str:
    """As many line breaks as there are in a part of the text: what comes later stays on its line."""
    return "\n" * text.count("\n", start, end)


def _check_known(reader: Reader, token: Token) -> None:
    """Raises SyntaxFault for an unknown name where an operation begins; MLIR would fail there without a word."""
    before = reader.tokens[reader.at - 2].text if reader.at > 1 else ""
    begins = before in ("=", "") or "\n" in reader.text[reader.tokens[reader.at - 2].end : token.start]
    if begins and reader.next.text not in (",", "}", "=", ":"):
        near = difflib.get_close_matches(token.text, declarations(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SyntaxFault(f"there is no operation {token.text}{hint}", token.start)
