"""The time of a call on this machine's GPU, for the roofline: measured as `lowbit run` measures it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from lowbit.dialect.errors import TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import TopK
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.scheduling.expert_rule import tile_for
from lowbit.passes.target import Target
from lowbit.pylib.runtime.devices import this_machine
from lowbit.pylib.runtime.expert_matmul import ExpertMatmul, expert_matmul
from lowbit.pylib.runtime.matmul_runtimes import MatmulRuntimes
from lowbit.pylib.runtime.top_k_experts import launches_of
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune.routings import cold_routings
from lowbit.pylib.tune.timing import cold_time, copies, random_weight
from lowbit.pylib.weights.packed import PackedWeight

DEVICE = "cuda"


@dataclass(frozen=True)
class Measured:
    """Microseconds of a call, None where none was timed; and a sentence that says how, or why not."""

    microseconds: float | None
    about: str


UNTIMED = Measured(None, "")


def measure(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None, m: int) -> Measured:
    """The time of a call with m rows on random data, where the target is this machine's; of experts with m slots, or
    with m rows of y where kernels read ids."""
    try:
        here = this_machine()
        if here != target.name:
            return Measured(None, f"No time was measured: this machine runs {here}.")
        seconds = _seconds(spec, target, schedule, m)
    except (TargetError, torch.OutOfMemoryError) as error:
        return Measured(None, f"No time was measured: {error}")
    name = torch.cuda.get_device_name()
    return Measured(1e6 * seconds, f"On {name} a call takes {1e6 * seconds:.2f} µs, all of its launches.")


def _seconds(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None, m: int) -> float:
    """Seconds of a call, with weights that no cache holds."""
    weight = random_weight(spec, DEVICE)
    if spec.top_k:
        return cold_time(_by_ids(launches_of(spec, target).run, spec.top_k, weight, m))
    x = torch.randn(m, spec.k, device=DEVICE).to(TORCH[spec.act])
    if spec.experts > 1:
        return cold_time(_by_table(expert_matmul(spec, target), x, weight))
    residual = [torch.zeros(m, spec.n, dtype=TORCH[spec.out_dtype], device=DEVICE) for _ in spec.call_inputs]
    run = MatmulRuntimes(spec, target, schedule).ordinary.matmul
    return cold_time([partial(run, x, (*each.tensors, *residual)) for each in copies(weight)])


def _by_table(mm: ExpertMatmul, x: Tensor, weight: PackedWeight) -> list[Callable[[], Tensor]]:
    """Calls in which each row of x goes to a random expert."""
    experts = weight.spec.experts
    tile = tile_for(mm.tiles, len(x), experts)
    routings = (each.routing for each in cold_routings(weight, len(x), 1, tile))
    return [partial(mm, x, r.rows, r.tiles, w.tensors, tile) for w, r in zip(cycle(copies(weight)), routings)]


def _by_ids(run: Callable[..., Tensor], top_k: TopK, weight: PackedWeight, m: int) -> list[Callable[[], Tensor]]:
    """Calls of `Launches.run` in which tokens, that have m rows of y together, go to random experts."""
    tokens, rows = (m, m * top_k.count) if top_k.weights else (m // top_k.count, m // top_k.count)
    x = torch.randn(rows, weight.spec.k, device=DEVICE).to(TORCH[weight.spec.act])
    weights = [torch.ones(tokens, top_k.count, dtype=TORCH[top_k.weights], device=DEVICE)] if top_k.weights else []
    drawn = (each.ids.to(DEVICE) for each in cold_routings(weight, tokens, top_k.count, tile=1))
    ids = (each.int() if top_k.ids == "i32" else each for each in drawn)
    return [partial(run, x, m, w.tensors, (each, *weights)) for w, each in zip(cycle(copies(weight)), ids)]
