"""The GPU process of a tuning session: it keeps weights, times kernels and checks their results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.persistent.schedule import takes_rows_in_order
from lowbit.passes.target import Target
from lowbit.pylib.experts.by_kernel import gather_by_kernel
from lowbit.pylib.runtime.activation import quantize_in_torch
from lowbit.pylib.runtime.driver import current_stream
from lowbit.pylib.runtime.gpu import load_matmul
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune import timing, trial
from lowbit.pylib.tune.problem import Problem
from lowbit.pylib.tune.routings import cold_routings
from lowbit.pylib.weights.packed import PackedWeight

PERIOD = 127  # rows until a weight repeats itself: the right answer is computed in float64
LEAST_ROWS = 256  # of x: the token tiles up to here share what is made for a spec
KEPT = 3  # specs whose weights stay on the GPU: the second pass over one meets the first pass over the next
FEW = 5  # replays up to which a timing is a coarse one
HOT_TOKENS = 16  # from so many on a GPU soon meets its power cap

Call = Callable[[], object]
Errors = Callable[[Tensor], tuple[float, float]]


@dataclass(frozen=True)
class Weights:
    """Data of one spec: a sample with its answer, x as kernels read it, copies of the weight that no cache holds."""

    data: trial.Sample
    x: tuple[Tensor, ...]
    copies: list[PackedWeight]


def time_of(calls: Sequence[Call], tokens: int, replays: int) -> float:
    """Microseconds per call, in a CUDA graph: after a rest; from `HOT_TOKENS` tokens on, half way between that and what
    a GPU does that never rests. A few replays are coarser: whatever the GPU is at."""
    if replays <= FEW:
        return timing.graph_time(calls, replays, least_us=1000.0, rest_seconds=0.0).median
    rested = timing.graph_time(calls, replays).median
    return rested if tokens < HOT_TOKENS else (rested + timing.sustained_time(calls).median) / 2


class Stand:
    """A test stand for kernels on this machine's GPU."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._device = torch.cuda.current_device()
        self._weights: OrderedDict[MatmulSpec, Weights] = OrderedDict()
        torch.zeros(1, device="cuda")  # makes the context

    def time(self, problem: Problem, schedule: KernelSchedule, replays: int) -> float:
        """Microseconds per call (`time_of`)."""
        calls, _, _ = self._kernel(problem, schedule)
        return time_of(calls, problem.token_tile, replays)

    def check(self, problem: Problem, schedule: KernelSchedule) -> bool:
        """Tells whether all outputs are right, both of a launch that has the GPU to itself and of one among others."""
        calls, y, errors = self._kernel(problem, schedule)
        for number in (1, 8):
            y.fill_(float("nan"))
            for i in range(1, number + 1):
                calls[(i - number) % len(calls)]()  # the first call is the last
            if not errors(y)[1] <= 1:
                return False
        return True

    def _of(self, problem: Problem) -> Weights:
        """The weights of a spec, made where they are not there, or not with so many rows of x."""
        spec, rows = problem.spec, max(problem.tokens, LEAST_ROWS)
        if spec not in self._weights or len(self._weights[spec].data.x) < rows:
            while len(self._weights) >= KEPT:
                self._weights.popitem(last=False)
            torch.cuda.empty_cache()
            rounding = dict.fromkeys(() if spec.compute else ("dequantized", "rounded_zeros", "rounded_outliers"), True)
            rounding |= {"folded": True} if spec.folds and spec.experts > 1 else {}
            data = trial.sample(spec, rows, "cuda", PERIOD, **rounding)
            x = quantize_in_torch(data.x, spec.compute) if spec.compute else (data.x,)
            self._weights[spec] = Weights(data, x, timing.copies(data.weight))
            torch.cuda.synchronize()  # kernels read weights ahead of their turn in the stream
        self._weights.move_to_end(spec)
        return self._weights[spec]

    def _kernel(self, problem: Problem, schedule: KernelSchedule) -> tuple[list[Call], Tensor, Errors]:
        """Launches that read so many weights that no cache holds them, the tensor that they write, and what tells the
        errors that it has after the first of them."""
        spec, m = problem.spec, problem.token_tile
        artifact = problem.kernel(schedule, self._target)
        function = load_matmul(artifact, spec, self._target, self._device)
        weights = self._of(problem)
        y = torch.empty((m, spec.outputs), dtype=TORCH[spec.out_dtype], device="cuda")

        def call(w: PackedWeight, others: Sequence[Tensor] = (), x: Sequence[Tensor] = weights.x) -> None:
            operands = map(Tensor.data_ptr, (*w.tensors, *others))
            function(current_stream(self._device), True, *map(Tensor.data_ptr, x), y.data_ptr(), m, *operands)

        if spec.experts == 1:
            return [partial(call, w) for w in weights.copies], y, weights.data.errors
        tile = cast(Any, schedule).tokens
        routed = cold_routings(weights.data.weight, problem.tokens, problem.top_k, tile)
        operands = [(each.routing.rows, each.routing.tiles) for each in routed]
        of_calls = [weights.x] * len(routed)
        if takes_rows_in_order(schedule):
            first, *others = weights.x
            of_calls = [(gather_by_kernel(first, rows, self._target.name), *others) for rows, _ in operands]
        torch.cuda.synchronize()
        tokens, experts = routed[0].routing.rows, routed[0].experts.to(y.device)
        errors = partial(weights.data.errors_of_slots, tokens=tokens, experts=experts)
        return [partial(call, *each) for each in zip(cycle(weights.copies), operands, of_calls)], y, errors
