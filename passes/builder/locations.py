"""Which line of a program makes an operation: from the frames of this thread, or later from those in its location."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowbit.dialect.bindings import ext

_FRAME = re.compile(r'"([^"]+)":(\d+):')
_BETWEEN = (Path(__file__).parent, Path(ext.__file__).parent)  # the builder's folder, and that of MLIR's dialects


def user_line(location: Any, helpers: Sequence[str] = ()) -> tuple[str, int] | None:
    """The file and the line of the program that made an operation: those of the first frame outside of the builder.

    helpers   names of files that belong to the builder as well
    """
    frames = _FRAME.findall(str(location))
    users = ((path, int(line)) for path, line in frames if _is_users(path) and Path(path).name not in helpers)
    return next(users, None)


def named(location: Any) -> str:
    """The line before a message: `file:line: `, or nothing where none is known."""
    line = user_line(location)
    return f"{line[0]}:{line[1]}: " if line else ""


def caller() -> str:
    """The line of the program that calls the builder: `file:line: `, or nothing where only the builder is running."""
    frame = inspect.currentframe()
    while frame and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame else ""


def _is_users(path: str) -> bool:
    return Path(path).parent not in _BETWEEN and path != contextlib.__file__
