"""Which cases of a sweep CI runs, of more than it has time for: those in which the most meets. The others are slow."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import combinations
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def telling(rows: Iterable[T], features: Callable[[T], Iterable[Hashable]], most: int | None = None) -> list[T]:
    """Returns rows that have all features that any row has, or, of at most so many rows, nearly as many as these can:
    at each turn the row with the most that are missing."""
    places: dict[Hashable, int] = {}
    left = [(row, sum(1 << places.setdefault(each, len(places)) for each in set(features(row)))) for row in rows]
    found: list[T] = []
    seen = 0
    while left and len(found) != most:
        number = max(range(len(left)), key=lambda number: (left[number][1] & ~seen).bit_count())
        row, bits = left.pop(number)
        if not bits & ~seen:
            break
        found.append(row)
        seen |= bits
    return found


Row = tuple[Any, ...]


def swept(rows: Iterable[Row], features: Callable[[Row], Iterable[Hashable]] | None = None) -> list[Any]:
    """Returns rows as parameters of a test. CI runs those that have all features, by default those in which every two
    values meet that meet in any row."""
    every = list(rows)
    kept = set(map(id, telling(every, features or _pairs)))
    return [pytest.param(*row, marks=[] if id(row) in kept else [pytest.mark.slow]) for row in every]


def every_other(rows: Iterable[Row], first: int = 0) -> list[Any]:
    """Returns rows as parameters of a test, of which CI runs every other one from the first on: where another test,
    which begins at the next, runs the same code for the others."""
    return [
        pytest.param(*row, marks=[] if number % 2 == first else [pytest.mark.slow]) for number, row in enumerate(rows)
    ]


def without(row: Row) -> Any:
    """Returns a row as a parameter that CI leaves out."""
    return pytest.param(*row, marks=pytest.mark.slow)


def _pairs(row: Row) -> Iterator[Hashable]:
    return combinations(enumerate(map(str, row)), 2)
