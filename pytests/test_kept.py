"""What is kept of the emulator's work: taken where nothing has changed, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowbit.dialect.errors import EmulatorError
from lowbit.dialect.signature import Param, parse_grid
from lowbit.passes.launch import Launch
from lowbit.pylib.tensor_map import TensorMap
from pytests.kept import FOLDER, emulate

LAUNCH = Launch("kernel", parse_grid((1, 1, 1)), 32, 0, (Param("x", "pointer"), Param("y", "pointer")))
X = np.arange(32, dtype=np.uint8)
GIVEN: dict[str, Any] = {"ptx": "text", "launch": LAUNCH, "x": X, "m": 1, "options": {"racecheck": False}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))


def runs(given: dict[str, Any]) -> bool:
    """Whether a launch that writes 7 to y runs; y is 7 in either case."""
    y, ran = np.zeros(4, np.uint8), list[bool]()

    def run() -> None:
        ran.append(True)
        y[:] = 7

    memory = {"x": given["x"], "y": y, "m": given["m"]}
    emulate(given["ptx"], given["launch"], memory, given["options"], run)
    assert (y == 7).all()
    return bool(ran)


def test_a_launch_runs_once() -> None:
    assert [runs(GIVEN), runs(GIVEN)] == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"ptx": "another text"},
        {"launch": Launch("kernel", parse_grid((2, 1, 1)), 32, 0, LAUNCH.params)},
        {"x": X[::-1].copy()},
        {"x": X.view(np.int8)},
        {"x": TensorMap(X, "u8", (1, 32), (1, 16))},
        {"m": 2},
        {"options": {"racecheck": True}},
    ],
    ids=["ptx", "launch", "memory", "type", "map", "number", "options"],
)
def test_whatever_changes_runs_again(change: dict[str, Any]) -> None:
    assert runs(GIVEN)
    assert runs(GIVEN | change)


def test_the_box_of_a_map_is_in_the_key() -> None:
    boxes = [GIVEN | {"x": TensorMap(X, "u8", (1, 32), (1, box))} for box in (16, 32)]
    assert [runs(boxes[0]), runs(boxes[1]), runs(boxes[0])] == [True, True, False]


def test_the_emulator_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs(GIVEN)
    monkeypatch.setattr("pytests.kept.emulator_fingerprint", lambda: "another emulator")
    assert runs(GIVEN)


def test_failures_are_not_kept() -> None:
    def fail() -> None:
        raise EmulatorError("a race")

    for _ in range(2):
        with pytest.raises(EmulatorError, match="a race"):
            emulate("text", LAUNCH, {"x": X}, {}, fail)


def test_nothing_is_kept_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "")
    assert [runs(GIVEN), runs(GIVEN)] == [True, True]
