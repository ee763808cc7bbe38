"""Files and folders that nobody but this user can write, since what they hold is executed.

Only what belongs to this user or to root (who may do everything anyway), and what neither a group nor everyone may
write, is trusted. New folders have mode 0700 and new files 0600, whatever the umask.
"""

from __future__ import annotations

import os
import stat
import warnings
from contextlib import suppress
from pathlib import Path

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def warn_of_others(path: Path, about: os.stat_result) -> bool:
    """Tells whether others may have written a file or folder, of which `about` says owner and mode; if so, warns."""
    if about.st_uid not in (os.geteuid(), _ROOT):
        why = f"it belongs to user {about.st_uid}, and this process runs as user {os.geteuid()}"
        fix = "delete it, or set LOWBIT_CACHE_DIR to a folder of your own"
    elif about.st_mode & _OTHERS_WRITE:
        why = f"others may write it (mode {stat.S_IMODE(about.st_mode):04o})"
        fix = f"delete it, or run `chmod -R go-w {path}` if only you have written there"
    else:
        return False
    warnings.warn(f"lowbit does not execute what {path} holds: {why}; {fix}", stacklevel=2)
    return True


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone. Raises OSError where that can't be."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=stat.S_IRWXU)


def write(path: Path, content: bytes) -> None:
    """Write a file for this user alone. Raises OSError where that can't be."""
    with open(path, "wb", opener=_private) as file:
        file.write(content)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)
