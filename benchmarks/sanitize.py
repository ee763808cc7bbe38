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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.checked_kernels import WRONG
from benchmarks.tables import markdown
from lowbit.dialect.errors import TargetError

OUTCOMES = {WRONG: "wrong", 124: "too long", 137: "too long"}
"""Of processes with these exit statuses; the last two are of those that took longer than they may."""


def sanitize(names: Sequence[str], tools: Sequence[str], jobs: int, seconds: float) -> str:
    """Returns a table of kernels by tools: the number of errors, or what went wrong.

    Raises TargetError where there is no compute-sanitizer.
    """
    if shutil.which("compute-sanitizer") is None:
        raise TargetError("compute-sanitizer is not here; it comes with the CUDA toolkit, whose bin must be in PATH")
    with ThreadPoolExecutor(jobs) as pool:
        alone = list(pool.map(lambda name: _outcome(name, None, seconds), names))  # compiles, too
        work = [(name, tool) for name in names for tool in tools]
        found = dict(zip(work, pool.map(lambda each: _outcome(each[0], each[1], seconds), work)))
    rows = [[name, first, *(found[name, tool] for tool in tools)] for name, first in zip(names, alone)]
    return markdown(["kernel", "numbers", *tools], rows)


def _outcome(name: str, tool: str | None, seconds: float) -> str:
    """Returns what a process says of a kernel: under a tool, how many errors it found."""
    limit = ["timeout", "--kill-after=2", str(seconds)]  # which ends the sanitizer's child, too
    sanitizer = ["compute-sanitizer", "--tool", tool, "--print-limit", "3"] if tool else []
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [*limit, *sanitizer, sys.executable, "-m", "benchmarks.checked_kernels", name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = done.stdout + done.stderr
    if done.returncode in OUTCOMES:
        return OUTCOMES[done.returncode]
    summary = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((.*)\)", said)
    if done.returncode or (tool and summary is None):
        print(f"{name}, {tool}:\n{said[-2000:]}", file=sys.stderr, flush=True)
    if tool is None or summary is None:
        return f"failed ({done.returncode})" if done.returncode or tool else "right"
    return summary[1] or summary[2]
