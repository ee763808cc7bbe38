"""One measurement, and a run of many: right first, then fast.

A layer's output is compared with x W^T of the numbers that its own weight stands for. Then it is timed twice: in a
CUDA graph that walks over so many copies of the weight that no cache holds them (`pylib.tune.timing`), and eagerly,
call after call, where the host may be the slower side. Every result is written before the next is begun, so a run that
was killed is continued by the same command.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, Plan
from benchmarks.energy import energy_counter, energy_per_call
from benchmarks.environment import clocks
from benchmarks.peers import PEERS, Layer, Peer
from benchmarks.peers.peer import Call
from benchmarks.prepare import prepare
from benchmarks.results import Record, Results
from benchmarks.shapes import Shape
from lowbit.dialect.fields import choice
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune import timing

ROWS_CHECKED = 1024  # of y
ROWS_AT_ONCE = 4096  # of a weight that is multiplied in float64
EAGER_SECONDS = 0.1
PEAK = Case(Shape("peak", 8192, 8192), "u4")  # with m = 8192: what the tensor cores can do, as cuBLAS has it
DIED = "the run ended while this was measured"

Log = Callable[[str], None]


class OutOfTime(Exception):
    """The time a run was given is over."""


@dataclass
class Run:
    """Where measurements go. deadline: on `time.monotonic`'s clock; nothing is begun after it."""

    results: Results
    log: Log = lambda line: None
    deadline: float = math.inf

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def run(plans: Sequence[Plan], results: Results, log: Log = lambda line: None, seconds: float = math.inf) -> bool:
    """Measure what `results` does not have yet, plan by plan; False if the seconds did not do.

    Raises SpecError for an unknown peer; a peer's failure is a result.
    """
    peers = [[_peer(name) for name in dict.fromkeys(("torch", *plan.peers))] for plan in plans]
    to = Run(results, log, time.monotonic() + seconds)
    try:
        for plan, each in zip(plans, peers):
            _run_plan(plan, each, to)
    except OutOfTime:
        log(f"stopped after {seconds:.0f} s; the same command goes on from here")
        return False
    return True


def _run_plan(plan: Plan, peers: Sequence[Peer], to: Run) -> None:
    todo = {
        (peer, case): [m for m in plan.m if not to.results.has(_key(peer.name, case, m))]
        for case in plan.cases()
        for peer in peers
    }
    jobs = {
        peer: [(c, m) for (p, c), wanted in todo.items() if p is peer for m in wanted if not p.declines(c, m)]
        for peer in peers
    }
    to.check_time()
    prepare(jobs, to.log)
    _measure_peak(plan, to)
    for (peer, case), wanted in todo.items():
        if plan.floor:
            _measure_floor(case, to)
        if wanted:
            _measure_peer(peer, case, wanted, plan, to)
            gc.collect()
            torch.cuda.empty_cache()


def _peer(name: str) -> Peer:
    return PEERS[choice("peer", name, tuple(PEERS))]


def _key(peer: str, case: Case, m: int) -> Record:
    """Returns what tells measurements apart. cuBLAS's matmul is the same for all formats, so its key has none."""
    same = {"peer": peer, "n": case.n, "k": case.k, "m": m, "act": case.act}
    weight = {name: getattr(case, name) for name in ("weight", "group_size", "zeros", "compute")}
    return same | (dict.fromkeys(weight) if peer == "torch" else weight)


def _measure_peer(peer: Peer, case: Case, wanted: Sequence[int], plan: Plan, to: Run) -> None:
    """All numbers of tokens with one layer."""
    missing = peer.missing()
    bench: Bench | Exception | None = None
    about: Record = {"shape": case.shape.name}
    for m in wanted:
        to.check_time()
        key = _key(peer.name, case, m)
        if reason := missing or peer.declines(case, m):
            to.results.add(key | about | {"skipped": reason})
            continue
        to.results.add(key | about | {"failed": DIED})
        if bench is None:
            start = time.perf_counter()
            bench = _bench(peer, case)
            about["prepare_s"] = time.perf_counter() - start
        found = _failed(bench) if isinstance(bench, Exception) else _measure(bench, m, plan)
        to.log(f"{peer.name}, {case}, m = {m}: {_words(found)}")
        to.results.add(key | about | found)
        if "failed" in found:
            torch.cuda.synchronize()  # an error that the device keeps ends the run here: start it again


def _bench(peer: Peer, case: Case) -> Bench | Exception:
    try:
        bench = Bench(peer.layer(case), case)
        torch.cuda.synchronize()
    except Exception as error:
        return error
    return bench


def _measure(bench: Bench, m: int, plan: Plan) -> Record:
    try:
        return bench.measure(m, plan.eager, plan.sustained, m in plan.energy)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Record:
    """Returns a record of what went wrong, and where."""
    lines = str(error).strip().splitlines() or [""]
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({each.filename.rpartition('/')[2]}:{each.lineno})" for each in place)
    return {"failed": f"{type(error).__name__}: {lines[0][:200]}{where}"}


def _words(found: Record) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    if not found["right"]:
        return f"wrong: relative error {found['error']}"
    eager = f", eager {found['eager_us']:.1f}" if "eager_us" in found else ""
    return f"{found['us']:.2f} us{eager}"


@dataclass
class Bench:
    """A layer with copies of its weight, enough to defeat the L2 cache."""

    layer: Layer
    case: Case

    def __post_init__(self) -> None:
        self.weight = self.layer.weight()
        torch.manual_seed(0)
        self.row = torch.randn(self.case.k, device="cuda")
        count = timing.copies_needed(self.layer.bytes)
        self.calls = [self.layer.call, *(self.layer.clone() for _ in range(count - 1))]

    def measure(self, m: int, eager: bool = True, sustained: bool = False, energy: bool = False) -> Record:
        """Check, then time, for m tokens, of which the first and the last are always the same; a wrong result has no
        times."""
        torch.manual_seed(m)
        x = torch.randn(m, self.case.k, device="cuda")
        x[0] = x[-1] = self.row
        x = self.layer.encode(x.to(TORCH[self.case.act]))
        start = time.perf_counter()
        y = self.layer.call(x)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        errors = self._errors(x, y, self.calls[-1](x))
        right = all(error < self.layer.deviation for error in errors)  # not so for NaN
        found: Record = {"label": self.layer.label, "bytes": self.layer.bytes, "first_call_s": first}
        found |= {"error": None if any(map(math.isnan, errors)) else max(errors), "right": right}
        found["row_bits"] = sorted({bits_of(y[0]), bits_of(y[-1])})
        return found | (self._speed(x, m, eager, sustained, energy) if right else {})

    def _errors(self, x: Any, *outputs: Tensor) -> list[float]:
        """How far outputs are off, each by `relative_error`; of many tokens some are looked at, from first to last."""
        numbers = self.layer.numbers(x)
        m = len(numbers)
        at = torch.linspace(0, m - 1, min(m, ROWS_CHECKED), dtype=torch.float64).long()
        return [relative_error(y[at], numbers[at], self.weight) for y in outputs]

    def _speed(self, x: Any, m: int, eager: bool, sustained: bool, energy: bool) -> Record:
        """x and y of many tokens defeat the L2 cache as well as copies of the weight do."""
        moved = self.layer.bytes + 2 * m * (self.case.n + self.case.k)
        calls = [partial(call, x) for call in self.calls[: timing.copies_needed(moved)]]
        found = _times(timing.graph_time(calls))
        if sustained:
            found["sustained_us"] = timing.sustained_time(calls).median
        if energy and (read := energy_counter()):
            found["millijoules"] = energy_per_call(calls, read)
        if eager:
            found["eager_us"] = eager_time(self.calls, x)
        return found


def bits_of(row: Tensor) -> str:
    """Returns a hash of a tensor's bits."""
    return hashlib.sha256(row.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def relative_error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """|y - x W^T| / |x W^T| in the Frobenius norm, summed in float64; NaN where y has one."""
    exact = x.float().double()
    expected = torch.cat([exact @ part.double().T for part in weight.split(ROWS_AT_ONCE)], dim=1)
    return ((y.double() - expected).norm() / expected.norm()).item()


def eager_time(calls: Sequence[Call], x: Tensor) -> float:
    """Microseconds per eager call, one after the other, host and GPU side by side: the least of several loops."""
    least, count = float("inf"), 10
    until = time.perf_counter() + EAGER_SECONDS
    while time.perf_counter() < until:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in islice(cycle(calls), count):
            call(x)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        least = min(least, seconds / count)
        count = max(10, min(1000, int(EAGER_SECONDS / 5 / least)))
    return least * 1e6


def _measure_floor(case: Case, to: Run) -> None:
    """The least time to read the packed weight. `floor` remembers it by size."""
    key = _key("floor", case, 0)
    if to.results.has(key):
        return
    to.check_time()
    from benchmarks.floor import floor  # which loads MLIR

    size = case.spec.bytes
    about: Record = {"shape": case.shape.name, "bytes": size, "right": True}
    try:
        found = floor(size)
    except Exception as error:  # the others are to be measured all the same
        about |= _failed(error)
        to.log(f"read floor, {case}: failed: {about['failed']}")
    else:
        about |= {"label": str(found.reader)} | _times(found.time)
        to.log(f"read floor, {case}: {found.time.median:.2f} us for {size / 1e6:.2f} MB")
    to.results.add(key | about)


def _measure_peak(plan: Plan, to: Run) -> None:
    """Measure the TFLOP/s that cuBLAS reaches on the tensor cores, and the clocks meanwhile."""
    key = _key("peak", PEAK, PEAK.k) | {"act": plan.act}
    if to.results.has(key):
        return
    size = PEAK.n
    a, b = (torch.randn(size, size, device="cuda").to(TORCH[plan.act]) for _ in range(2))
    found = timing.graph_time([partial(torch.nn.functional.linear, a, b)] * 4)
    tflops = 2e-6 * size**3 / found.median
    to.log(f"cuBLAS {plan.act}, {size} x {size} x {size}: {tflops:.0f} TFLOP/s")
    about = {"shape": PEAK.shape.name, "tflops": tflops, "clocks": clocks(), "right": True}
    to.results.add(key | about | _times(found))


def _times(found: timing.Timing) -> Record:
    return {"us": found.median, "best_us": found.best, "worst_us": found.worst}
