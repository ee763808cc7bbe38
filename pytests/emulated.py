"""Compiled kernels in the emulator, with what the runtime does not offer: the race check and any order of blocks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.registry import family_of, request
from lowbit.passes.kernels.streaming.legality import check_schedule, shared_bytes
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.emulator.launch import SM_COUNT
from lowbit.pylib.reference import agrees, dequantize, matmul, random_inputs, random_problem, tolerance
from lowbit.pylib.runtime.activation_maps import maps_of_x
from lowbit.pylib.runtime.tensor_map import TensorMap
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import PackedWeight, pack

HOPPER = parse_target("sm_90a")
Problem = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # x, codes, scales, zeros, bias


def exhaustive_problem(spec: MatmulSpec, m: int, seed: int = 0) -> Problem:
    """A random problem in which every finite code occurs, and each NaN and inf code once, in a row of its own
    (the last rows): in one row they would hide each other."""
    x, codes, scales, zeros, bias = random_problem(spec, m, seed)
    values = spec.dtype.values()
    finite, special = np.flatnonzero(np.isfinite(values)), np.flatnonzero(~np.isfinite(values))
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.resize(finite, spec.n * spec.k)).reshape(spec.n, spec.k)
    for row, code in enumerate(special):
        drawn[spec.n - 1 - row, rng.integers(spec.k)] = code
    assert len(np.unique(drawn)) == spec.dtype.codes
    if spec.dtype.kind == "int":
        drawn = values[drawn]
    return x, torch.from_numpy(drawn.astype(np.int16)).to(codes.dtype), scales, zeros, bias


Inputs = tuple[Tensor, Mapping[str, Tensor]]  # x, and the tensors of the weight by name


def named(problem: Problem | Inputs) -> Inputs:
    """A problem with its tensors by name."""
    if len(problem) == 2:
        return problem
    x, *weight = problem
    names = ("codes", "scales", "zeros", "bias")
    return x, {name: tensor for name, tensor in zip(names, weight) if tensor is not None}


def exhaustive_inputs(spec: MatmulSpec, m: int, seed: int = 0) -> Inputs:
    """`exhaustive_problem` for a weight of any tensors."""
    x, tensors = random_inputs(spec, m, seed)
    return x, tensors | {"codes": exhaustive_problem(spec, m, seed)[1]}


def run_matmul(
    kernel: CompiledKernel, spec: MatmulSpec, problem: Problem | Inputs, *, launches: int = 1, racecheck: bool = False
) -> Tensor:
    """y [m, n] of a matmul kernel; NaN where it wrote nothing. Blocks run in random order. The workspace passes from
    launch to launch, as on a GPU."""
    x, weight = named(problem)
    w = pack(spec, **weight)
    workspace = torch.zeros(kernel.launch.workspace_bytes, dtype=torch.uint8)
    for seed in range(launches):
        y = torch.full((len(x), spec.n), torch.nan, dtype=TORCH[spec.out_dtype])
        given = dict(y=y, workspace=workspace, m=len(x), **x_arguments(kernel, spec, x))
        run_launch(kernel, w, racecheck, seed, **given)
    return y


def x_arguments(kernel: CompiledKernel, spec: MatmulSpec, x: Tensor) -> Mapping[str, Tensor | TensorMap]:
    """x as the kernel takes it."""
    return maps_of_x(_memory(x), spec, len(x), kernel.launch.boxes) or {"x": x}


def run_dequantize(
    kernel: CompiledKernel, spec: MatmulSpec, problem: Problem | Inputs, *, racecheck: bool = False
) -> Tensor:
    """W [n, k] of a dequantize kernel; NaN where it wrote nothing."""
    y = torch.full((spec.n, spec.k), torch.nan, dtype=TORCH[spec.act])
    run_launch(kernel, pack(spec, **named(problem)[1]), racecheck, 0, y=y)
    return y


def run_launch(
    kernel: CompiledKernel,
    w: PackedWeight,
    racecheck: bool,
    seed: int,
    **arguments: Tensor | TensorMap | int,
) -> None:
    """Runs one launch on a weight. seed: of the order in which blocks run."""
    launch = kernel.launch
    memory = {name: _memory(value) for name, value in {**w, **arguments}.items()}
    blocks = list(np.ndindex(*launch.blocks(memory, SM_COUNT)))
    random.Random(seed).shuffle(blocks)
    _emulator(kernel.ptx).run(launch, memory, racecheck=racecheck, blocks=blocks)


@lru_cache(maxsize=1)
def _emulator(ptx: str) -> Emulator:
    """The emulator of the latest kernel, which is often launched several times."""
    return Emulator(ptx)


def _memory(value: Tensor | TensorMap | int) -> Any:
    return value.view(-1).view(torch.uint8).numpy() if isinstance(value, Tensor) else value


def matmul_is_right(y: Tensor, spec: MatmulSpec, problem: Problem | Inputs, **rounding: bool) -> bool:
    """Whether y agrees with the definition. rounding: `KernelPlan.rounding` of the kernel."""
    x, weight = named(problem)
    bound = tolerance(spec, x, **weight, **rounding)
    return bool(agrees(y, matmul(spec, x, **weight), bound).all())


def dequantize_is_right(w: Tensor, spec: MatmulSpec, problem: Problem | Inputs) -> bool:
    """Whether W agrees with the definition: W is what a matmul with the identity gives, inf where the type ends."""
    identity = torch.eye(spec.k, dtype=TORCH[spec.act])
    weight = {name: tensor for name, tensor in named(problem)[1].items() if name != "bias"}
    expected = dequantize(spec, **weight)
    in_type = torch.from_numpy(expected).to(TORCH[spec.act]).double().numpy()
    expected = np.where(np.isinf(in_type), in_type, expected)
    bound = tolerance(spec, identity, **weight, dequantized=True)
    return bool(agrees(w.T, expected.T, bound).all())


def is_right(
    spec: MatmulSpec, schedule: KernelSchedule, m: int, target: Target = HOPPER, *, racecheck: bool = True
) -> bool:
    """Whether the kernel with a schedule multiplies m random tokens right."""
    inputs = random_inputs(spec, m, seed=m)
    y = run_matmul(compile_kernel(request(spec, target, schedule)), spec, inputs, racecheck=racecheck)
    return matmul_is_right(y, spec, inputs, **family_of(schedule).rounding(spec, schedule))


def decodes_right(spec: MatmulSpec, schedule: Schedule, inputs: Inputs) -> bool:
    """Whether the decode kernel with a schedule multiplies right on Hopper, without races, and with no more shared
    memory than expected."""
    check_schedule(spec, schedule, HOPPER)
    kernel = compile_kernel(request(spec, HOPPER, schedule))
    assert kernel.launch.shared_bytes <= shared_bytes(spec, schedule)
    y = run_matmul(kernel, spec, inputs, racecheck=True)
    return matmul_is_right(y, spec, inputs, **KernelPlan(spec, schedule).rounding)
