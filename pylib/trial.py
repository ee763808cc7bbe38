"""A matmul on random data: is it right, and how fast is it? What `lowbit run` and the demo report.

Every output is checked. The weight repeats itself every 1009 rows, so that float64 has little to do; 1009 is
a prime, so no tile of a kernel repeats.

On a GPU the time is what `pylib.timing` says; on a CPU it is from call to return.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from dialect.spec import MatmulSpec
from passes.schedule import Schedule
from pylib import reference, timing
from pylib.artifact import token_tile
from pylib.matmul import Matmul, compile
from pylib.packed import PackedWeight
from pylib.runtimes import check_device

PERIOD = 1009  # rows
CPU_REPEATS = 15
CPU_SECONDS = 2.0  # at most, about


@dataclass(frozen=True)
class Trial:
    """What came out of one. Times in seconds."""

    matmul: Matmul
    m: int
    schedule: Schedule | None  # of the kernel for m tokens, where it has one
    error: float  # relative, in the Frobenius norm
    worst: float  # largest error as a share of what is allowed there; inf if NaN or inf was not met
    compile_time: float
    time: float | None  # of one call; None in the emulator, whose time says nothing
    bytes: int  # read and written by one call

    @property
    def right(self) -> bool:
        return self.worst <= 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.matmul.spec.n * self.matmul.spec.k


def run_trial(
    spec: MatmulSpec,
    m: int,
    target: str | None = None,
    schedule: Schedule | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Trial:
    """Compile, pack random data, multiply, check, time; `on_step` hears of each. Raises as `compile` does."""
    on_step("compiling")
    start = time.perf_counter()
    mm = compile(spec, target, schedule)
    chosen = mm.kernel(m).schedule if mm.target.is_gpu else None  # compiles the kernel for m tokens
    compile_time = time.perf_counter() - start

    if mm.target.kind == "cuda" and not torch.cuda.is_available():
        check_device(mm.target, -1)
    on_step("packing random data")
    part = replace(spec, n=min(spec.n, PERIOD))
    x, codes, scales, zeros, bias = reference.random_problem(part, m)
    rows = torch.arange(spec.n) % part.n
    device = "cuda" if mm.target.kind == "cuda" else "cpu"
    whole = (None if t is None else _take(t, rows) for t in (zeros, bias))
    w = mm.pack(_take(codes, rows), _take(scales, rows), *whole).to(device)
    moved = x.to(device)

    on_step("multiplying")
    y = mm(moved, w).cpu()

    on_step("checking")
    expected = reference.matmul(part, x, codes, scales, zeros, bias)[:, rows]
    dequantized = mm.target.is_gpu and token_tile(m) is None
    allowed = reference.tolerance(part, x, codes, scales, zeros, bias, dequantized=dequantized)[:, rows]
    error = y.double().numpy() - expected

    on_step("timing")
    return Trial(
        matmul=mm,
        m=m,
        schedule=chosen,
        error=float(np.linalg.norm(error) / np.linalg.norm(expected)),
        worst=float(np.nan_to_num(np.abs(error) / allowed, nan=np.inf).max()),
        compile_time=compile_time,
        time=None if mm.target.kind == "emulator" else time_call(mm, moved, w),
        bytes=w.nbytes + x.nbytes + y.nbytes,
    )


def _take(t: Tensor, rows: Tensor) -> Tensor:
    """t[rows], for types that torch cannot index (float8), too."""
    return t.view(torch.uint8)[rows].view(t.dtype) if t.element_size() == 1 else t[rows]


def time_call(mm: Matmul, x: Tensor, w: PackedWeight) -> float:
    """Median seconds of mm(x, w): on a GPU in a graph, with a cold cache; on a CPU from call to return."""
    return _cuda_time(mm, x, w) if x.is_cuda else _cpu_time(mm, x, w)


def _cuda_time(mm: Matmul, x: Tensor, w: PackedWeight) -> float:
    weights = timing.copies(w)
    for each in weights:  # the first call on a weight is not the fast one
        mm(x, each)
    return timing.graph_time([partial(mm, x, each) for each in weights]).median * 1e-6


def _cpu_time(mm: Matmul, x: Tensor, w: PackedWeight) -> float:
    times: list[float] = []
    while len(times) < CPU_REPEATS and sum(times) < CPU_SECONDS:
        start = time.perf_counter()
        mm(x, w)
        times.append(time.perf_counter() - start)
    return median(times)
