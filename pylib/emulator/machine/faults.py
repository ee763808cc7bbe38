"""Errors of a running kernel, raised where its place is not known yet, and the array type of all modules."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def any_of(mask: Array) -> bool:
    """Tells whether something in a mask is set. Of a few hundred lanes NumPy counts those that are in a fifth of the
    time that `mask.any()` takes."""
    return bool(np.count_nonzero(mask))


def any_outside(offset: Array, most: int) -> bool:
    """Tells whether any of some offsets (int64) is not in 0 to `most`."""
    return any_of(offset.view(np.uint64) > most)  # a negative one is above all others


def all_of(mask: Array) -> bool:
    """Tells whether all of a mask is set."""
    return int(np.count_nonzero(mask)) == mask.size


def distinct(values: Array) -> list[int]:
    """The integers among some, each once, in ascending order. Mostly all are one and the same, which takes half as long
    to find out as to sort them."""
    first = values[:1]
    return first.tolist() if all_of(values == first) else np.unique(values).tolist()


class Fault(Exception):
    """A mistake of the running kernel. `lane` is the thread at fault, where there is one."""

    def __init__(self, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.lane = lane


class Unsupported(Exception):
    """An instruction, modifier or operand that the emulator does not know."""


def require_multiple(address: Array, size: int, lanes: Array) -> None:
    """Raise a Fault for the first of `lanes` whose address is not a multiple of a power of two."""
    rest = address & (size - 1)
    if any_of(rest):
        require(rest == 0, lanes, f"an address that is not a multiple of {size}")


def require(good: Array, lanes: Array, message: str) -> None:
    """Raise a Fault for the first of `lanes` whose `good` is false. `good` may have further axes."""
    if not all_of(good):
        bad = np.flatnonzero(~good.reshape(len(lanes), -1).all(axis=1))[0]
        raise Fault(message, int(lanes[bad]))
