"""What happens in a launch, for those who look on: every instruction with its warps, accesses to shared memory, copies.

    with observing(Observer(clusters=1)) as seen:
        mm(x, w)  # on target emulator:sm_90a
    seen.launches[0].events

Launches of this thread are observed within the block. An observer costs time: nothing else does where there is none.
The emulator has no clock. Times are steps: one instruction of the threads that take it together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lowbit.pylib.emulator.machine.faults import Array
from lowbit.pylib.emulator.machine.machine import Block
from lowbit.pylib.emulator.machine.step_results import WARP, Mask, Outcome, Step
from lowbit.pylib.emulator.text.ptx import Kernel

BANKS, BANK_BYTES = 32, 4
_LINE = BANKS * BANK_BYTES


class Event(NamedTuple):
    """At `time` these warps of a block took an instruction, given by its number."""

    time: int
    block: int
    instruction: int
    warps: tuple[int, ...]


class Copy(NamedTuple):
    """A copy to shared memory was under way from one step to another.

    parts   the stretches of shared memory that it fills, each from its first byte to behind the last
    end     the step in which it landed; None where nobody waited for it
    """

    block: int
    instruction: int
    warps: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    begin: int
    end: int | None

    @property
    def start(self) -> int:
        """The first byte."""
        return self.parts[0][0]

    @property
    def bytes(self) -> int:
        return sum(end - begin for begin, end in self.parts)

    @property
    def written(self) -> str:
        """What it copies, and where to, in words."""
        more = f" and {len(self.parts) - 1} more places" if len(self.parts) > 1 else ""
        return f"{self.bytes} bytes to byte {self.start}{more}"


@dataclass
class Access:
    """What one instruction does in shared memory, of all its warps and times.

    passes   wavefronts: turns in which the banks give or take a word each; least is the fewest for so many bytes
    first    the offsets of the threads of the first request, and the bytes of each
    """

    requests: int = 0
    passes: int = 0
    least: int = 0
    first: tuple[list[int], int] = field(default_factory=lambda: ([], 0))


@dataclass
class Launch:
    """What was seen of a launch.

    kernel    its PTX
    cluster   blocks of a cluster
    blocks    indices of the blocks that ran, by their numbers in events
    accesses  what threads asked of shared memory, by instruction
    touched   4-byte words of shared memory by the instructions that read or write them, or copy to them
    counts    warp instructions of each instruction
    read      bytes of each argument's memory that were read, each counted once
    last      the latest event, which may not be among those that are noted
    fault     the error that ended it, in the last event
    whole     whether all of it was seen
    """

    kernel: Kernel
    cluster: int
    blocks: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    events: list[Event] = field(default_factory=list[Event])
    copies: list[Copy] = field(default_factory=list[Copy])
    accesses: dict[int, Access] = field(default_factory=dict[int, Access])
    touched: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    counts: Counter[int] = field(default_factory=Counter[int])
    read: dict[str, int] = field(default_factory=dict[str, int])
    last: Event | None = None
    fault: str | None = None
    whole: bool = True


class Enough(Exception):
    """An observer has seen as many steps as it wants."""


class Observer:
    """Looks on at launches.

    clusters   how many clusters of a grid run, the first ones; None: all
    steps      after how many steps a launch ends; None: at its end
    events     how many events are noted; None: all
    sm_count   multiprocessors of the emulated GPU; None: the emulator's few
    racecheck  look for races in every launch
    """

    def __init__(
        self,
        clusters: int | None = None,
        steps: int | None = None,
        events: int | None = None,
        sm_count: int | None = None,
        racecheck: bool = False,
    ) -> None:
        self.clusters, self.steps, self.events = clusters, steps, events
        self.sm_count, self.racecheck = sm_count, racecheck
        self.launches: list[Launch] = []
        self.time = 0

    def begin(self, blocks: list[Block]) -> Launch:
        """A launch begins on the machines of one cluster."""
        launch = Launch(blocks[0].kernel, len(blocks))
        self.launches.append(launch)
        blocks[0].device.watch()
        for block in blocks:
            watch = Watch(self, launch, block)
            block.steps = [watch.wrapped(number, step) for number, step in enumerate(block.steps)]
            block.shared.watch = watch
        return launch


class Watch:
    """What an observer notes of one block of a cluster."""

    def __init__(self, observer: Observer, launch: Launch, block: Block) -> None:
        self._observer, self._launch, self._block = observer, launch, block
        self._instruction, self._warps = 0, tuple[int, ...]()
        self._flying: dict[int, list[int]] = {}  # by byte: the number of the copy and how many rows of it are to land
        self._index: tuple[int, int, int] | None = None

    def wrapped(self, number: int, step: Step) -> Step:
        """A step that is noted before it is done."""

        def observed(mask: Mask) -> Outcome | None:
            self._note(number, mask)
            return step(mask)

        return observed

    def _note(self, number: int, mask: Mask) -> None:
        observer, launch, block = self._observer, self._launch, self._block
        if observer.steps is not None and observer.time >= observer.steps:
            launch.whole = False
            raise Enough
        x, y, z = block.index[:, 0].tolist()
        if (x, y, z) != self._index:
            self._index = x, y, z
            launch.blocks.append(self._index)
            self._number = len(launch.blocks) - 1
        live = ~block.exited if mask is None else mask
        self._warps = _warps_of(live.tobytes())
        self._instruction = number
        launch.last = Event(observer.time, self._number, number, self._warps)
        if observer.events is None or observer.time < observer.events:
            launch.events.append(launch.last)
        else:
            launch.whole = False
        observer.time += 1

    def access(self, lanes: Array, offset: Array, size: int) -> None:
        """Threads touch `size` bytes each, at these offsets of shared memory."""
        access = self._launch.accesses.setdefault(self._instruction, Access())
        ends = [*(np.flatnonzero(np.diff(lanes // WARP)) + 1).tolist(), len(lanes)]
        if not access.requests:
            access.first = offset[: ends[0]].tolist(), size
        for begin, end in zip([0, *ends], ends):
            passes, least = wavefronts(offset[begin:end], size)
            access.passes += passes
            access.least += least
        access.requests += len(ends)
        self.touch(offset, size)

    def touch(self, offset: Array, size: int) -> None:
        """An instruction reads or writes `size` bytes from each of these offsets of shared memory on."""
        words = offset[:, None] // BANK_BYTES + np.arange(max(1, size // BANK_BYTES))
        self._launch.touched.setdefault(self._instruction, set()).update(words.ravel().tolist())

    def begin_copy(self, row: Array, size: int) -> None:
        """A copy to rows of `size` bytes is issued."""
        self.touch(row * size, size)
        if not self._launch.whole:
            return
        copies, offsets = self._launch.copies, np.unique(row * size)
        if not len(offsets):
            return
        flying = [len(copies), len(offsets)]  # one for all of them
        self._flying |= dict.fromkeys(offsets.tolist(), flying)
        last = np.append(np.diff(offsets) != size, True)
        ends, begins = offsets[last] + size, offsets[np.roll(last, 1)]
        parts = tuple(zip(begins.tolist(), ends.tolist()))
        copies.append(Copy(self._number, self._instruction, self._warps, parts, self._observer.time - 1, None))

    def land_copy(self, row: Array, size: int) -> None:
        """These rows are there."""
        for offset in (row * size).tolist():
            flying = self._flying.pop(offset, None)
            if flying is None:
                continue
            flying[1] -= 1
            if not flying[1]:
                copies = self._launch.copies
                copies[flying[0]] = copies[flying[0]]._replace(end=self._observer.time)


@lru_cache(maxsize=1024)
def _warps_of(threads: bytes) -> tuple[int, ...]:
    """The warps that have some of these threads, given as a mask."""
    return tuple(np.flatnonzero(np.frombuffer(threads, np.bool_).reshape(-1, WARP).any(axis=1)).tolist())


def wavefronts(offset: Array, size: int) -> tuple[int, int]:
    """How many turns a warp's access of `size` bytes a thread takes, and how many it would take without conflicts.

    A turn serves as many threads as have 128 bytes together; it is repeated for every word that a bank has to give
    beyond its first. Threads that touch the same word share it.
    """
    begin = offset.min() // _LINE * _LINE  # from line to line the banks are the same
    return _wavefronts((offset - begin).tobytes(), size)


@lru_cache(maxsize=4096)
def _wavefronts(offsets: bytes, size: int) -> tuple[int, int]:
    offset = np.frombuffer(offsets, np.int64)
    together = max(1, _LINE // max(size, BANK_BYTES))
    passes = least = 0
    for first in range(0, len(offset), together):
        words = np.unique(offset[first : first + together, None] // BANK_BYTES + np.arange(max(1, size // BANK_BYTES)))
        passes += int(np.bincount(words % BANKS).max())
        least += -(-len(words) // BANKS)
    return passes, least


_OBSERVER: ContextVar[Observer | None] = ContextVar("observer", default=None)


def current() -> Observer | None:
    """The observer of this thread, if there is one."""
    return _OBSERVER.get()


@contextmanager
def observing(observer: Observer) -> Generator[Observer]:
    """Within it, launches in the emulator are observed."""
    token = _OBSERVER.set(observer)
    try:
        yield observer
    finally:
        _OBSERVER.reset(token)
