"""The GPU process of a tuning session: it keeps weights, times kernels and checks their results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.target import Target
from lowbit.pylib.runtime.activation import quantize_in_torch
from lowbit.pylib.runtime.driver import current_stream
from lowbit.pylib.runtime.gpu import load_matmul
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune import timing, trial
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.weights.packed import PackedWeight

PERIOD = 127  # rows until a weight repeats itself: the right answer is computed in float64
LEAST_ROWS = 256  # of x: the token tiles up to here share what is made for a spec
KEPT = 3  # specs whose weights stay on the GPU: the second pass over one meets the first pass over the next
FEW = 5  # replays up to which a timing is a coarse one
HOT_TOKENS = 16  # from so many on a GPU soon meets its power cap


@dataclass(frozen=True)
class Weights:
    """Data of one spec: a sample with its answer, x as kernels read it, copies of the weight that no cache holds."""

    data: trial.Sample
    x: tuple[Tensor, ...]
    copies: list[PackedWeight]


class Stand:
    """A test stand for kernels on this machine's GPU."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._device = torch.cuda.current_device()
        self._weights: OrderedDict[MatmulSpec, Weights] = OrderedDict()
        torch.zeros(1, device="cuda")  # makes the context

    def time(self, problem: Problem, schedule: KernelSchedule, replays: int) -> float:
        """Microseconds per call, in a CUDA graph: after a rest; from `HOT_TOKENS` tokens on, half way between that and
        what a GPU does that never rests. A few replays are coarser: whatever the GPU is at."""
        call, _ = self._kernel(problem, schedule)
        calls = [partial(call, weight) for weight in self._of(problem).copies]
        if replays <= FEW:
            return timing.graph_time(calls, replays, least_us=1000.0, rest_seconds=0.0).median
        rested = timing.graph_time(calls, replays).median
        return rested if problem.token_tile < HOT_TOKENS else (rested + timing.sustained_time(calls).median) / 2

    def check(self, problem: Problem, schedule: KernelSchedule) -> bool:
        """Tells whether all outputs are right, both of a launch that has the GPU to itself and of one among others."""
        call, y = self._kernel(problem, schedule)
        weights = self._of(problem)
        for calls in (1, 8):
            y.fill_(float("nan"))
            for i in range(calls):
                call(weights.copies[-i % len(weights.copies)])
            if not weights.data.errors(y)[1] <= 1:
                return False
        return True

    def _of(self, problem: Problem) -> Weights:
        """The weights of a spec, made where they are not there, or not with so many rows of x."""
        spec, rows = problem.spec, max(problem.token_tile, LEAST_ROWS)
        if spec not in self._weights or len(self._weights[spec].data.x) < rows:
            while len(self._weights) >= KEPT:
                self._weights.popitem(last=False)
            torch.cuda.empty_cache()
            rounding = dict.fromkeys(() if spec.compute else ("dequantized", "rounded_zeros", "rounded_outliers"), True)
            data = trial.sample(spec, rows, "cuda", PERIOD, **rounding)
            x = quantize_in_torch(data.x, spec.compute) if spec.compute else (data.x,)
            self._weights[spec] = Weights(data, x, timing.copies(data.weight))
            torch.cuda.synchronize()  # kernels read weights ahead of their turn in the stream
        self._weights.move_to_end(spec)
        return self._weights[spec]

    def _kernel(self, problem: Problem, schedule: KernelSchedule) -> tuple[Callable[[PackedWeight], None], Tensor]:
        """A launch on a weight, and the tensor that it writes."""
        spec, token_tile = problem.spec, problem.token_tile
        artifact = problem.kernel(schedule, self._target)
        function = load_matmul(artifact, spec, self._target, self._device)
        x = self._of(problem).x
        y = torch.empty((token_tile, spec.n), dtype=TORCH[spec.out_dtype], device="cuda")

        def call(w: PackedWeight) -> None:
            weight = map(Tensor.data_ptr, w.tensors)
            function(current_stream(self._device), True, *map(Tensor.data_ptr, x), y.data_ptr(), token_tile, *weight)

        return call, y
