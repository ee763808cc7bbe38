"""Buffers of shared memory by name, and the rounds of copies that their stages hold.

A buffer's place is found as the lowering finds it: by the same class, from the tile program in the same order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowbit.passes.lowering.context import ALIGN, SharedMemory
from lowbit.pylib.emulator.observer import Copy, Launch
from lowbit.pylib.explain.figures import Bar, Bars, Figure

_SWIZZLE_ALIGN = 1024  # bytes: eight rows of 128
_TYPE = re.compile(r"^(!shared_\S+) = !lowbit\.shared<(\[.*?\]), (.+), (\[.*?\]), (\d+)>$", re.MULTILINE)
_ELEMENT = re.compile(r"(?:vector<(\d+)x)?[a-z]+(\d+)")
_LINE = re.compile(
    r"%(?P<name>\S+) = lowbit\.alloc_\w+\b.*: (?P<type>!shared_\S+)$"
    r"|lowbit\.free_shared %(?P<freed>\S+)"
    r"|%(?P<flag>\S+) = lowbit\.(?:last_arrival|others_arrived)\b"
)


@dataclass(frozen=True)
class Buffer:
    """A buffer of a block: its name in the tile program, its first byte, bytes; and its stages, each of which begins
    `pitch` bytes behind the one before."""

    name: str
    start: int
    bytes: int
    stages: int
    pitch: int

    def stage_of(self, byte: int) -> int:
        """The stage that has a byte of shared memory."""
        return (byte - self.start) // self.pitch


def buffers(tile: str) -> list[Buffer]:
    """The buffers of a tile program, in the order in which it allocates them."""
    sizes = {name: _size(*rest) for name, *rest in _TYPE.findall(tile)}
    staged = set(re.findall(r"lowbit\.stage %([^,\s]+)", tile))
    memory, found = SharedMemory(), list[Buffer]()
    for line in filter(None, map(_LINE.search, tile.splitlines())):
        if freed := line["freed"]:
            memory.free(freed)
        elif flag := line["flag"]:
            memory.allocate(flag, 4)
        else:
            name, (size, first, pitch, align) = line["name"], sizes[line["type"]]
            stages = (first, pitch) if name in staged else (1, size)
            found.append(Buffer(name, memory.allocate(name, size, align), size, *stages))
    return found


def _size(shape: str, element: str, strides: str, swizzle: str) -> tuple[int, int, int, int]:
    """Of a type: bytes, the first size, bytes from one index of it to the next, and the alignment."""
    sizes, steps = json.loads(shape), json.loads(strides)
    count, bits = _ELEMENT.findall(element)[0]
    bits = int(count or 1) * int(bits)
    last = sum((size - 1) * step for size, step in zip(sizes, steps))
    return (last + 1) * bits // 8, sizes[0], steps[0] * bits // 8, ALIGN if swizzle == "0" else _SWIZZLE_ALIGN


def shared_figures(tile: str, seen: Launch | None) -> list[Figure]:
    """The buffers of a tile program, and the rounds of copies in them, if a launch of it was seen."""
    if not (held := buffers(tile)):
        return []
    rounds = pipeline(seen, held) if seen else None
    return [buffer_map(held), *([rounds] if rounds else [])]


def buffer_map(held: Sequence[Buffer]) -> Bars:
    """Where each buffer is, stage by stage."""
    rows: list[tuple[str, tuple[Bar, ...]]] = []
    for hue, each in enumerate(held):
        stages = f", {each.stages} stages" if each.stages > 1 else ""
        bars = tuple(_stage_bar(each, stage, hue) for stage in range(each.stages))
        rows.append((f"{each.name}: {each.bytes:,} bytes{stages}", bars))
    about = (
        "The buffers of a block by their names in the tile program. A buffer may take the place of others that are "
        "freed before. What is asked for beyond them keeps other blocks off the multiprocessor."
    )
    end = max(each.start + each.bytes for each in held)
    return Bars("Buffers in shared memory", about, "bytes", end, tuple(rows))


def _stage_bar(buffer: Buffer, stage: int, hue: int) -> Bar:
    first = buffer.start + stage * buffer.pitch
    end = min(first + buffer.pitch, buffer.start + buffer.bytes)
    of = f", stage {stage}" if buffer.stages > 1 else ""
    return Bar(first, end, f"{buffer.name}{of}: bytes {first} to {end - 1}", hue + 6 * (stage % 2))


@dataclass(frozen=True)
class Fill:
    """A stage of a buffer is filled for the round with this number by copies, from a step to another."""

    buffer: Buffer
    stage: int
    round: int
    copies: tuple[Copy, ...]

    @property
    def begin(self) -> int:
        return min(copy.begin for copy in self.copies)

    def end(self, last: int) -> int:
        """The step in which all of it was waited for; `last` where nothing waited."""
        return max(last if copy.end is None else copy.end for copy in self.copies)


def fills(seen: Launch, held: Sequence[Buffer]) -> Iterator[Fill]:
    """The rounds of copies of the first block, stage by stage: a round ends where copies go to a place again."""
    for buffer in held:
        if buffer.stages < 2:
            continue
        inside = range(buffer.start, buffer.start + buffer.bytes)
        copies = [copy for copy in seen.copies if copy.block == 0 and copy.start in inside]
        for stage in range(buffer.stages):
            of_stage = [copy for copy in copies if buffer.stage_of(copy.start) == stage]
            for number, group in enumerate(_rounds(of_stage)):
                yield Fill(buffer, stage, stage + number * buffer.stages, tuple(group))


def _rounds(copies: Sequence[Copy]) -> list[list[Copy]]:
    found: list[list[Copy]] = []
    for copy in copies:
        if not found or any(copy.start == each.start for each in found[-1]):
            found.append([])
        found[-1].append(copy)
    return found


def pipeline(seen: Launch, held: Sequence[Buffer]) -> Bars | None:
    """The copy pipeline as a timeline of rounds; None where no buffer has stages that copies fill."""
    found = list(fills(seen, held))
    if not found:
        return None
    last = max(event.time for event in seen.events) + 1
    rows: dict[str, list[Bar]] = {}
    for fill in found:
        where = f"{fill.buffer.name}, stage {fill.stage}"
        size = sum(copy.bytes for copy in fill.copies)
        title = f"{where}, round {fill.round}: {size:,} bytes, from step {fill.begin} to {fill.end(last)}"
        bar = Bar(fill.begin, fill.end(last), title, fill.round, str(fill.round))
        rows.setdefault(where, []).append(bar)
    about = (
        "Rounds of copies that are under way, by the stage of the buffer that they fill: from the step in which the "
        "first is issued to that in which they were waited for. Numbers and colours are rounds."
    )
    return Bars(
        "Copy pipeline by rounds", about, "steps", last, tuple((name, tuple(bars)) for name, bars in rows.items())
    )
