"""A GGUF model on this machine's CPU, beside llama.cpp: `python -m benchmarks gguf FILE`.

Both read the same file. A prompt of 512 tokens is one call; then tokens follow one by one. Ours is the model of
`lowbit.from_gguf` after `lowbit.fuse_`, whose tokens come from `model.generate` as people call it. The two are measured
in turn, again and again, and of each the least time counts. With one thread the time is the processor's, which leaves
out when others had it.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import lowbit
from benchmarks import record_lines
from benchmarks.cpu import processor
from benchmarks.environment import describe, environment
from benchmarks.llama_peer import PROMPT, ROOM, STEPS
from benchmarks.tables import markdown

BEGIN, END = "<!-- gguf: begin -->", "<!-- gguf: end -->"
_HEADER = ("file", "threads", "by", f"prompt of {PROMPT}, tokens/s", "decode, tokens/s")

Measure = Callable[[], tuple[float, float]]
"""Returns seconds for the prompt, and for a token after it."""
Record = Mapping[str, Any]


def measure_file(path: Path, python: str | None, rounds: int, threads: int) -> list[Record]:
    """Returns the tokens per second of a file.

    python   the interpreter that has llama-cpp-python; None to measure lowbit alone
    """
    torch.set_num_threads(threads)
    contestants = {"lowbit": ours(path, threads)}
    if python is not None:
        contestants[_version(python)] = theirs(path, threads, python)
    least = dict.fromkeys(contestants, (math.inf, math.inf))
    for _ in range(rounds):
        for name, measure in contestants.items():
            (prompt, step), found = least[name], measure()
            least[name] = min(prompt, found[0]), min(step, found[1])
    of_file = {"file": path.name, "threads": threads}
    return [
        {**of_file, "by": name, "prompt": round(PROMPT / prompt, 1), "decode": round(1 / step, 1)}
        for name, (prompt, step) in least.items()
    ]


def write(records: Iterable[Record], out: Path) -> dict[str, Any]:
    """Write results to a file, in place of those of the same models and numbers of threads; returns what it has."""

    def key(record: Record) -> tuple[object, object]:
        return record["file"], record["threads"]

    new = list(records)
    old: list[Record] = json.loads(out.read_text())["records"] if out.exists() else []
    kept = [record for record in old if key(record) not in map(key, new)]
    found = {"environment": environment() | {"processor": processor()}, "records": [*kept, *new]}
    record_lines.write(out, found)
    return found


def text_of(found: Mapping[str, Any]) -> str:
    """Returns results as a line that says where they were measured, and a table."""
    where = found["environment"]
    rows = [
        (r["file"], str(r["threads"]), r["by"], f"{r['prompt']:.0f}", f"{r['decode']:.0f}") for r in found["records"]
    ]
    return f"{where['processor']}; {describe(where)}\n\n{markdown(_HEADER, rows)}"


class _Clock:
    """What `generate` hands tokens to: it notes when they come, the prompt first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.times = clock, list[float]()

    def put(self, _: Any) -> None:
        self.times.append(self._clock())

    def end(self) -> None:
        pass


def ours(path: Path, threads: int) -> Measure:
    """Returns how to measure lowbit."""
    clock = time.process_time if threads == 1 else time.perf_counter
    model = lowbit.from_gguf(path)
    lowbit.fuse_(model)
    tokens = torch.arange(100, 100 + PROMPT)[None]
    asked = {"max_new_tokens": STEPS + 1, "do_sample": False, "eos_token_id": None}

    @torch.inference_mode()
    def measure() -> tuple[float, float]:
        start = clock()
        model(tokens, logits_to_keep=1)
        prompt, seen = clock() - start, _Clock(clock)
        model.generate(tokens[:, : ROOM - STEPS], streamer=seen, **asked)
        _, first, *others = seen.times
        return prompt, (others[-1] - first) / len(others)

    measure()  # compiles
    return measure


def _version(python: str) -> str:
    """Returns the name of llama.cpp's package with its version."""
    program = "import importlib.metadata as m; print('llama-cpp-python', m.version('llama-cpp-python'))"
    return subprocess.run((python, "-c", program), capture_output=True, text=True, check=True).stdout.strip()


def theirs(path: Path, threads: int, python: str) -> Measure:
    """Returns how to measure llama.cpp."""
    program = [python, str(Path(__file__).with_name("llama_peer.py")), str(path), str(threads)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def measure() -> tuple[float, float]:
        assert child.stdin and child.stdout
        child.stdin.write("\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"{python} can't run llama.cpp: {' '.join(program)} says why")
        prompt, step = json.loads(line)
        return prompt, step

    return measure
