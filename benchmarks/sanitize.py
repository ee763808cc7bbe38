"""Kernels under compute-sanitizer: `python -m benchmarks sanitize`, a minute on a machine with 16 cores.

Every kernel of a sample (`benchmarks/checked_kernels.py`) multiplies in a process of its own: first as it is, where its
result is compared with the definition, and then under each tool. Memory comes without torch's cache, so that memcheck
sees where each tensor ends.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from benchmarks.checked_kernels import CHECKS, WRONG
from benchmarks.tables import markdown
from lowbit.dialect.errors import TargetError
from lowbit.dialect.fields import choice

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")  # of compute-sanitizer
CLEAN = ("right", "0", "0 errors, 0 warnings")
OUTCOMES = {WRONG: "wrong", 124: "too long", 137: "too long"}
"""Of processes with these exit statuses; the last two are of those that took longer than they may."""


def sanitize(names: Sequence[str], tools: Sequence[str], jobs: int, seconds: float, log: Callable[[str], None]) -> str:
    """Returns a table of kernels by tools: the number of errors, or what went wrong. `log` hears of each at once.

    Raises SpecError for an unknown kernel or tool, and TargetError where there is no compute-sanitizer.
    """
    for name in names:
        choice("--kernels", name, tuple(CHECKS))
    for tool in tools:
        choice("--tools", tool, TOOLS)
    if shutil.which("compute-sanitizer") is None:
        raise TargetError("compute-sanitizer is not here; it comes with the CUDA toolkit, whose bin must be in PATH")

    def outcome(work: tuple[str, str | None]) -> str:
        name, tool = work
        done = _run(name, tool, seconds)
        found = _outcome(done, tool)
        log(f"{name}, {tool or 'alone'}: {found}")
        if found not in CLEAN:
            log((done.stdout + done.stderr)[:3000])
        return found

    with ThreadPoolExecutor(jobs) as pool:
        alone = pool.map(outcome, [(name, None) for name in names])  # compiles, too
        rows = [[name, first] for name, first in zip(names, alone)]
        found = pool.map(outcome, [(name, tool) for name in names for tool in tools])
        rows = [[*row, *islice(found, len(tools))] for row in rows]
    return markdown(["kernel", "numbers", *tools], rows)


def _run(name: str, tool: str | None, seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a kernel in a process, by itself or under a tool."""
    limit = ["timeout", "--kill-after=2", str(seconds)]  # which ends the sanitizer's child, too
    # Memcheck would report that cuda-python asks the driver for functions that it lacks.
    options = ["--print-limit", "3", *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    sanitizer = ["compute-sanitizer", "--tool", tool, *options] if tool else []
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [*limit, *sanitizer, sys.executable, "-m", "benchmarks.checked_kernels", name]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def _outcome(done: subprocess.CompletedProcess[str], tool: str | None) -> str:
    """Returns what a process has found: under a tool, how many errors."""
    if done.returncode in OUTCOMES:
        return OUTCOMES[done.returncode]
    if tool is None:
        return f"failed ({done.returncode})" if done.returncode else "right"
    said = done.stdout + done.stderr
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((.*)\)", said)
    return (summary[1] or summary[2]) if summary else f"no report ({done.returncode})"
