"""What tests have replaced at this moment, so that nothing is kept that replaced code made (`kept.py`).

Tests replace code with pytest's MonkeyPatch alone, which is watched here; `test_kept.py` looks for other ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from pytest import MonkeyPatch

_HOMES: dict[MonkeyPatch, list[str]] = {}


def homes() -> set[str]:
    """Returns the modules in which something is replaced now; "" for a dictionary, which may be anybody's.

    Environment variables don't count, and what pytest replaces of its own.
    """
    return {home for found in _HOMES.values() for home in found}


def watch() -> None:
    """From now on see what every MonkeyPatch replaces, and puts back."""
    for name in ("setattr", "delattr", "setitem", "delitem"):
        setattr(MonkeyPatch, name, _noting(getattr(MonkeyPatch, name)))
    MonkeyPatch.undo = _forgetting(MonkeyPatch.undo)


def _noting(replace: Callable[..., None]) -> Callable[..., None]:
    @wraps(replace)
    def noted(patch: MonkeyPatch, target: Any, *arguments: Any, **options: Any) -> None:
        home = _home(target)
        if target is not os.environ and not home.startswith("_pytest."):
            _HOMES.setdefault(patch, []).append(home)
        replace(patch, target, *arguments, **options)

    return noted


def _forgetting(undo: Callable[[MonkeyPatch], None]) -> Callable[[MonkeyPatch], None]:
    @wraps(undo)
    def undone(patch: MonkeyPatch) -> None:
        undo(patch)
        _HOMES.pop(patch, None)

    return undone


def _home(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, ModuleType):
        return target.__name__
    if isinstance(target, dict):
        return ""
    return (target if isinstance(target, type) else type(target)).__module__
