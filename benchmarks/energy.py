"""Energy of calls, as NVML counts it for the whole board with its memory, of a GPU that never rests."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from lowbit.pylib.tune import timing

SECONDS = 0.4  # that are measured, about: an H200's counter moves every 100 ms
MOST_SECONDS = 3.0  # until it has to have moved
AHEAD, STEP_MS = 2, 5.0  # pieces of work that the GPU has before it, and their length: to read the counter takes 3 ms

Counter = Callable[[], int]  # millijoules since the driver was loaded


@cache
def energy_counter() -> Counter | None:
    """Returns the counter of torch's GPU; None without a GPU, and without nvidia-ml-py to read it."""
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        read = partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        read()
    except Exception:  # of NVML, which has a class for each
        return None
    return read


def energy_per_call(calls: Sequence[Callable[[], object]], read: Counter, seconds: float = SECONDS) -> float:
    """Millijoules of one of the calls, of which a graph is made that is replayed without a rest: what the counter has
    moved between two of its ticks, by the calls between them."""
    graph = timing.captured(calls)
    under_way: deque[torch.cuda.Event] = deque()
    rounds = rounds_of(graph.replay)

    def step() -> None:
        for _ in range(rounds):
            graph.replay()
        under_way.append(event := torch.cuda.Event())
        event.record()
        if len(under_way) > AHEAD:
            under_way.popleft().synchronize()

    _, first = count_to_tick(step, read, timing.SUSTAINED_SECONDS)
    steps, last = count_to_tick(step, read, seconds)
    torch.cuda.synchronize()
    return (last - first) / (steps * rounds * len(calls))


def rounds_of(replay: Callable[[], None]) -> int:
    """How many replays take `STEP_MS`, at least one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return math.ceil(STEP_MS / start.elapsed_time(end))


def count_to_tick(
    step: Callable[[], None], read: Counter, seconds: float, now: Callable[[], float] = time.perf_counter
) -> tuple[int, int]:
    """Takes steps for so long, and on until the counter moves. Returns their number, and where the counter stands.

    Raises RuntimeError for a counter that stands still.
    """
    start, steps, before = now(), 0, read()
    while True:
        step()
        steps += 1
        value, before = before, read()
        if before != value and now() - start >= seconds:
            return steps, before
        if now() - start > seconds + MOST_SECONDS:
            raise RuntimeError(f"the GPU's energy counter stood still for {MOST_SECONDS:.0f} s")
