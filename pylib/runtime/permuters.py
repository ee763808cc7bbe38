"""Brings the columns of x into another order, by target: the permute kernel on GPUs and in the emulator, torch on a
CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.dialect.errors import PackError
from lowbit.dialect.spec import Act
from lowbit.passes.kernels.permute.family import FEW_ROWS
from lowbit.passes.target import Target
from lowbit.pylib.build.driver import Artifact, load
from lowbit.pylib.build.kernels import permute_request
from lowbit.pylib.runtime.driver import Function, current_stream
from lowbit.pylib.runtime.gpu import allocate_rows, check_device, is_settled, load_function
from lowbit.pylib.runtime.interface import check_x_on_cpu, memory_of, unwritten
from lowbit.pylib.weights.tensor_checks import address_of, is_shrunk, shrinkage

if TYPE_CHECKING:
    from lowbit.pylib.emulator import Emulator

_ORDER = ("x", "permutation", "y", "m")
Permuter = Callable[[Tensor, Tensor], Tensor]
"""Returns x[..., permutation] of x [..., k] and a permutation, i32 [k]."""


@lru_cache(maxsize=None)
def permuter(k: int, act: Act, target: Target) -> Permuter:
    """Returns the function that permutes rows of k columns on a target: one for all matmuls.

    Raises TargetError if a tool to compile its kernel is missing.
    """
    if not target.is_gpu:
        return _permute_on_cpu
    return (CudaPermuter if target.kind == "cuda" else EmulatorPermuter)(k, act, target)


def _permute_on_cpu(x: Tensor, permutation: Tensor) -> Tensor:
    _check_on_cpu("cpu", x, permutation)
    return x.index_select(-1, permutation)


def _check_on_cpu(target: str, x: Tensor, permutation: Tensor) -> None:
    check_x_on_cpu(target, x)
    if is_shrunk(permutation):
        raise PackError(shrinkage("packed permutation", permutation))


class _GpuPermuter:
    """Kernels for few rows and for many, as PTX. That for few is compiled at once, the other when it is needed."""

    def __init__(self, k: int, act: Act, target: Target) -> None:
        self._k, self._target = k, target
        self._act: Act = act
        self._artifacts: dict[bool, Artifact] = {}
        self._lock = threading.RLock()
        self._artifact(many=False)

    def _artifact(self, many: bool) -> Artifact:
        with self._lock:
            if many not in self._artifacts:
                made = permute_request(self._k, self._act, many, self._target)
                name = f"permute_{self._act}_{self._k}_{self._target.arch}_{'many' if many else 'few'}"
                self._artifacts[many] = load(made, name)
            return self._artifacts[many]


class CudaPermuter(_GpuPermuter):
    """Permutes columns on NVIDIA GPUs."""

    def __init__(self, k: int, act: Act, target: Target) -> None:
        super().__init__(k, act, target)
        self._functions: dict[tuple[int, bool], Function] = {}
        self._several_devices = False  # known before a function can be found

    def __call__(self, x: Tensor, permutation: Tensor) -> Tensor:
        device, m = x.get_device(), x.numel() // self._k
        function = self._functions.get((device, m > FEW_ROWS)) or self._load(device, m > FEW_ROWS)
        if self._several_devices and torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self(x, permutation)
        if not x.is_contiguous() or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        y = allocate_rows(x, m, self._k, x.dtype)
        if m:
            # The permutation is read ahead of the launch's turn in the stream, as other tensors of the weight are.
            settled = is_settled(permutation)
            function(current_stream(device), settled, address_of(x), permutation.data_ptr(), y.data_ptr(), m)
        return y

    def _load(self, device: int, many: bool) -> Function:
        check_device(self._target, device)
        self._several_devices = torch.cuda.device_count() > 1
        artifact = self._artifact(many)
        with self._lock:
            found = self._functions.get((device, many)) or load_function(artifact, self._target, device, _ORDER)
            self._functions[device, many] = found
        return found


class EmulatorPermuter(_GpuPermuter):
    """Runs the permute kernels in the emulator, on CPU tensors."""

    def __init__(self, k: int, act: Act, target: Target) -> None:
        super().__init__(k, act, target)
        self._emulators: dict[bool, Emulator] = {}

    def __call__(self, x: Tensor, permutation: Tensor) -> Tensor:
        _check_on_cpu(self._target.name, x, permutation)
        m = x.numel() // self._k
        x = x.contiguous()
        y = unwritten(x.shape, x.dtype)
        if m:
            named = {"x": x, "permutation": permutation, "y": y}
            values: dict[str, object] = {name: memory_of(tensor) for name, tensor in named.items()}
            self._emulator(m > FEW_ROWS).run(self._artifact(m > FEW_ROWS).launch, {**values, "m": m})
        return y

    def _emulator(self, many: bool) -> Emulator:
        from lowbit.pylib.emulator import Emulator

        with self._lock:
            found = self._emulators.get(many) or Emulator(self._artifact(many).ptx)
            self._emulators[many] = found
        return found
