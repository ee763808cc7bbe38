"""Runs a matmul's PTX in the emulator, launch for launch as a GPU does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.signature import WORKSPACE
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.target import Target
from lowbit.pylib.runtime.activation_maps import maps_of_x
from lowbit.pylib.runtime.interface import (
    GpuRuntime,
    Tensors,
    check_weight_on_cpu,
    check_x_on_cpu,
    memory_of,
    unwritten,
)

if TYPE_CHECKING:
    from lowbit.pylib.emulator import Emulator


class EmulatorRuntime(GpuRuntime):
    """The GPU's kernels on CPU tensors, PTX instruction by instruction: to test them, not to be fast. Safe to call from
    any thread."""

    def __init__(
        self, spec: MatmulSpec, target: Target, schedule: KernelSchedule | None, late_scaling: bool = False
    ) -> None:
        super().__init__(spec, target, schedule, late_scaling)
        self._emulators: dict[int | None, Emulator] = {}
        self._lock = threading.Lock()

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor:
        check_x_on_cpu(self._target.name, x)
        check_weight_on_cpu(self._target.name, self._spec, weight)
        m = x.numel() // self._k
        tiles = self._artifacts.token_tiles(m)
        if tiles is None:
            return self._from_sums(torch.nn.functional.linear(x.float(), self.dequantize(weight).float()), weight)
        y = unwritten((*x.shape[:-1], self._outputs), self._out)
        rows = x.reshape(-1, self._k).contiguous()
        out = y.view(-1, self._outputs)
        for token_tile, operands, *part in self._parts(tiles, weight, rows, out) if m else ():
            self._launch(token_tile, len(part[0]), operands, x=part[0], y=part[1])
        return y

    def dequantize(self, weight: Tensors) -> Tensor:
        check_weight_on_cpu(self._target.name, self._spec, weight)
        w = unwritten((self._n, self._k), self._act)
        self._launch(None, 0, weight, y=w)
        return w

    def _launch(self, token_tile: int | None, m: int, weight: Tensors, **tensors: Tensor) -> None:
        artifact = self._artifacts.kernel(token_tile)
        launch, named = artifact.launch, dict(zip(self._names, weight)) | tensors
        values: dict[str, object] = {name: memory_of(t) for name, t in named.items()}
        values |= maps_of_x(values.get("x"), self._spec, m, launch.boxes)
        values |= {WORKSPACE: np.zeros(launch.workspace_bytes, np.uint8), "m": m}
        self._emulator(token_tile).run(launch, values)

    def _emulator(self, token_tile: int | None) -> Emulator:
        from lowbit.pylib.emulator import Emulator

        with self._lock:
            emulator = self._emulators.get(token_tile) or Emulator(self._artifacts.kernel(token_tile).ptx)
            self._emulators[token_tile] = emulator
        return emulator
