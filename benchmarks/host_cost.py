"""What a call costs the host: microseconds of wall time per eager `mm(x, w)` at m = 1.

    python benchmarks/host_cost.py

The weight is tiny, so that the GPU is never what one waits for. Each figure is the least of several runs of a
tight loop that ends with a synchronization.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import lowbit
from lowbit.pylib.reference import random_problem

CALLS = 2000
REPEATS = 20


def microseconds(call: Callable[[], object]) -> float:
    """Per call, the least of REPEATS loops of CALLS."""
    least = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        least = min(least, time.perf_counter() - start)
    return least / CALLS * 1e6


def main() -> None:
    spec = lowbit.MatmulSpec(n=64, k=256, weight="u4", group_size=128, zeros="int")
    mm = lowbit.compile(spec)
    x, *weight = random_problem(spec, 1)
    x, w = x.cuda(), mm.pack(*weight).to("cuda")
    batched = x[None]
    dense = mm.dequantize(w)
    microseconds(lambda: mm(x, w))  # the GPU clocks up
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {spec}")
    for name, call in {
        "mm(x, w), x [1, k]": lambda: mm(x, w),
        "mm(x, w), x [1, 1, k]": lambda: mm(batched, w),
        "torch.ops.lowbit.matmul": lambda: torch.ops.lowbit.matmul.packed(x, list(w.tensors), mm.description),
        "torch.nn.functional.linear, f16": lambda: torch.nn.functional.linear(x, dense),
        "torch.empty": lambda: torch.empty((1, 64), dtype=torch.float16, device="cuda"),
    }.items():
        print(f"{microseconds(call):7.2f} us  {name}")


if __name__ == "__main__":
    main()
