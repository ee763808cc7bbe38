"""Problems for kernels of 8 bits whose sums f32 holds, so that results are compared to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from emulated import run_launch, x_arguments
from torch import Tensor

import lowbit
from lowbit.dialect.formats import byte_codes
from lowbit.dialect.formats.byte_codes import COMPUTE
from lowbit.passes.pipeline import CompiledKernel
from lowbit.pylib.reference import matmul
from lowbit.pylib.runtime.activation import VALUES
from lowbit.pylib.weights.packed import pack

HOPPER, ADA, AMPERE = "emulator:sm_90a", "emulator:sm_89", "emulator:sm_80"
FITTING = [(compute, name) for compute in COMPUTE for name in byte_codes.fitting_names(compute)]
Problem = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # x of 8 bits, its scales, codes, scales, zeros


def memory(t: Tensor) -> np.ndarray:
    return t.view(-1).view(torch.uint8).numpy()


def whole_problem(spec: lowbit.MatmulSpec, m: int, seed: int = 0) -> Problem:
    """Every code, and numbers whose sums f32 holds: small whole x, scales that are powers of two."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.integers(-8, 9, (m, spec.k))).to(VALUES[spec.byte_type])
    x_scales = torch.from_numpy(np.exp2(rng.integers(-2, 3, m))).float()
    values = spec.dtype.values()
    finite = np.flatnonzero(np.isfinite(values))
    # Rows of large and of small numbers, and the same scale for all of a row, where a format has four exponent bits.
    wide = spec.dtype.exponent > 3
    kinds = [finite[np.abs(values[finite]) >= 1], finite[np.abs(values[finite]) < 1]] if wide else [finite, finite]
    drawn = [rng.permuted(np.resize(kind, (spec.n // 2, spec.k)), axis=1) for kind in kinds]
    codes = np.concatenate(drawn)
    codes = values[codes] if spec.dtype.kind == "int" else codes
    exponents = rng.integers(-2, 3, (spec.n, 1 if wide else spec.groups))
    scales = torch.from_numpy(np.exp2(exponents).repeat(spec.groups // exponents.shape[1], 1)).half()
    zeros = None
    if spec.zeros == "int":
        zeros = torch.from_numpy(rng.integers(int(values.min()), int(values.max()) + 1, (spec.n, spec.groups)))
    return x, x_scales, torch.from_numpy(codes.astype(np.int16)), scales, zeros


def exact(spec: lowbit.MatmulSpec, problem: Problem) -> Tensor:
    x, x_scales, *weight = problem
    product = matmul(replace(spec, compute=None), x.double() * x_scales[:, None].double(), *weight)
    return torch.from_numpy(product).float()


def run_quantized(kernel: CompiledKernel, spec: lowbit.MatmulSpec, problem: Problem) -> Tensor:
    """y [m, n] of one launch in the emulator, whose blocks run in random order under the race check."""
    x, x_scales, *weight = problem
    q = lowbit.quantize_activation(x, spec.byte_type, scales=x_scales)
    y = torch.full((len(x), spec.n), torch.nan)
    given = {"x_scales": q.scales, "x_sums": q.sums, "y": y, **x_arguments(kernel, spec, q.values)}
    given["workspace"] = torch.zeros(kernel.launch.workspace_bytes, dtype=torch.uint8)
    run_launch(kernel, pack(spec, *weight), True, 0, **given, m=len(x))
    return y
