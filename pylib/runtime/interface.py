"""The base of all runtimes: their interface, and how kernels for token tiles serve any number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.epilogue import ACTIVATIONS
from lowbit.dialect.errors import PackError, SpecError, TargetError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.target import Target
from lowbit.pylib.build.choices import KernelChoices
from lowbit.pylib.build.driver import Artifact
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import gated_rows
from lowbit.pylib.weights.tensor_checks import is_shrunk, shrinkage

Tensors = Sequence[Tensor]
"""What a call has besides x: see `MatmulSpec.call_operands`."""


def argument_order(spec: MatmulSpec) -> tuple[str, ...]:
    """Returns the order in which the kernels of a spec are called with their arguments."""
    x = ("x", "x_scales", "x_sums") if spec.compute else ("x",)
    return (*x, "y", "m", *spec.call_operands)


class Runtime(Protocol):
    """The place where a `Matmul` runs. A token tile of None means the kernel that dequantizes."""

    def matmul(self, x: Tensor, weight: Tensors) -> Tensor: ...

    def dequantize(self, weight: Tensors) -> Tensor: ...

    @property
    def schedule(self) -> KernelSchedule | None: ...

    def kernel(self, m: int) -> Artifact: ...

    def stages(self, m: int) -> dict[str, str]: ...

    def choices(self) -> KernelChoices: ...


class GpuRuntime:
    """The base of runtimes that run PTX, on a GPU or in the emulator."""

    def __init__(
        self, spec: MatmulSpec, target: Target, schedule: KernelSchedule | None, late_scaling: bool = False
    ) -> None:
        self._spec, self._n, self._k, self._outputs = spec, spec.n, spec.k, spec.outputs
        self._act, self._out = TORCH[spec.act], TORCH[spec.out_dtype]
        self._names = spec.call_operands
        self._stored = len(spec.tensors)
        self._biases = [i for i, slot in enumerate(spec.tensors) if slot.role == "bias"]
        self._target = target
        self._artifacts = Artifacts(spec, target, schedule, late_scaling)
        self.schedule = self.kernel(1).schedule  # compiles it, so that its errors show here
        for token_tile in self._artifacts.tiles_of_given()[-1:]:
            self._artifacts.kernel(token_tile)  # the given schedule's

    def kernel(self, m: int) -> Artifact:
        return self._artifacts.kernel_for(m)

    def stages(self, m: int) -> dict[str, str]:
        return self._artifacts.stages_for(m)

    def choices(self) -> KernelChoices:
        return self._artifacts.choices()

    def _parts(self, tiles: list[int] | None, weight: Tensors, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yields each token tile, what a launch has besides x, and its rows of the tensors: x first, y last."""
        stored, others = tuple(weight[: self._stored]), [t.view(-1, self._n) for t in weight[self._stored :]]
        for token_tile, *parts in parts_of_rows(tiles, *tensors, *others):
            yield token_tile, (*stored, *parts[len(tensors) :]), *parts[: len(tensors)]

    def _from_sums(self, sums: Tensor, weight: Tensors) -> Tensor:
        """Returns y of sums [..., n] in f32 without the bias: what the kernels' epilogue makes of them."""
        bias = self._bias(weight)
        return with_epilogue(self._spec, sums if bias is None else sums + bias, weight[self._stored :]).to(self._out)

    def _bias(self, weight: Tensors) -> Tensor | None:
        """Returns the bias that the vendor's matmul adds where no kernel of ours does."""
        return weight[self._biases[0]] if self._biases else None


def parts_of_rows(tiles: list[int] | None, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields each token tile with its rows of the tensors."""
    sizes = [*tiles[:-1], len(tensors[0]) - sum(tiles[:-1])] if tiles else []
    return zip(tiles or (), *(rows.split(sizes) for rows in tensors))


def with_epilogue(spec: MatmulSpec, sums: Tensor, others: Tensors) -> Tensor:
    """Returns what the epilogue makes of sums [..., n] in f32, in whose columns halves of a gated weight's row blocks
    alternate. others: the tensors of `MatmulSpec.call_inputs`."""
    if spec.is_gated:
        return gated(str(spec.epilogue), *gated_rows.halves(sums)).flatten(-2)
    for residual in others:
        sums = sums + residual
    return sums


def gated(epilogue: str, gate: Tensor, up: Tensor) -> Tensor:
    """Returns what a gated epilogue makes of numbers of the gate and of those that these multiply."""
    activation = ACTIVATIONS[epilogue]
    if activation.is_clamped:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    exponent = gate * (activation.linear + activation.cubic * gate * gate)
    return gate / (1 + torch.exp(-exponent)) * (up + activation.shift)


def check_schedule(target: Target, schedule: KernelSchedule | None) -> None:
    """Raises SpecError for a schedule on a CPU."""
    if schedule is not None and not target.is_gpu:
        raise SpecError("schedule= is for GPU targets; the CPU's kernel has no such choices, so drop it")


def check_x_on_cpu(target: str, *tensors: Tensor) -> None:
    """Raises TargetError for tensors of an activation that are elsewhere, SpecError for a storage that was shrunk."""
    check_cpu(target, *tensors)
    for tensor in tensors:
        check_memory_of_x(tensor)


def check_weight_on_cpu(target: str, spec: MatmulSpec, weight: Tensors) -> None:
    """Raises TargetError for a weight that is elsewhere, PackError for a storage that was shrunk."""
    check_cpu(target, weight[0])
    check_memory_of_weight(spec, weight)


def check_memory_of_weight(spec: MatmulSpec, weight: Tensors) -> None:
    """Raises PackError for a storage that was shrunk."""
    for slot, tensor in zip(spec.tensors, weight):
        if is_shrunk(tensor):
            raise PackError(shrinkage(f"packed {slot.name}", tensor))


def check_cpu(target: str, *tensors: Tensor) -> None:
    """Raises TargetError for tensors that are elsewhere."""
    for tensor in tensors:
        if not tensor.is_cpu:
            raise TargetError(f"target {target} takes CPU tensors, not {tensor.device}; use .cpu()")


def check_memory_of_x(x: Tensor) -> None:
    """Raises SpecError for a storage that was shrunk."""
    if is_shrunk(x):
        raise SpecError(shrinkage("x", x))


def unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns memory of the CPU for a kernel in the emulator to write: NaN, or -1, so that what it leaves out shows, in
    every run alike."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype, device="cpu")


def memory_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous CPU tensor, shared."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
