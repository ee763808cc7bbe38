"""Compiles the versions, checks them, and times them beside cuBLAS and the kernel of `lowbit.compile`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import lowbit
from benchmarks.environment import describe, environment
from examples.kernel.problem import Problem
from lowbit.passes.pipeline import CompiledKernel, lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.runtime.kernel import Kernel
from lowbit.pylib.tune.timing import copies, copies_needed, graph_time

VERSIONS = {
    "v0": "one warp per block",
    "v1": "scale late",
    "v2": "eight warps share k",
    "v3": "copy pipeline",
    "v4": "overlap with the kernel before",
}
ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/results/kernel-steps.json", ROOT / "docs/kernel.md"


@dataclass(frozen=True)
class Row:
    """Microseconds per call of one version: the median, and the fastest and slowest replay of its graph."""

    name: str
    what: str
    median: float
    best: float
    worst: float


def compiled(version: str, problem: Problem, target: str) -> CompiledKernel:
    program = import_module(f"examples.kernel.{version}").program
    return lower_program(lambda: program(problem.n, problem.k), parse_target(target))


def check(version: str, problem: Problem, target: str) -> float:
    """Returns the error of a version as a part of what rounding explains. Raises SystemExit if it is more than that."""
    kernel = compiled(version, problem, target)
    device = "cuda" if kernel.target.kind == "cuda" else "cpu"
    y = torch.full((problem.m, problem.n), torch.nan, dtype=torch.float16, device=device)
    weight = problem.weight.to(device)
    load(kernel)(x=problem.x.to(device), codes=weight.codes, scales=weight.scales, y=y, m=problem.m)
    worst = problem.worst(y)
    if not worst <= 1:
        raise SystemExit(f"{version} is wrong: its worst element is {worst:.1f} times what rounding explains")
    return worst


def load(kernel: CompiledKernel) -> Kernel:
    """The kernel as a function of its arguments by name; one that waits for its predecessor may overlap with it."""
    return lowbit.load(kernel, overlap="griddepcontrol.wait" in kernel.ptx)


def measure(problem: Problem, target: str) -> dict[str, Any]:
    """Times all versions on this GPU, after checking them: a JSON object."""
    rows: list[Row] = []

    def add(name: str, what: str, calls: list[Callable[[], object]]) -> None:
        rows.append(Row(name, what, **asdict(graph_time(calls))))

    x = problem.x.cuda()
    y = torch.empty(problem.m, problem.n, dtype=torch.float16, device="cuda")
    weights = copies(problem.weight.to("cuda"))
    for version, what in VERSIONS.items():
        check(version, problem, target)
        kernel = partial(load(compiled(version, problem, target)), x=x, y=y, m=problem.m)
        add(version, what, [partial(kernel, codes=w.codes, scales=w.scales) for w in weights])
    mm = lowbit.compile(problem.spec, target)
    add("lowbit", "what `lowbit.compile` makes", [partial(mm, x, w) for w in weights])
    dense = torch.randn(problem.n, problem.k, dtype=torch.float16, device="cuda")
    denses = [dense.clone() for _ in range(copies_needed(dense.nbytes))]
    add("cuBLAS", "torch, weight in f16", [partial(torch.nn.functional.linear, x, w) for w in denses])
    where = {"n": problem.n, "k": problem.k, "m": problem.m}
    return {**where, "environment": environment(), "rows": [asdict(row) for row in rows]}


def table(results: dict[str, Any]) -> str:
    """The results as markdown."""
    rows = [Row(**row) for row in results["rows"]]
    slowest = rows[0].median
    lines = ["| version | | µs | of v0 |", "|---|---|---:|---:|"]
    lines += [f"| {row.name} | {row.what} | {row.median:.1f} | {row.median / slowest:.2f} |" for row in rows]
    shape = f"{results['n']} x {results['k']}, i4, groups of 128, m = {results['m']}"
    return "\n".join([*lines, "", f"{shape}; {describe(results['environment'])}."])


def section() -> str:
    """Returns the text between the marks of docs/kernel.md: the published results, or that there are none."""
    if not RESULTS.exists():
        return "Not measured yet: `python -m examples.kernel --publish` on a GPU fills in the table."
    return table(json.loads(RESULTS.read_text()))


def publish() -> None:
    """Writes docs/kernel.md anew from the published results."""
    from benchmarks.publish import write_between_marks

    write_between_marks(PAGE, section())
