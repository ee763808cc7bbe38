"""Problems for kernels of 8 bits whose sums f32 holds, so that results are compared to the last bit."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
import torch
from emulated import run_launch, x_arguments
from torch import Tensor

import lowbit
from lowbit.dialect.formats import byte_codes
from lowbit.dialect.formats.byte_codes import COMPUTE
from lowbit.passes.kernels.sum_order import SumOrder
from lowbit.passes.pipeline import CompiledKernel
from lowbit.pylib.reference import dequantize, matmul
from lowbit.pylib.runtime.activation import VALUES, quantize_rows
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


def in_order(spec: lowbit.MatmulSpec, order: SumOrder, x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """y [m, n] in f32 by the definition of an order, of x [m, k] that is quantized to i8: products of codes less zeros
    are exact integers, those of a group are scaled by one fma, and those of a row are one number of each chain."""
    of_x, x_scales = quantize_rows(x, "i8")
    weight = replace(spec, compute=None, group_size=spec.group_size or spec.k)
    ones = {"scales": torch.ones(spec.n, weight.k // (weight.group_size or spec.k)).half()}
    plain = {name: tensor for name, tensor in tensors.items() if name in ("codes", "zeros")} | ones
    differences = torch.from_numpy(dequantize(replace(weight, row_scales=False), **plain)).double()
    group = min(spec.group_size or spec.k, order.step_k)
    chains: list[Tensor] = []
    part = -(-spec.k // (order.step_k * order.parts * order.chains)) * order.chains * order.step_k
    for first in range(0, spec.k, part):
        for warp in range(order.chains):
            starts = range(first + warp * order.step_k, min(first + part, spec.k), order.chains * order.step_k)
            sums, whole = torch.zeros(len(x), spec.n), torch.zeros(len(x), spec.n).double()
            for at in (start + of for start in starts for of in range(0, order.step_k, group)):
                product = of_x[:, at : at + group].double() @ differences[:, at : at + group].T
                whole += product
                if spec.group_size:
                    scale = tensors["scales"][:, at // spec.group_size].double()
                    sums = (product * scale + sums.double()).float()
            chains.append(sums if spec.group_size else whole.float() * tensors["scales"][:, 0].float())
    if order.parts > 1:
        parts = (chains[i : i + order.chains] for i in range(0, len(chains), order.chains))
        chains = [reduce(torch.add, of_part) for of_part in parts]
    total = reduce(torch.add, chains) * x_scales[:, None]
    return total * tensors["row_scales"].view(-1) if spec.row_scales else total


def run_quantized(kernel: CompiledKernel, spec: lowbit.MatmulSpec, problem: Problem) -> Tensor:
    """y [m, n] of one launch in the emulator, whose blocks run in random order under the race check."""
    x, x_scales, *weight = problem
    q = lowbit.quantize_activation(x, spec.byte_type, scales=x_scales)
    y = torch.full((len(x), spec.n), torch.nan)
    given = {"x_scales": q.scales, "x_sums": q.sums, "y": y, **x_arguments(kernel, spec, q.values)}
    given["workspace"] = torch.zeros(kernel.launch.workspace_bytes, dtype=torch.uint8)
    run_launch(kernel, pack(spec, *weight), True, 0, **given, m=len(x))
    return y
