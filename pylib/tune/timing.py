"""Time on a GPU, as it is in a running model: kernels back to back, weights that no cache holds.

Calls are captured into a CUDA graph that walks over enough copies of the weight to defeat the L2 cache, and the graph
is replayed; host time is not in it. Microseconds are per call: median and spread of the replays.

A GPU that has been at work is slower than one that has rested. An H200 keeps its full clocks for 40 milliseconds of
work after a pause of 100 and is at the pace that its power cap leaves after 250
(docs/lab-notebook/decoding.md, "Rested and sustained"). `graph_time` begins with a rest, so that it does not
matter what ran before, and is short or rests again; `sustained_time` begins with work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lowbit.dialect.bilevel import integers_of
from lowbit.dialect.formats.byte_codes import LARGEST
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.torch_types import TORCH, stored_type
from lowbit.pylib.weights import outliers
from lowbit.pylib.weights.packed import PackedWeight

DEFEAT_L2_BYTES = 400e6
OUTLIERS = 0.01  # density of random ones
_SCALES = 0.005, 0.015  # random ones are between these
_MOST_SCALE = 2.0**15  # of folded ones: a number of f16
REST_SECONDS, WARM_SECONDS = 0.1, 0.004
RESTED_US = 35_000.0  # of work after a rest and the warm-up, at full clocks
SUSTAINED_SECONDS = 0.3  # of work, before the GPU's pace is steady


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median of the replays, the fastest, and the slowest."""

    median: float
    best: float
    worst: float


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, in order. They have been made once before: the first launch on a weight does not overlap
    with its predecessor."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def graph_time(
    calls: Sequence[Callable[[], object]],
    replays: int = 11,
    least_us: float = 2000.0,
    rest_seconds: float = REST_SECONDS,
    warm_seconds: float = WARM_SECONDS,
) -> Timing:
    """Time per call of `calls`, captured in order into one graph, as often as makes `least_us` of work; after a rest,
    and then some work that is not timed. Long work is given another rest before the last one's effect has gone."""
    graph = captured(calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _rest(graph, rest_seconds, warm_seconds)
    rounds, times, worked = 1, [], 0.0
    while len(times) < replays:
        start.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        total = 1000 * start.elapsed_time(end)
        if total < least_us and not times and rounds < 64:
            rounds *= 2
            continue
        times.append(total / (rounds * len(calls)))
        worked += total
        if rest_seconds and worked + total > RESTED_US and len(times) < replays:
            _rest(graph, rest_seconds, warm_seconds)
            worked = 0.0
    return Timing(statistics.median(times), min(times), max(times))


def cold_time(calls: Sequence[Callable[[], object]]) -> float:
    """Returns the median seconds of a call, of such that read weights which no cache holds. Each is made once before:
    the first one on a weight is not the fast one."""
    for call in calls:
        call()
    return graph_time(calls).median * 1e-6


def _rest(graph: torch.cuda.CUDAGraph, seconds: float, warm_seconds: float) -> None:
    """Let the GPU rest, and work again until its clocks are up."""
    time.sleep(seconds)
    warm_until = time.perf_counter() + warm_seconds
    while time.perf_counter() < warm_until:
        graph.replay()
        torch.cuda.synchronize()


def sustained_time(calls: Sequence[Callable[[], object]]) -> Timing:
    """Returns the time of a call on a GPU that has run such calls for long, so that it is at the pace of its power
    cap."""
    return graph_time(calls, rest_seconds=0.0, warm_seconds=SUSTAINED_SECONDS)


def random_weight(spec: MatmulSpec, device: str = "cuda") -> PackedWeight:
    """A packed weight of random codes and scales around 0.01, made where it is needed: for timing only."""
    return PackedWeight(spec, {slot.name: random_tensor(spec, slot, device) for slot in spec.tensors})


def random_tensor(spec: MatmulSpec, slot: TensorSlot, device: torch.device | str) -> torch.Tensor:
    """One tensor of a packed weight, as `random_weight` makes it."""
    if slot.role == "codes":
        return _random_codes(spec, slot, device)
    if slot.role == "permutation":
        orders = [torch.randperm(spec.k, device=device) for _ in range(spec.experts)]
        return torch.cat(orders).to(torch.int32)
    if slot.role == "outliers":
        generator = torch.Generator(device).manual_seed(0)
        return outliers.to_lines(outliers.draw(spec.n, spec.k, OUTLIERS, generator, device))
    if slot.storage == "u8":
        codes = integers_of(slot.code) if slot.code else spec.dtype
        return torch.randint(0, codes.codes, slot.shape, dtype=torch.uint8, device=device)
    if slot.role == "bias":
        return torch.randn(slot.shape, device=device).to(TORCH[slot.storage])
    least, most = _SCALES
    values = (torch.rand(slot.shape, device=device) * (most - least) + least) * _size_of_scales(spec, slot)
    if slot.storage == "e8m0":
        values = torch.exp2(torch.floor(torch.log2(values)))
    return values.to(TORCH[slot.storage]).view(stored_type(slot.storage))


def _size_of_scales(spec: MatmulSpec, slot: TensorSlot) -> float:
    """Returns what scales are multiplied by. Where they are folded, weights become nearly as large as their type of 8
    bits allows, as `pack` makes them, and scales of rows as much smaller."""
    of_codes = spec.slot("scales").code
    if not spec.folds or slot.name not in ("row_scales", "scale_scales" if of_codes else "scales"):
        return 1.0
    largest = spec.dtype.max * (integers_of(of_codes).codes if of_codes else 1)
    size = min(0.9 * LARGEST[spec.byte_type] / largest, _MOST_SCALE) / _SCALES[1]
    return 1 / size if slot.name == "row_scales" else size


def _random_codes(spec: MatmulSpec, slot: TensorSlot, device: torch.device | str) -> torch.Tensor:
    codes = torch.randint(-(2**31), 2**31 - 1, slot.shape, dtype=torch.int32, device=device)
    if spec.dtype.has_nan:  # both are formats of 8 bits: a byte is a code
        finite = torch.from_numpy(np.isfinite(spec.dtype.values())).to(device)
        data = codes.view(torch.uint8)
        for part in data.split(max(1, len(data) // 16)):
            part.masked_fill_(~finite[part.int()], 0)
    return codes


def copies_needed(size: int, total: float = DEFEAT_L2_BYTES) -> int:
    """Returns how many copies of so many bytes make `total` bytes, at least two, so that no cache holds them."""
    return max(2, -(-int(total) // size))


def copies(weight: PackedWeight, total: float = DEFEAT_L2_BYTES) -> list[PackedWeight]:
    """The weight and as many clones as make `total` bytes, at least two in all."""
    count = copies_needed(weight.nbytes, total)
    clones = [{name: t.clone() for name, t in weight.items()} for _ in range(count - 1)]
    return [weight, *(PackedWeight(weight.spec, tensors) for tensors in clones)]
