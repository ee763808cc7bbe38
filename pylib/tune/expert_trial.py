"""A matmul of several experts on random data, as `pylib.tune.trial` has those of one: what `lowbit run --experts` does.

Each token goes to random experts. Every slot is checked, which is a product of one expert and one token; the sum of a
token's experts is no part of the matmul.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.scheduling.expert_rule import tile_for
from lowbit.pylib.experts.routing import route
from lowbit.pylib.runtime.devices import target_named
from lowbit.pylib.runtime.expert_matmul import ExpertMatmul, expert_matmul
from lowbit.pylib.runtime.gpu import check_device
from lowbit.pylib.tune import timing
from lowbit.pylib.tune.routings import Routed, cold_routings, random_ids
from lowbit.pylib.tune.trial import Sample, Trial, check_memory, cpu_time, rounding_on_cpu, sample
from lowbit.pylib.weights.packed import PackedWeight


def run_expert_trial(
    spec: MatmulSpec,
    m: int,
    top_k: int,
    target: str | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Trial:
    """Compile, pack random data, multiply the slots of m tokens, check, time; `on_step` hears of each.

    top_k  different experts of each token

    Raises SpecError for a top_k that the spec does not have, for a spec that the target does not multiply, and for data
    beyond this machine's memory.
    """
    if not 1 <= top_k <= spec.experts:
        raise SpecError(f"top_k={top_k} must be in 1..{spec.experts}, the experts that there are (experts=)")
    check_memory(spec, m, target)
    on_step("compiling")
    start = time.perf_counter()
    mm = expert_matmul(spec, parsed := target_named(target))
    tile, kind = tile_for(mm.tiles, m * top_k, spec.experts), spec.for_rows(m * top_k)
    chosen = mm.kernel(tile, m * top_k).schedule if parsed.is_gpu else None
    compile_time = time.perf_counter() - start

    if parsed.kind == "cuda" and not torch.cuda.is_available():
        check_device(parsed, -1)
    on_step("packing random data")
    device = "cuda" if parsed.kind == "cuda" else "cpu"
    data = sample(kind, m, device, **rounding_of_experts(kind, m, chosen))
    ids = random_ids(m, top_k, spec.experts).to(device)
    routing = route(ids, spec.experts, tile)

    on_step("multiplying")
    y = mm(data.x, routing.rows, routing.tiles, data.weight.tensors, tile)

    on_step("checking")
    error, worst = data.errors_of_slots(y, routing.rows, ids.flatten().sort().values)
    hit = len(ids.unique())

    on_step("timing")
    return Trial(
        spec=spec,
        target=parsed,
        m=m,
        slots=m * top_k,
        experts_hit=hit,
        schedule=chosen,
        error=error,
        worst=worst,
        compile_time=compile_time,
        time=None if parsed.kind == "emulator" else _time(mm, data, m, top_k, tile),
        bytes=data.weight.nbytes * hit // spec.experts + data.x.nbytes + y.nbytes,
    )


def rounding_of_experts(spec: MatmulSpec, m: int, schedule: KernelSchedule | None) -> dict[str, bool]:
    """Returns what is rounded besides sums. A CPU multiplies at most m rows by an expert."""
    if schedule is None:
        return rounding_on_cpu(replace(spec, n=spec.n // spec.experts, experts=1), m)
    return family_of(schedule).rounding(spec, schedule)


def _time(mm: ExpertMatmul, data: Sample, m: int, top_k: int, tile: int) -> float:
    """Seconds of a call: on a GPU in a graph, with a cold cache; on a CPU from call to return."""

    def call(weight: PackedWeight, routed: Routed) -> Tensor:
        return mm(data.x, routed.routing.rows, routed.routing.tiles, weight.tensors, tile)

    routings = cold_routings(data.weight, m, top_k, tile)
    if not data.x.is_cuda:
        return cpu_time(partial(call, data.weight, routings[0]))
    calls = [partial(call, *each) for each in zip(cycle(timing.copies(data.weight)), routings)]
    return timing.cold_time(calls)
