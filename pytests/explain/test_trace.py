"""Traces of launches in the emulator, for Perfetto and Chrome; and what an observer sees."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lowbit
from lowbit.dialect.layouts.layout import spatial
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.pylib.cli import matmul
from lowbit.pylib.cli.main import app
from lowbit.pylib.emulator.observer import Launch, Observer, observing, wavefronts
from lowbit.pylib.explain.trace import WAITS, save_trace, trace_events
from lowbit.pylib.reference import random_problem

SPEC = MatmulSpec(n=64, k=512, weight="u4", group_size=128)
SIZES = ("-n", "64", "-k", "512", "-w", "u4", "-g", "128")


def watched(m: int, target: str, **options: Any) -> Launch:
    """A matmul in the emulator, watched."""
    x, codes, scales, _, _ = random_problem(SPEC, m)
    mm = lowbit.compile(SPEC, target)
    w = mm.pack(codes, scales)
    with observing(Observer(**options)) as seen:
        mm(x, w)
    (launch,) = seen.launches
    return launch


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["run", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.mark.parametrize(("m", "target"), [(16, "emulator:sm_80"), (200, "emulator:sm_90a")])
def test_a_trace_has_every_instruction_of_every_warp(m: int, target: str, tmp_path: Path) -> None:
    made = run(*SIZES, "-m", str(m), "-t", target, "--trace", str(tmp_path / "trace.json"), "--json")
    assert made.exit_code == 0 and json.loads(made.stdout)["right"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    launch = watched(m, target)
    names = Counter(event["name"] for event in events if event["ph"] == "X")
    wanted: Counter[str] = Counter()
    for number, count in launch.counts.items():
        wanted[launch.kernel.instructions[number].name] += count
    waits = {name for name in wanted if name.startswith(WAITS)}  # which are taken again and again
    assert set(+wanted) == set(names)
    assert all(names[each] <= wanted[each] if each in waits else names[each] == wanted[each] for each in names)
    processes = [event for event in events if event["name"] == "process_name"]
    assert len(processes) == len(launch.blocks)
    assert all(launch.kernel.name in each["args"]["name"] for each in processes)


def test_warps_do_one_thing_at_a_time() -> None:
    events = [e for e in trace_events(watched(200, "emulator:sm_90a")) if e["ph"] == "X"]
    ends: dict[tuple[int, int], int] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        warp = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(warp, 0)
        ends[warp] = event["ts"] + event["dur"]
    waits = [event for event in events if event["cat"] == "wait"]
    assert waits and {event["name"].partition(".")[0] for event in waits} <= {"mbarrier", "barrier", "bar", "wgmma"}


def test_copies_begin_and_end() -> None:
    """All of them: a block may not end while one is in flight. Their bytes are those that the instructions copy."""
    launch = watched(16, "emulator:sm_80")
    spans = [event for event in trace_events(launch) if event["ph"] in "be"]
    by_id: dict[str, dict[str, int]] = {}
    for event in spans:
        by_id.setdefault(event["id"], {})[event["ph"]] = event["ts"]
    assert by_id and all(span["b"] < span["e"] for span in by_id.values())
    first = launch.copies[0]
    assert first.bytes == 16 * 32 * len(first.warps)
    assert launch.kernel.instructions[first.instruction].name.startswith("cp.async")


def without_a_barrier() -> Program:
    p = Program("race", 64, (1, 1, 1), {"x": "pointer", "y": "pointer"})
    with p:
        x, y = (p.global_view(p[name], "f32", (64,)) for name in "xy")
        buffer = p.alloc_shared("f32", (64,))
        p.store(p.load(x, (0,), spatial(64)), buffer, (0,))
        p.store(p.load(buffer, (0,), spatial(32).replicated(2)), y, (0,))
    return p


def test_a_race_is_marked(tmp_path: Path) -> None:
    kernel = lowbit.compile_program(without_a_barrier, "emulator:sm_80")
    with observing(Observer()) as seen, pytest.raises(lowbit.EmulatorError, match="race"):
        kernel(x=torch.ones(64), y=torch.zeros(64))
    save_trace(seen.launches, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (fault,) = (event for event in events if event["name"] == "fault")
    assert "race" in fault["args"]["error"] and fault["ph"] == "i"
    assert fault["ts"] == max(event["ts"] for event in events if event["ph"] == "X")
    programs = {event["args"]["program"] for event in events if event["ph"] == "X" and "program" in event["args"]}
    assert any(Path(__file__).name in place for place in programs)  # the lines of the program


def test_a_run_with_a_fault_leaves_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def racing(*_: object) -> None:
        lowbit.compile_program(without_a_barrier, "emulator:sm_80")(x=torch.ones(64), y=torch.zeros(64))

    monkeypatch.setattr(matmul, "_trial", racing)
    made = run(*SIZES, "-t", "emulator:sm_80", "--trace", str(tmp_path / "trace.json"))
    assert made.exit_code == 1 and "race" in made.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert ["race" in event["args"]["error"] for event in events if event["name"] == "fault"] == [True]


def test_a_fault_behind_the_events_that_are_noted() -> None:
    """It is marked where it was found, not where notes end."""
    kernel = lowbit.compile_program(without_a_barrier, "emulator:sm_80")
    with observing(Observer(events=3)) as seen, pytest.raises(lowbit.EmulatorError, match="race"):
        kernel(x=torch.ones(64), y=torch.zeros(64))
    (launch,) = seen.launches
    (fault,) = (event for event in trace_events(launch) if event["name"] == "fault")
    assert launch.last and fault["ts"] == launch.last.time > launch.events[-1].time == 2


def test_the_page_of_a_program_with_a_race() -> None:
    page = lowbit.explain_program(without_a_barrier, "sm_80", x=torch.ones(64), y=torch.zeros(64))
    assert page.about.startswith("A tile program. The emulator found a fault: ") and "race" in page.about
    assert any(line.note for line in page.panes[-2].lines)


def test_an_observer_asks_for_the_race_check() -> None:
    kernel = lowbit.compile_program(without_a_barrier, "emulator:sm_80", racecheck=False)
    kernel(x=torch.ones(64), y=torch.zeros(64))
    with observing(Observer(racecheck=True)), pytest.raises(lowbit.EmulatorError, match="race"):
        kernel(x=torch.ones(64), y=torch.zeros(64))


def test_only_so_many_events_and_blocks() -> None:
    whole = watched(16, "emulator:sm_80")
    few = watched(16, "emulator:sm_80", events=50)
    assert whole.whole and not few.whole and len(few.events) == 50 and few.counts == whole.counts
    ended = watched(16, "emulator:sm_80", steps=50)
    assert not ended.whole and len(ended.events) == 50 and sum(ended.counts.values()) < sum(whole.counts.values())
    assert len(watched(16, "emulator:sm_80", clusters=1).blocks) == 1


@pytest.mark.parametrize(
    ("offset", "size", "turns"),
    [
        (4 * np.arange(32), 4, (1, 1)),  # a word of each bank
        (8 * np.arange(32), 4, (2, 1)),  # every other bank, twice
        (128 * np.arange(32), 4, (32, 1)),  # one bank
        (0 * np.arange(32), 4, (1, 1)),  # one word for all
        (2 * np.arange(32), 2, (1, 1)),  # two threads a word
        (16 * np.arange(32), 16, (4, 4)),  # 512 bytes in rows
        (128 * np.arange(8), 16, (8, 1)),  # eight rows of a matrix without padding
        (144 * np.arange(8), 16, (1, 1)),  # with padding
    ],
)
def test_turns_of_banks(offset: np.ndarray, size: int, turns: tuple[int, int]) -> None:
    assert wavefronts(offset, size) == turns


@pytest.mark.parametrize(
    ("target", "path", "message"),
    [
        ("cpu", "trace.json", "--trace=trace.json shows what the emulator does, not cpu; use -t emulator:sm_90a, say"),
        ("emulator:sm_80", "gone/trace.json", "gone/trace.json can't be written (No such file or directory)"),
    ],
)
def test_no_trace(target: str, path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*SIZES, "-t", target, "--trace", path)
    assert result.exit_code == 1 and message in " ".join(result.output.split())
