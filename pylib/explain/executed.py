"""One cluster of a kernel in the emulator: how often each instruction ran, what it did in shared memory, and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.epilogue import RESIDUAL
from lowbit.dialect.errors import EmulatorError
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.signature import WORKSPACE
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.top_k import IDS, ROUTER_WEIGHTS
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.kernels.base import IN_EIGHT_BITS, KernelRequest, KernelSchedule
from lowbit.passes.kernels.registry import family_named
from lowbit.passes.launch import Launch
from lowbit.passes.origins import Lines
from lowbit.pylib.emulator import Emulator, observer
from lowbit.pylib.emulator.observer import Observer, observing
from lowbit.pylib.experts.routing import route
from lowbit.pylib.runtime.activation import quantize_in_torch
from lowbit.pylib.runtime.activation_maps import maps_of_x
from lowbit.pylib.runtime.interface import memory_of
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune.timing import random_tensor

_OF_X: tuple[str, ...] = ("x", "x_scales", "x_sums")
STEPS = 30_000
"""Steps of the emulator that are looked at, which take about a second."""
_MOST_BYTES = 1 << 28  # of x and y: a matrix of 16384 rows and 4096 columns each


def run_one_cluster(request: KernelRequest, launch: Launch, ptx: str, m: int) -> observer.Launch:
    """What the first cluster of a launch for m rows does, with random x; of very many, for `rows_emulated`."""
    given, sm_count = arguments(request, launch, rows_emulated(request, m)), request.target.multiprocessors
    seen = first_cluster(lambda: Emulator(ptx).run(launch, given), sm_count)
    if seen is None:
        raise ValueError(f"kernel {launch.name} has no blocks for {m} rows")
    return seen


def rows_emulated(request: KernelRequest, m: int) -> int:
    """Returns with how many rows a launch for m is emulated: the first cluster reads few of those that do not fit."""
    spec = request.spec
    columns = spec.k * (spec.top_k.count if spec.top_k else 1) + spec.outputs
    return min(m, max(1, _MOST_BYTES // (ELEMENTS[spec.act].bytes * columns)))


def first_cluster(run: Callable[[], object], sm_count: int | None = None) -> observer.Launch | None:
    """Returns what the first cluster of the launch in `run` does; None where it has no blocks."""
    with observing(Observer(clusters=1, steps=STEPS, sm_count=sm_count)) as seen:
        try:
            run()
        except EmulatorError:  # which is noted in the launch
            if not seen.launches:
                raise
    return seen.launches[0] if seen.launches else None


def arguments(request: KernelRequest, launch: Launch, m: int) -> dict[str, Any]:
    """Arguments of a kernel for m rows, by name; of experts m is the number of slots, or of rows of y. x is random, and
    so are outliers; other numbers of the weight are 0: no kernel does one thing or another by them, and there are up to
    gigabytes."""
    spec = request.spec
    tensors = {slot.name: _tensor(spec, slot) for slot in spec.tensors}
    tensors |= _given(request, m) | _written(request, m)
    named: dict[str, Any] = {p.name: memory_of(tensors[p.name]) for p in launch.arguments if p.name in tensors}
    if launch.boxes:
        named |= maps_of_x(memory_of(tensors["x"]), spec, m, launch.boxes)
    return named | {WORKSPACE: np.zeros(launch.workspace_bytes, np.uint8), "m": m}


def _tensor(spec: MatmulSpec, slot: TensorSlot) -> Tensor:
    """A tensor of the packed weight."""
    if slot.role in ("outliers", "permutation"):
        return random_tensor(spec, slot, "cpu")
    return torch.from_numpy(np.zeros(slot.nbytes, np.uint8))  # by NumPy: its memory takes no room before it is read


def _given(request: KernelRequest, m: int) -> dict[str, Tensor]:
    """What kernels read besides a packed weight. Each slot of experts has the next expert."""
    spec, operation = request.spec, family_named(request.family).operation
    if operation == "prepack":
        return {"codes": torch.randint(spec.dtype.codes, (spec.n, spec.k), dtype=torch.uint8)}
    count = spec.top_k.count if spec.top_k else 1
    x = torch.randn(m * count, spec.k, generator=torch.Generator().manual_seed(0)).to(TORCH[spec.act])
    in_bytes = spec.compute if operation in IN_EIGHT_BITS else None
    found: dict[str, Tensor] = dict(zip(_OF_X, quantize_in_torch(x, in_bytes) if in_bytes else (x,)))
    found[RESIDUAL] = torch.zeros(m, spec.outputs, dtype=TORCH[spec.out_dtype])
    ids = torch.arange(m * count).view(m, count) % spec.experts
    if spec.top_k:
        weights = torch.ones(m, count, dtype=TORCH[spec.top_k.weights or "f32"])
        return found | {IDS: ids.int() if spec.top_k.ids == "i32" else ids, ROUTER_WEIGHTS: weights}
    if spec.experts > 1:
        routing = route(ids, spec.experts, tokens_of(request.schedule, m))
        found |= {"rows": routing.rows, "tiles": routing.tiles}
    return found


def _written(request: KernelRequest, m: int) -> dict[str, Tensor]:
    """Memory for what kernels write."""
    spec, act = request.spec, TORCH[request.spec.act]
    match family_named(request.family).operation:
        case "prepack":
            return {"packed": torch.zeros(spec.packing.codes_shape, dtype=torch.int32)}
        case "dequantize":
            return {"y": torch.zeros(spec.n, spec.k, dtype=act)}
        case "permute":
            return {"y": torch.zeros(m, spec.k, dtype=act)}
        case "quantize":
            sums = torch.zeros(m, spec.k // SUM_COLUMNS)
            return {"values": torch.zeros(m, spec.k, dtype=torch.uint8), "scales": torch.zeros(m), "sums": sums}
        case _:
            return {"y": torch.zeros(m, spec.outputs, dtype=TORCH[spec.out_dtype])}


def tokens_of(schedule: KernelSchedule, m: int) -> int:
    """Returns the most tokens of a block, or of a launch, by the schedule; m where it does not say."""
    return getattr(schedule, "tokens", m)


def weights_of_cluster(request: KernelRequest, seen: observer.Launch) -> int:
    """Numbers of the packed weight, with those that pad it, whose codes the cluster read; 0 where it reads none."""
    if family_named(request.family).operation == "prepack":  # whose codes are a byte each
        return 0
    return 8 * seen.read.get("codes", 0) // request.spec.packing.bits


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
