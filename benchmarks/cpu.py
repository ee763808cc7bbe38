"""This machine's CPU: u4 against torch's own matmuls, as ratios of one run: `python -m benchmarks cpu`.

Every contestant is called in turn, again and again, each time on the next of several copies of its weight that no
cache holds together, and its least time counts: on a machine that others use, too, anything but the least measures
them. With one thread the time is the processor's, which leaves out when others had it.
"""

from __future__ import annotations

import copy
import itertools
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import lowbit
from benchmarks.environment import describe, environment
from benchmarks.tables import markdown
from lowbit.pylib.matmul import Matmul

TOKENS = (1, 4, 16, 64, 512)
GROUP = 128
COPIES = 1 << 28  # bytes of the copies of a weight together
BEGIN, END = "<!-- cpu: begin -->", "<!-- cpu: end -->"
_HEADER = ("m", "u4, f16", "u4, bf16", "torch f32", "torch bf16", "aten int4pack", "aten int8pack")

Call = Callable[[Tensor], object]


def cpu_table(n: int, k: int, seconds: float, on_step: Callable[[str], None] = lambda step: None) -> str:
    """The table, as markdown: `seconds` of measuring for each number of tokens, five rounds at least."""
    contestants = list(_contestants(n, k))
    rows: list[tuple[str, ...]] = []
    for m in TOKENS:
        on_step(f"timing {n} x {k}, m = {m}")
        f16, bf16, dense, dense_bf16, int4, int8 = _least_times(contestants, m, k, seconds)
        times = [f"{1e6 * t:.0f}" for t in (f16, bf16)]
        ratios = [f"{dense / f16:.2f}", *(f"{t / bf16:.2f}" for t in (dense_bf16, int4, int8))]
        rows.append((str(m), *times, *ratios))
    threads = torch.get_num_threads()
    where = f"{processor()}, {threads} thread{'s' * (threads != 1)}; {describe(environment())}"
    return f"{n} x {k}, groups of {GROUP}. {where}\n\n{markdown(_HEADER, rows)}"


def _least_times(contestants: list[tuple[torch.dtype, Call]], m: int, k: int, seconds: float) -> list[float]:
    """Seconds a call takes, for each contestant."""
    xs = {dtype: torch.randn(m, k).to(dtype) for dtype, _ in contestants}
    least = [math.inf] * len(contestants)
    end = time.perf_counter() + seconds
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    rounds = 0
    while rounds < 5 or time.perf_counter() < end:
        rounds += 1
        for i, (dtype, call) in enumerate(contestants):
            start = clock()
            call(xs[dtype])
            least[i] = min(least[i], clock() - start)
    return least


def _contestants(n: int, k: int) -> Iterator[tuple[torch.dtype, Call]]:
    """Yields the type of x and the call of each contestant, in the order of the table's columns."""
    codes, scales = torch.randint(16, (n, k), dtype=torch.uint8), torch.rand(n, k // GROUP)
    for act in ("f16", "bf16"):
        mm = lowbit.compile(lowbit.MatmulSpec(n=n, k=k, weight="u4", group_size=GROUP, act=act), "cpu")
        yield {"f16": torch.float16, "bf16": torch.bfloat16}[act], _lowbit(mm, codes, scales)
    dense = torch.randn(n, k)
    for dtype in (torch.float32, torch.bfloat16):
        yield dtype, _each_copy(lambda x, w: torch.nn.functional.linear(x, w), dense.to(dtype))
    both = torch.stack([scales, torch.zeros_like(scales)], -1).transpose(0, 1).contiguous().bfloat16()
    int4 = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    yield torch.bfloat16, _each_copy(
        lambda x, w: torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, GROUP, both), int4
    )
    row_scales = torch.rand(n).bfloat16()
    int8 = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    yield torch.bfloat16, _each_copy(lambda x, w: torch.ops.aten._weight_int8pack_mm(x, w, row_scales), int8)


def _lowbit(mm: Matmul, codes: Tensor, scales: Tensor) -> Call:
    w = mm.pack(codes, scales)
    copies = itertools.cycle([copy.deepcopy(w) for _ in range(_copies(w.codes))])
    return lambda x: mm(x, next(copies))


def _each_copy(call: Callable[[Tensor, Tensor], object], weight: Tensor) -> Call:
    copies = itertools.cycle([weight.clone() for _ in range(_copies(weight))])
    return lambda x: call(x, next(copies))


def _copies(weight: Tensor) -> int:
    return -(-COPIES // weight.nbytes)


def processor() -> str:
    """Returns the processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
