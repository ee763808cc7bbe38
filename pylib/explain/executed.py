"""One cluster of a kernel in the emulator: how often each instruction ran, what it did in shared memory, and copies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from lowbit.dialect.errors import EmulatorError
from lowbit.dialect.signature import WORKSPACE
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelRequest
from lowbit.passes.kernels.experts.choice import tile_for
from lowbit.passes.kernels.registry import family_named
from lowbit.passes.launch import Launch
from lowbit.passes.origins import Lines
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator import Emulator, observer
from lowbit.pylib.emulator.observer import Observer, observing
from lowbit.pylib.experts.routing import route
from lowbit.pylib.runtime.activation_maps import maps_of_x
from lowbit.pylib.runtime.expert_matmul import expert_matmul
from lowbit.pylib.runtime.interface import memory_of
from lowbit.pylib.runtime.matmul_runtimes import MatmulRuntimes
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune.timing import random_tensor, random_weight

STEPS = 30_000
"""Steps of the emulator that are looked at, which take about a second."""
_DIRECT = ("matmul", "dequantize")
"""Operations whose arguments are x, the weight, y and a residual."""


def run_one_cluster(request: KernelRequest, launch: Launch, ptx: str, m: int) -> observer.Launch | None:
    """What the first cluster of a launch for m rows does, on random data; None where there is no such launch."""
    spec, operation = request.spec, family_named(request.family).operation
    seen = Observer(clusters=1, steps=STEPS, sm_count=request.target.multiprocessors)
    with observing(seen):
        try:
            if operation in _DIRECT:
                Emulator(ptx).run(launch, arguments(spec, launch, m))
            else:
                _by_runtime(spec, request.target.arch, m)
        except EmulatorError:
            pass  # noted in the launch
    return next((each for each in reversed(seen.launches) if each.kernel.name == launch.name), None)


def arguments(spec: MatmulSpec, launch: Launch, m: int) -> dict[str, Any]:
    """Random arguments of a kernel for m rows, by name."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, spec.k, generator=generator).to(TORCH[spec.act])
    y = torch.zeros(m, spec.outputs, dtype=TORCH[spec.out_dtype])
    w = torch.zeros(spec.n, spec.k, dtype=TORCH[spec.act])
    residual = {name: torch.zeros_like(y) for name in spec.call_inputs}
    weight = {slot.name: random_tensor(spec, slot, "cpu") for slot in spec.tensors}
    output = w if "m" not in [p.name for p in launch.params] else y
    values: dict[str, Any] = {name: memory_of(t) for name, t in {"x": x, "y": output, **residual, **weight}.items()}
    values |= maps_of_x(values["x"], spec, m, launch.boxes)
    return values | {WORKSPACE: np.zeros(launch.workspace_bytes, np.uint8), "m": m}


def _by_runtime(spec: MatmulSpec, arch: str, m: int) -> None:
    """Multiplies as a call does, with launches of other kernels before; of experts each slot by the next one."""
    target, weight = parse_target(f"emulator:{arch}"), random_weight(spec, "cpu")
    x = torch.randn(m, spec.k, generator=torch.Generator().manual_seed(0)).to(TORCH[spec.act])
    if spec.experts == 1:
        residual = [torch.zeros(m, spec.n, dtype=TORCH[spec.out_dtype]) for _ in spec.call_inputs]
        MatmulRuntimes(spec, target, None).ordinary.matmul(x, (*weight.tensors, *residual))
        return
    mm = expert_matmul(spec, target)
    tile = tile_for(mm.tiles, m, spec.experts)
    routing = route(torch.arange(m)[:, None] % spec.experts, spec.experts, tile)
    mm(x, routing.rows, routing.tiles, weight.tensors, tile)


def counts_by_line(seen: observer.Launch) -> dict[int, int]:
    """Warp instructions that ran, by the line of the PTX."""
    return {seen.kernel.instructions[number].line: count for number, count in seen.counts.items()}


def counts_by_origin(seen: observer.Launch, lines: Lines) -> Counter[int]:
    """Warp instructions that ran, by the operation of the program that they came from."""
    found: Counter[int] = Counter()
    for line, count in counts_by_line(seen).items():
        if number := lines[line - 1]:
            found[number] += count
    return found
