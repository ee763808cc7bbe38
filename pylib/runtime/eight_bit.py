"""Matmuls of activations of 8 bits (`MatmulSpec.compute`): x is quantized by one kernel and multiplied by another.

Beside what every runtime has, these have `multiply`, for an activation that is quantized already.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from lowbit.dialect.fields import MOST
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, Compute
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.target import Target
from lowbit.pylib.operator.call_checks import check_one_expert
from lowbit.pylib.runtime.activation import Quantized, in_column_order, quantize_in_torch
from lowbit.pylib.runtime.driver import allocate, current_stream
from lowbit.pylib.runtime.emulated import EmulatorRuntime
from lowbit.pylib.runtime.gpu import CudaRuntime, Launcher, allocate_rows, check_device, is_settled
from lowbit.pylib.runtime.interface import (
    Runtime,
    Tensors,
    check_cpu,
    check_weight_on_cpu,
    check_x_on_cpu,
    unwritten,
)
from lowbit.pylib.runtime.quantizers import CudaQuantizer, quantizer
from lowbit.pylib.runtime.runtimes import CpuRuntime
from lowbit.pylib.weights.tensor_checks import ALIGNMENT

if TYPE_CHECKING:
    from lowbit.pylib.runtime.cpu import CpuMatmul


class EightBitRuntime(Runtime, Protocol):
    """A runtime of a spec with `compute`."""

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor: ...


def make_eight_bit_runtime(spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> EightBitRuntime:
    """The runtime for a GPU, the emulator or the CPU."""
    if target.kind == "cuda":
        return CudaEightBit(spec, target, schedule)
    if target.kind == "emulator":
        return EmulatorEightBit(spec, target, schedule)
    check_one_expert(spec)
    return CpuEightBit(spec)


Launches = list[tuple[Launcher, tuple[int, ...], int]]
"""Kernels, each with where its rows begin (in bytes of values, scales, sums, y and what is like y), and with their
number."""


class Plan(NamedTuple):
    """The launches for m rows of x on a device, and where values, scales and sums of x lie in one piece of memory.

    scales, sums  where they begin, in bytes; values begin at 0
    bytes         of all three
    """

    scales: int
    sums: int
    bytes: int
    launches: Launches


class CudaEightBit(CudaRuntime):
    """NVIDIA GPUs: rows are multiplied in launches of token tiles, as many as it takes."""

    def __init__(self, spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> None:
        super().__init__(spec, target, schedule)
        self._quantize = cast(CudaQuantizer, quantizer(spec.k, spec.act, spec.byte_type, target))
        self._plans: dict[tuple[int, int], Plan] = {}  # by (device, m)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        """Quantizes x and multiplies it, with two allocations: of y, and of all that stands for x."""
        device = x.get_device()
        m = x.numel() // self._k
        scales, sums, size, launches = self._plans.get((device, m)) or self._plan(device, m)
        if self._several_devices and torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self.matmul(x, weight)
        quantized, stream = allocate((size,), (1,), torch.uint8), current_stream(device)
        values = quantized.data_ptr()
        addresses = values, values + scales, values + sums
        self._quantize.write(stream, x, m, addresses)
        y = allocate_rows(x, m, self._outputs, self._out)
        self._start(launches, stream, addresses, y.data_ptr(), weight)
        return y

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor:
        values, scales, sums = x
        device = values.get_device()
        m = values.numel() // self._k
        *_, launches = self._plans.get((device, m)) or self._plan(device, m)
        if self._several_devices and torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self.multiply(x, weight)
        if not (values.is_contiguous() and scales.is_contiguous() and sums.is_contiguous()):
            values, scales, sums = (t.contiguous() for t in x)
        y = allocate_rows(values, m, self._outputs, self._out)
        addresses = values.data_ptr(), scales.data_ptr(), sums.data_ptr()
        self._start(launches, current_stream(device), addresses, y.data_ptr(), weight)
        return y

    def _plan(self, device: int, m: int) -> Plan:
        """Makes the plan for m rows, and keeps it."""
        check_device(self._target, device)
        tiles = (self._artifacts.token_tiles(m) or []) if m else []
        firsts = list(accumulate([0, *tiles[:-1]]))  # the last launch has the rows that are left
        ends = [*firsts[1:], m]
        row_bytes = self._k, 4, self._k // SUM_COLUMNS * 4, self._outputs * self._out.itemsize
        launches = [
            (self._function(device, token_tile), tuple(first * size for size in row_bytes), end - first)
            for token_tile, first, end in zip(tiles, firsts, ends)
        ]
        values, scales, sums, _ = (-(-m * size // ALIGNMENT) * ALIGNMENT for size in row_bytes)
        return self._plans.setdefault((device, m), Plan(values, values + scales, values + scales + sums, launches))


    def _start(
        self, launches: Launches, stream: int, quantized: tuple[int, int, int], y: int, weight: Tensors
    ) -> None:
        """Multiplies the activation whose values, scales and sums lie at these addresses."""
        settled, tensors = is_settled(weight[0]), [t.data_ptr() for t in weight]
        values, scales, sums = quantized
        others = tensors[self._stored :]
        for function, (of_values, of_scales, of_sums, of_y), count in launches:
            if others:  # which are like y
                tensors[self._stored :] = [other + of_y for other in others]
            parts = values + of_values, scales + of_scales, sums + of_sums
            function(stream, settled, *parts, y + of_y, count, *tensors)


class EmulatorEightBit(EmulatorRuntime):
    """Runs the kernels for x of 8 bits in the emulator, on CPU tensors."""

    def __init__(self, spec: MatmulSpec, target: Target, schedule: KernelSchedule | None) -> None:
        super().__init__(spec, target, schedule)
        self._quantize = quantizer(spec.k, spec.act, spec.byte_type, target)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        return self.multiply(self._quantize(x), weight)

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor:
        check_x_on_cpu(self._target.name, *x)
        check_weight_on_cpu(self._target.name, self._spec, weight)
        values, scales, sums = (t.contiguous() for t in x)
        k = self._k
        y = unwritten((*values.shape[:-1], self._outputs), self._out)
        m = values.numel() // k
        flat = values.view(m, k), scales.view(-1), sums.view(m, k // SUM_COLUMNS), y.view(m, self._outputs)
        for token_tile, operands, *part in self._parts(self._artifacts.token_tiles(m), weight, *flat) if m else ():
            named = dict(zip(("x", "x_scales", "x_sums", "y"), part))
            self._launch(token_tile, len(part[0]), operands, **named)
        return y


class CpuEightBit(CpuRuntime):
    """This machine's CPU: values of 8 bits are numbers of f16, so a program for these multiplies them, with sums and
    scales of groups in f32. It scales the sums of each row of x before the bias and the epilogue.

    Where scales are folded into weights, these are rounded from as many tokens on as on a GPU.
    """

    def __init__(self, spec: MatmulSpec) -> None:
        from lowbit.pylib.runtime.cpu import cpu_matmul

        super().__init__(spec.in_act)
        self._compute: Compute = spec.byte_type
        self._outer = spec
        self._few = self._many = cpu_matmul(spec, 1)
        if spec.rounds_weights(MOST) != spec.rounds_weights(1):
            self._many = cpu_matmul(spec, MOST)

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        check_x_on_cpu("cpu", x)
        return self.multiply(quantize_in_torch(x, self._compute), weight)

    def multiply(self, x: Quantized, weight: Tensors) -> Tensor:
        check_cpu("cpu", weight[0])
        check_x_on_cpu("cpu", *x)
        values, scales, _ = x
        product = self._of(scales.numel())
        return product.matmul(in_column_order(values).to(torch.float16), [*weight, scales.contiguous()])

    def _of(self, m: int) -> CpuMatmul:
        return self._many if self._outer.rounds_weights(m) else self._few
