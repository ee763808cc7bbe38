"""Quantizes activations, by target: the quantize kernel on GPUs and in the emulator, torch on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from lowbit.dialect.formats.byte_codes import SUM_COLUMNS, Compute
from lowbit.dialect.spec import Act
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target
from lowbit.pylib.build.driver import Artifact, load
from lowbit.pylib.build.kernels import quantize_request
from lowbit.pylib.runtime.activation import VALUES, Quantized, quantize_in_torch
from lowbit.pylib.runtime.driver import Function, allocate, current_stream
from lowbit.pylib.runtime.gpu import allocate_rows, check_device, load_function
from lowbit.pylib.runtime.interface import check_x_on_cpu, memory_of, unwritten
from lowbit.pylib.weights.tensor_checks import address_of

_ORDER = ("x", "values", "scales", "sums", "m")


def quantize_on(x: Tensor, compute: Compute, target: str) -> Quantized:
    """Quantizes x [..., k] on a target: the implementation of `torch.ops.lowbit.quantize_activation`."""
    act = "f16" if x.dtype is torch.float16 else "bf16"
    return quantizer(x.shape[-1], act, compute, parse_target(target))(x)


@lru_cache(maxsize=None)
def quantizer(k: int, act: str, compute: Compute, target: Target) -> Callable[[Tensor], Quantized]:
    """Returns the function that quantizes rows of k columns on a target: one for all matmuls."""
    if not target.is_gpu:
        return lambda x: _quantize_on_cpu(x, compute)
    return gpu_quantizer(k, act, compute, target)


def _quantize_on_cpu(x: Tensor, compute: Compute) -> Quantized:
    check_x_on_cpu("cpu", x)
    return quantize_in_torch(x, compute)


def gpu_quantizer(k: int, act: str, compute: Compute, target: Target) -> Callable[[Tensor], Quantized]:
    """Returns the function that quantizes x [..., k] on a GPU or in the emulator, by a kernel that is compiled now."""
    made = quantize_request(k, cast(Act, act), compute, target)
    artifact = load(made, f"quantize_{compute}_{act}_{k}_{target.arch}")
    kind = CudaQuantizer if target.kind == "cuda" else EmulatorQuantizer
    return kind(k, compute, target, artifact)


class CudaQuantizer:
    """Quantizes activations on NVIDIA GPUs."""

    def __init__(self, k: int, compute: Compute, target: Target, artifact: Artifact) -> None:
        self._k, self._values, self._target, self._artifact = k, VALUES[compute], target, artifact
        self._functions: dict[int, Function] = {}
        self._lock = threading.Lock()
        self._several_devices = False  # known before a function can be found

    def __call__(self, x: Tensor) -> Quantized:
        device, k = x.get_device(), self._k
        self.function(device)  # which finds out whether there are several devices
        if self._several_devices and torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self(x)
        m = x.numel() // k
        values, sums = allocate_rows(x, m, k, self._values), allocate_rows(x, m, k // SUM_COLUMNS, torch.float32)
        scales = allocate((m,), (1,), torch.float32)
        self.write(current_stream(device), x, m, (values.data_ptr(), scales.data_ptr(), sums.data_ptr()))
        if x.ndim != 2:
            scales = scales.view(x.shape[:-1])
        return values, scales, sums

    def write(self, stream: int, x: Tensor, m: int, addresses: tuple[int, int, int]) -> None:
        """Starts the kernel that quantizes the m rows of x, on the current device: where to write values, scales and
        sums."""
        if not x.is_contiguous() or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        if m:
            self.function(x.get_device())(stream, True, address_of(x), *addresses, m)

    def function(self, device: int) -> Function:
        """Returns the kernel as it is loaded on a device, which takes the addresses of x, values, scales and sums, and
        the number of rows."""
        return self._functions.get(device) or self._load(device)

    def _load(self, device: int) -> Function:
        check_device(self._target, device)
        self._several_devices = torch.cuda.device_count() > 1
        with self._lock:
            found = self._functions.get(device) or load_function(self._artifact, self._target, device, _ORDER)
            self._functions[device] = found
        return found


class EmulatorQuantizer:
    """Runs the quantize kernel in the emulator, on CPU tensors."""

    def __init__(self, k: int, compute: Compute, target: Target, artifact: Artifact) -> None:
        from lowbit.pylib.emulator import Emulator

        self._values, self._target, self._launch = VALUES[compute], target, artifact.launch
        self._emulator = Emulator(artifact.ptx)

    def __call__(self, x: Tensor) -> Quantized:
        check_x_on_cpu(self._target.name, x)
        x = x.contiguous()
        batch, k = x.shape[:-1], x.shape[-1]
        values = unwritten(x.shape, self._values)
        sizes = batch, (*batch, k // SUM_COLUMNS)
        scales, sums = (unwritten(size, torch.float32) for size in sizes)
        if x.numel():
            named = {"x": x, "values": values, "scales": scales, "sums": sums}
            memory = {name: memory_of(t) for name, t in named.items()}
            self._emulator.run(self._launch, {**memory, "m": x.numel() // k})
        return values, scales, sums
