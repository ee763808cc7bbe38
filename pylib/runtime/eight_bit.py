"""Matmuls of activations of 8 bits (`MatmulSpec.compute`): x is quantized by one kernel and multiplied by another.

Beside what every runtime has, these have `multiply`, for an activation that is quantized already.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, Compute
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.target import Target
from lowbit.pylib import knobs
from lowbit.pylib.activation import Quantized, in_column_order, quantize_in_torch
from lowbit.pylib.runtime.driver import current_stream
from lowbit.pylib.runtime.quantizers import quantizer
from lowbit.pylib.runtime.runtimes import (
    CpuRuntime,
    CudaRuntime,
    EmulatorRuntime,
    Runtime,
    Tensors,
    check_cpu,
    check_device,
    check_schedule,
    is_settled,
    parts_of_rows,
)
from lowbit.pylib.torch_types import TORCH


class EightBitRuntime(Runtime, Protocol):
    """A runtime of a spec with `compute`."""

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor: ...


def make_eight_bit_runtime(spec: MatmulSpec, target: Target, schedule: Schedule | None) -> EightBitRuntime:
    """The runtime for a GPU, the emulator or the CPU."""
    if target.kind == "cuda":
        return CudaEightBit(spec, target, schedule)
    if target.kind == "emulator":
        return EmulatorEightBit(spec, target, schedule)
    check_schedule(target, schedule)
    return CpuEightBit(spec)


class CudaEightBit(CudaRuntime):
    """NVIDIA GPUs: rows are multiplied in launches of token tiles, as many as it takes."""

    def __init__(self, spec: MatmulSpec, target: Target, schedule: Schedule | None) -> None:
        super().__init__(spec, target, schedule)
        self._quantize = quantizer(spec.k, spec.act, spec.byte_type, target)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        return self.multiply(self._quantize(x), weight)

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor:
        values, scales, sums = (t.contiguous() for t in x)
        device, k = values.get_device(), self._k
        y = values.new_empty((*values.shape[:-1], self._n), dtype=self._out)
        m = values.numel() // k
        if not m:
            check_device(self._target, device)
            return y
        flat = values.view(m, k), scales.view(-1), sums.view(m, k // SUM_COLUMNS), y.view(m, self._n)
        addresses = [t.data_ptr() for t in weight]
        with torch.cuda.device(device):
            for tile, *part in parts_of_rows(self._artifacts.tiles(m), *flat):
                function, stream = self._function(device, tile), current_stream(device)
                *pointers, out = (t.data_ptr() for t in part)
                function(stream, is_settled(weight[0]), *pointers, out, len(part[0]), *addresses)
        return y


class EmulatorEightBit(EmulatorRuntime):
    """The same kernels in the emulator, on CPU tensors."""

    def __init__(self, spec: MatmulSpec, target: Target, schedule: Schedule | None) -> None:
        super().__init__(spec, target, schedule)
        self._quantize = quantizer(spec.k, spec.act, spec.byte_type, target)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        return self.multiply(self._quantize(x), weight)

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor:
        check_cpu(self._target.name, *x, weight[0])
        values, scales, sums = (t.contiguous() for t in x)
        k = self._k
        y = torch.empty((*values.shape[:-1], self._n), dtype=self._out)
        m = values.numel() // k
        flat = values.view(m, k), scales.view(-1), sums.view(m, k // SUM_COLUMNS), y.view(m, self._n)
        for tile, *part in parts_of_rows(self._artifacts.tiles(m), *flat) if m else ():
            named = dict(zip(("x", "x_scales", "x_sums", "y"), part))
            self._launch(tile, len(part[0]), weight, **named)
        return y


class CpuEightBit(CpuRuntime):
    """This machine's CPU: values of 8 bits are numbers of f16, so the program for these multiplies them, with sums and
    scales of groups in f32. Scales of rows of x and the bias come after it."""

    def __init__(self, spec: MatmulSpec) -> None:
        from lowbit.pylib.runtime.cpu import CpuMatmul

        super().__init__(replace(spec, compute=None))
        self._compute: Compute = spec.byte_type
        self._out_type = TORCH[spec.out_dtype]
        inner = replace(spec, compute=None, act="f16", out="f32", bias=False)
        self._product = CpuMatmul(inner, knobs.cpu(), knobs.num_threads())
        self._count = len(inner.tensors)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        check_cpu("cpu", x, weight[0])
        return self.multiply(quantize_in_torch(x, self._compute), weight)

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor:
        check_cpu("cpu", *x, weight[0])
        values, scales, _ = x
        y = self._product.matmul(in_column_order(values).to(torch.float16), weight[: self._count])
        y = y * scales.unsqueeze(-1)
        for bias in weight[self._count :]:
            y = y + bias
        return y.to(self._out_type)
