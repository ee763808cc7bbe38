"""Checks of what users give for the fields of a spec or configuration. Each error names the field, what was given, and
what is allowed."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

from lowbit.dialect.errors import SpecError

MOST = 1 << 30  # rows, columns: kernels count them in 32 bits
LONGEST = 200  # characters of a value in a message


def integer(name: str, given: object, least: int) -> int:
    """Returns `given` as an int, NumPy's integers included and bool not. Raises SpecError outside least .. MOST."""
    try:
        if isinstance(given, bool):
            raise TypeError
        value = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise SpecError(f"{name}={shown(given)} must be an integer, at least {least}") from None
    if value < least:
        raise SpecError(f"{name}={shown(value)} must be at least {least}")
    if value > MOST:
        raise SpecError(f"{name}={shown(value)} must be at most {MOST}")
    return value


def shown(given: object) -> str:
    """Returns a value as a message has it: its `repr`, cut off after `LONGEST` characters, for numbers with more digits
    than Python writes, too."""
    try:
        text = repr(given)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def choice(name: str, given: object, allowed: Sequence[str]) -> str:
    """Returns `given`. Raises SpecError for anything but one of the allowed words."""
    if isinstance(given, str) and given in allowed:
        return given
    hint = did_you_mean(given, allowed) if isinstance(given, str) else ""
    raise SpecError(f"{name}={given!r} must be one of {', '.join(map(repr, allowed))}{hint}")


def boolean(name: str, given: object) -> bool:
    """Returns `given`. Raises SpecError for anything but True and False: 1 is none."""
    if given is True or given is False:
        return given
    raise SpecError(f"{name}={given!r} must be True or False")


def floats(name: str, given: object) -> tuple[float, ...]:
    """Returns the numbers of a flat sequence, array or tensor. Raises SpecError for anything else."""
    items = given.tolist() if hasattr(given, "tolist") else given  # type: ignore[attr-defined]
    try:
        return tuple(float(v) for v in cast(Iterable[float], items))
    except (TypeError, ValueError, OverflowError):
        raise SpecError(f"{name}={given!r} must be a flat sequence of numbers, one per code") from None


def in_json(value: Any) -> Any:
    """Returns the value of a field in terms of JSON: tuples as lists, and values with a `to_dict` as that says."""
    if isinstance(value, tuple):
        return list(cast(tuple[object, ...], value))
    return value.to_dict() if hasattr(value, "to_dict") else value


def did_you_mean(given: str, allowed: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns a hint at the allowed word that is nearest to `given`; "" if none is near.

    cutoff   how alike the words must be, as `difflib.get_close_matches` measures it
    """
    short = given.lower().replace("uint", "u").replace("int", "i").replace("float", "f")
    words = list(allowed)
    near = [m for name in (given, short) for m in difflib.get_close_matches(name, words, n=1, cutoff=cutoff)]
    return f"; did you mean {near[-1]!r}?" if near else ""
