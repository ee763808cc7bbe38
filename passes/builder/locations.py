"""Which line of a program makes an operation: from the frames of this thread, or later from those in its location.

MLIR takes locations from Python's frames where its bindings may look at these. Bindings for the stable ABI, which
packages for Python 3.12 and later have, do not; there `located` and `traced` give operations theirs.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from lowbit.dialect.bindings import ext, ir

_FRAME = re.compile(r'"([^"]+)":(\d+):')
_MOST_FRAMES = 10  # of a location, the innermost of the user's first
_tracing = threading.Lock()
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
    line = next(_users_frames(), None)
    return f"{line[0]}:{line[1]}: " if line else ""


def tracebacks() -> AbstractContextManager[Any]:
    """Within it, operations have the frames of the program as their location, as far as MLIR sees to that."""
    return ir.loc_tracebacks() if _sees_frames() else nullcontext()


def located() -> AbstractContextManager[Any]:
    """Within it, operations have the lines of the program as their location, if MLIR does not see to that."""
    return nullcontext() if _sees_frames() or not ir.Context.current else _here()


@contextmanager
def traced() -> Generator[None]:
    """Within it, every operation has the frames that make it as its location, whichever dialect it is of. Threads that
    want that take turns; operations of others may get locations meanwhile, too."""
    if _sees_frames():
        with ir.loc_tracebacks():
            yield
        return
    view: Any = ir.OpView
    with _tracing:
        plain = view.__init__

        def traced_init(op: Any, *arguments: Any, loc: Any = None, **named: Any) -> None:
            plain(op, *arguments, loc=loc or _here(), **named)

        view.__init__ = traced_init
        try:
            yield
        finally:
            view.__init__ = plain


def _here() -> Any:
    """Returns the location of the innermost frames outside of the builder."""
    frames = [ir.Location.file(path, line, 0) for path, line in islice(_users_frames(), _MOST_FRAMES)]
    innermost, *callers = frames or [ir.Location.unknown()]
    return ir.Location.callsite(innermost, callers) if callers else innermost


@lru_cache(maxsize=None)
def _sees_frames() -> bool:
    """Whether MLIR's bindings look at Python's frames."""
    with ir.Context(), ir.Location.unknown(), ir.loc_tracebacks():
        return _FRAME.search(str(ir.Module.create().operation.location)) is not None


def _users_frames() -> Iterator[tuple[str, int]]:
    """Yields file and line of the frames of this thread outside of the builder, the innermost first."""
    frame = inspect.currentframe()
    while frame:
        if _is_users(frame.f_code.co_filename):
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


@lru_cache(maxsize=None)
def _is_users(path: str) -> bool:
    return Path(path).parent not in _BETWEEN and path != contextlib.__file__
