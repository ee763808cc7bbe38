"""One measurement, and a run of many: right first, then fast.

A layer's output is compared with x W^T of the numbers that its own weight stands for. Then it is timed twice: in a
CUDA graph that walks over so many copies of the weight that no cache holds them (`pylib.timing`), and eagerly, call
after call, where the host may be the slower side. Every result is written before the next is begun, so a run that was
killed is continued by the same command.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from benchmarks.cases import Case, Plan
from benchmarks.environment import clocks
from benchmarks.peers import PEERS, Call, Layer, Peer
from benchmarks.results import Record, Results
from benchmarks.shapes import Shape
from dialect.errors import SpecError
from pylib import timing
from pylib.packed import TORCH

ROWS_AT_ONCE = 4096  # of a weight that is multiplied in float64
EAGER_SECONDS = 0.1
PEAK = Case(Shape("peak", 8192, 8192), "u4")  # with m = 8192: what the tensor cores can do, as cuBLAS has it

Log = Callable[[str], None]


def run(plan: Plan, results: Results, log: Log = lambda line: None) -> None:
    """Measure what `results` does not have yet. Raises SpecError for an unknown peer; a peer's failure is a result."""
    peers = [_peer(name) for name in dict.fromkeys(("torch", *plan.peers))]
    _measure_peak(plan, results, log)
    for case in plan.cases():
        _measure_floor(case, results, log)
        for peer in peers:
            wanted = [m for m in plan.m if not results.has(_key(peer.name, case, m))]
            if wanted:
                _measure_peer(peer, case, wanted, plan.eager, results, log)
                gc.collect()
                torch.cuda.empty_cache()


def _peer(name: str) -> Peer:
    if name not in PEERS:
        raise SpecError(f"peer {name!r} must be one of {', '.join(PEERS)}")
    return PEERS[name]


def _key(peer: str, case: Case, m: int) -> Record:
    """What tells measurements apart. cuBLAS's matmul is the same for all formats, so it has none."""
    same = {"peer": peer, "n": case.n, "k": case.k, "m": m, "act": case.act}
    weight = {"weight": case.weight, "group_size": case.group_size, "zeros": case.zeros}
    return same | (dict.fromkeys(weight) if peer == "torch" else weight)


def _measure_peer(
    peer: Peer, case: Case, wanted: Sequence[int], eager: bool, results: Results, log: Log
) -> None:
    """All numbers of tokens with one layer."""
    missing = peer.missing()
    declined = {m: missing or peer.declines(case, m) for m in wanted}
    for m, reason in declined.items():
        if reason:
            log(f"{peer.name}, {case}, m = {m}: {reason}")
            results.add(_key(peer.name, case, m) | {"shape": case.shape.name, "skipped": reason})
    wanted = [m for m in wanted if not declined[m]]
    if not wanted:
        return
    try:
        start = time.perf_counter()
        bench = Bench(peer.layer(case), case)
        torch.cuda.synchronize()
        about = {"shape": case.shape.name, "prepare_s": time.perf_counter() - start}
        measure: Callable[[int], Record] = partial(bench.measure, eager=eager)
    except Exception as error:
        about, measure = {"shape": case.shape.name}, partial(_failed, error)
    for m in wanted:
        try:
            found = measure(m)
        except Exception as error:
            found = _failed(error, m)
        log(f"{peer.name}, {case}, m = {m}: {_words(found)}")
        results.add(_key(peer.name, case, m) | about | found)
        if "failed" in found:
            torch.cuda.synchronize()  # an error that the device keeps ends the run here: start it again


def _failed(error: Exception, m: int) -> Record:
    lines = str(error).strip().splitlines() or [""]
    return {"failed": f"{type(error).__name__}: {lines[0][:200]}"}


def _words(found: Record) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    return f"{found['us']:.2f} us" if found["right"] else f"wrong: relative error {found['error']}"


@dataclass
class Bench:
    """A layer with copies of its weight, enough to defeat the L2 cache."""

    layer: Layer
    case: Case

    def __post_init__(self) -> None:
        self.weight = self.layer.weight()
        count = max(2, -(-int(timing.DEFEAT_L2_BYTES) // self.layer.bytes))
        self.calls = [self.layer.call, *(self.layer.clone() for _ in range(count - 1))]

    def measure(self, m: int, eager: bool = True) -> Record:
        """Check, then time, for m tokens; a wrong result has no times."""
        torch.manual_seed(m)
        x = torch.randn(m, self.case.k, device="cuda").to(TORCH[self.case.act])
        x = self.layer.encode(x)
        start = time.perf_counter()
        y = self.layer.call(x)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        errors = [relative_error(y, x, self.weight), relative_error(self.calls[-1](x), x, self.weight)]
        right = all(error < self.layer.deviation for error in errors)  # not so for NaN
        found: Record = {"label": self.layer.label, "bytes": self.layer.bytes, "first_call_s": first}
        found |= {"error": None if any(map(math.isnan, errors)) else max(errors), "right": right}
        if right:
            found |= _times(timing.graph_time([partial(call, x) for call in self.calls]))
            if eager:
                found["eager_us"] = eager_time(self.calls, x)
        return found


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


def _measure_floor(case: Case, results: Results, log: Log) -> None:
    """The least time to read the packed weight. `floor` remembers it by size."""
    key = _key("floor", case, 0)
    if results.has(key):
        return
    from benchmarks.floor import floor  # which loads MLIR

    size = case.spec.bytes
    found = floor(size)
    log(f"read floor, {case}: {found.time.median:.2f} us for {size / 1e6:.2f} MB")
    about = {"shape": case.shape.name, "label": str(found.reader), "bytes": size, "right": True}
    results.add(key | about | _times(found.time))


def _measure_peak(plan: Plan, results: Results, log: Log) -> None:
    """What the tensor cores can do, as cuBLAS has it, and the clocks while they do."""
    key = _key("peak", PEAK, PEAK.k) | {"act": plan.act}
    if results.has(key):
        return
    size = PEAK.n
    a, b = (torch.randn(size, size, device="cuda").to(TORCH[plan.act]) for _ in range(2))
    found = timing.graph_time([partial(torch.nn.functional.linear, a, b)] * 4)
    tflops = 2e-6 * size**3 / found.median
    log(f"cuBLAS {plan.act}, {size} x {size} x {size}: {tflops:.0f} TFLOP/s")
    about = {"shape": PEAK.shape.name, "tflops": tflops, "clocks": clocks(), "right": True}
    results.add(key | about | _times(found))


def _times(found: timing.Timing) -> Record:
    return {"us": found.median, "best_us": found.best, "worst_us": found.worst}
