"""Matmuls of activations of 8 bits (`MatmulSpec.compute`): x is quantized by one kernel and multiplied by another.

Beside what every runtime has, these have `multiply`, for an activation that is quantized already.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, Compute
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.target import Target
from lowbit.pylib import knobs
from lowbit.pylib.activation import Quantized, in_column_order, quantize_in_torch
from lowbit.pylib.runtime.base import Runtime, Tensors, check_cpu, check_schedule, parts_of_rows
from lowbit.pylib.runtime.driver import allocate, current_stream
from lowbit.pylib.runtime.emulated import EmulatorRuntime
from lowbit.pylib.runtime.gpu import CudaRuntime, Launcher, check_device, is_settled
from lowbit.pylib.runtime.quantizers import quantizer
from lowbit.pylib.runtime.runtimes import CpuRuntime
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.folding import with_table_in_f16


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
        self._launches: dict[tuple[int, int], list[tuple[Launcher, int, int]]] = {}  # by (device, m)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        return self.multiply(self._quantize(x), weight)

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor:
        values, scales, sums = x
        device, k, n = values.get_device(), self._k, self._n
        m = values.numel() // k
        launches = self._launches.get((device, m))
        if launches is None:
            launches = self._launches[device, m] = self._plan(device, m)
        if self._several_devices and torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self.multiply(x, weight)
        if not (values.is_contiguous() and scales.is_contiguous() and sums.is_contiguous()):
            values, scales, sums = (t.contiguous() for t in x)
        y = allocate((m, n), (n, 1), self._out)
        stream, settled, addresses = current_stream(device), is_settled(weight[0]), [t.data_ptr() for t in weight]
        first, x_scale, x_sum, out = (t.data_ptr() for t in (values, scales, sums, y))
        sums_row, y_row = k // SUM_COLUMNS * 4, n * y.element_size()
        for function, row, count in launches:
            x_parts = first + row * k, x_scale + row * 4, x_sum + row * sums_row
            function(stream, settled, *x_parts, out + row * y_row, count, *addresses)
        return y if values.ndim == 2 else y.view(*values.shape[:-1], n)

    def _plan(self, device: int, m: int) -> list[tuple[Launcher, int, int]]:
        """The launches for m rows: kernel, first row, number of rows."""
        check_device(self._target, device)
        tiles = (self._artifacts.tiles(m) or []) if m else []
        firsts = list(accumulate([0, *tiles[:-1]]))  # the last launch has the rows that are left
        ends = [*firsts[1:], m]
        return [(self._function(device, tile), first, end - first) for tile, first, end in zip(tiles, firsts, ends)]


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
        y = torch.empty((*values.shape[:-1], self._n), dtype=self._out, device="cpu")
        m = values.numel() // k
        flat = values.view(m, k), scales.view(-1), sums.view(m, k // SUM_COLUMNS), y.view(m, self._n)
        for tile, *part in parts_of_rows(self._artifacts.tiles(m), *flat) if m else ():
            named = dict(zip(("x", "x_scales", "x_sums", "y"), part))
            self._launch(tile, len(part[0]), weight, **named)
        return y


class CpuEightBit(CpuRuntime):
    """This machine's CPU: values of 8 bits are numbers of f16, so the program for these multiplies them, with sums and
    scales of groups in f32. Scales of rows of x and the bias come after it.

    Where scales are folded into weights, these are rounded from as many tokens on as on a GPU.
    """

    def __init__(self, spec: MatmulSpec) -> None:
        from lowbit.pylib.runtime.cpu import CpuMatmul

        super().__init__(replace(spec, compute=None, fold_scales=False))
        self._compute: Compute = spec.byte_type
        self._out_type = TORCH[spec.out_dtype]
        inner = replace(with_table_in_f16(spec), act="f16", out="f32", bias=False)
        exact = replace(spec, compute=None, fold_scales=False, act="f16", out="f32", bias=False)
        self._outer = spec
        self._exact = self._folded = CpuMatmul(exact, knobs.cpu(), knobs.num_threads())
        if spec.folds:
            self._folded = CpuMatmul(inner, knobs.cpu(), knobs.num_threads())
        self._count = len(exact.tensors)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        check_cpu("cpu", x, weight[0])
        return self.multiply(quantize_in_torch(x, self._compute), weight)

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor:
        check_cpu("cpu", *x, weight[0])
        values, scales, _ = x
        product = self._folded if self._outer.rounds_weights(scales.numel()) else self._exact
        y = product.matmul(in_column_order(values).to(torch.float16), weight[: self._count])
        y = y * scales.unsqueeze(-1)
        for bias in weight[self._count :]:
            y = y + bias
        return y.to(self._out_type)
