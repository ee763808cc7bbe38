"""JSON that can be read, and compared, line by line: one record a line.

A record is an object of a list, such as a measurement. An object that holds lists of records has an entry a line;
everything else, such as the environment of a run, is one line by itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write(path: Path, value: Any) -> None:
    """Write a value as JSON, one record a line. The file is replaced by a rename, so that it is whole at any time."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(f"{text_of(value)}\n")
    temporary.replace(path)


def text_of(value: Any) -> str:
    """Returns a value as JSON, one record a line."""
    if _are_records(value):
        return _block("[", (json.dumps(each) for each in value), "]")
    if _holds_records(value):
        return _block("{", (f"{json.dumps(name)}: {text_of(each)}" for name, each in value.items()), "}")
    return json.dumps(value)


def _block(begin: str, lines: Iterable[str], end: str) -> str:
    return begin + "\n" + ",\n".join(lines) + "\n" + end


def _holds_records(value: Any) -> bool:
    return _are_records(value) or (isinstance(value, dict) and any(map(_holds_records, value.values())))


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
