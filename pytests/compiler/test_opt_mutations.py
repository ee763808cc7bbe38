"""Damaged programs behind the parser of `lowbit opt`: passes refuse them with an error or lower them, nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("opt_mutations.py")


def failures(first: int, last: int) -> dict[int, str]:
    """Returns what went wrong, by the number of the program. A process that dies is followed by another."""
    found: dict[int, str] = {}
    while first < last:
        command = [sys.executable, str(WORKER), str(first), str(last)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=WORKER.parents[2])
        lines = run.stdout.splitlines()
        assert lines, run.stderr
        numbers, outcomes = list(map(int, lines[::2])), lines[1::2]
        if len(outcomes) < len(numbers):
            outcomes.append(f"the process ended with exit code {run.returncode}: {run.stderr[-500:]}")
        found |= {n: what for n, what in zip(numbers, outcomes) if what not in ("ok", "refused")}
        first = numbers[-1] + 1
    return found


def test_damaged_programs() -> None:
    assert failures(0, 150) == {}


@pytest.mark.slow
def test_many_damaged_programs() -> None:
    assert failures(150, 2000) == {}
