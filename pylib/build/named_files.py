"""Files that a user names, to be written: where they can't be, an error says what to do."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lowbit.dialect.errors import SpecError


@contextmanager
def writing(path: str | Path) -> Generator[None]:
    """Within it, a file or folder of a user's is written. Raises SpecError in place of OSError."""
    try:
        yield
    except OSError as error:
        raise SpecError(f"{path} can't be written ({error.strerror}); name a file in a folder of yours") from None
