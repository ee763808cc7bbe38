"""The outcomes of an instruction: its threads jump, end or wait. None: they go on with the next instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowbit.pylib.emulator.machine.faults import Array

#: The threads that take a step: a bool per lane, or None for every lane of the block (the fast path).
Mask = Array | None

WARP = 32


@dataclass(frozen=True)
class Jump:
    threads: Mask
    target: int


@dataclass(frozen=True)
class Scatter:
    """Each thread goes to a target of its own; `targets` has one for every lane."""

    threads: Mask
    targets: Array


@dataclass(frozen=True)
class Exit:
    threads: Mask


@dataclass(frozen=True)
class Converge:
    """These threads wait for others of their warps at this instruction; the rest of the step is done.

    `awaits`: they wait for something that other blocks or copies do, and this is, for a lane, what it is when it never
    happens.
    """

    threads: Array
    awaits: Callable[[int], str] | None = None


@dataclass(frozen=True)
class Arrive:
    """Waits at barrier `number` (one, or one per lane), which opens when `count` threads (None: all) have come."""

    threads: Mask
    number: Array
    count: int | None
    wait: bool
    aligned: bool


Outcome = Jump | Scatter | Exit | Converge | Arrive
Step = Callable[[Mask], Outcome | None]
