"""Launches in the emulator as a trace, which https://ui.perfetto.dev and chrome://tracing show.

A block is a process, a warp a thread. A microsecond of the trace is a step: one instruction of the threads that take it
together, since the emulator has no clock. A warp that waits has its instruction until its next one. Copies to shared
memory are spans of their own, from issue to the step in which they landed; what the emulator found wrong is marked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from lowbit.pylib.build.named_files import writing
from lowbit.pylib.emulator.observer import Event, Launch

MOST = 200_000
"""Events that are noted: Perfetto shows as many at once, and a file has 40 MB."""
WAITS = ("bar", "barrier", "mbarrier", "wgmma.wait_group", "cp.async.wait_group", "cp.async.wait_all", "griddepcontrol")
"""How the names of instructions begin at which a warp waits."""


def save_trace(launches: Sequence[Launch], path: Path) -> None:
    """Writes launches as JSON in Chrome's trace format. Raises SpecError where the file can't be written."""
    firsts = accumulate((len(launch.blocks) for launch in launches), initial=0)
    events = [event for first, launch in zip(firsts, launches) for event in trace_events(launch, first)]
    with writing(path):
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def trace_events(launch: Launch, first: int = 0) -> Iterator[dict[str, Any]]:
    """The events of a launch. first: the number of its first block among processes."""
    for number, index in enumerate(launch.blocks):
        name = f"{launch.kernel.name} block {index}"
        yield {"ph": "M", "name": "process_name", "pid": first + number, "args": {"name": name}}
    for (block, warp), events in _by_warp(launch).items():
        yield from _of_warp(launch, events, first + block, warp)
    for number, copy in enumerate(launch.copies):
        instruction = launch.kernel.instructions[copy.instruction]
        name = f"{instruction.opcode} {copy.written}"
        where = {"pid": first + copy.block, "tid": copy.warps[0]}
        about = {"cat": "copies", "id": f"{first}:{number}", "name": name, **where}
        yield about | {"ph": "b", "ts": copy.begin, "args": {"PTX": instruction.text}}
        if copy.end is not None:
            yield about | {"ph": "e", "ts": copy.end}
    if launch.fault and (last := launch.last):
        where = {"pid": first + last.block, "tid": last.warps[0]}
        yield {"ph": "i", "s": "g", "name": "fault", "ts": last.time, "args": {"error": launch.fault}} | where


def _by_warp(launch: Launch) -> dict[tuple[int, int], list[Event]]:
    """The events of each warp of each block."""
    found: dict[tuple[int, int], list[Event]] = {}
    for event in launch.events:
        for warp in event.warps:
            found.setdefault((event.block, warp), []).append(event)
    return found


def _of_warp(launch: Launch, events: list[Event], process: int, warp: int) -> Iterator[dict[str, Any]]:
    """The instructions of a warp, each once: one that waits is taken again and again."""
    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": warp, "args": {"name": f"warp {warp}"}}
    began = None
    for event, following in zip(events, [*events[1:], None]):
        instruction = launch.kernel.instructions[event.instruction]
        waits = f"{instruction.name}.".startswith(tuple(f"{name}." for name in WAITS))
        began = event.time if began is None else began
        if waits and following and following.instruction == event.instruction:
            continue
        end = following.time if waits and following else event.time + 1
        about = {"line": instruction.line, "PTX": instruction.text}
        about |= {"program": instruction.program} if instruction.program else {}
        category = "wait" if waits and end - began > 1 else "instruction"
        times = {"ts": began, "dur": end - began, "pid": process, "tid": warp}
        yield {"ph": "X", "name": instruction.name, "cat": category, **times, "args": about}
        began = None
