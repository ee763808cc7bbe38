"""A compiled tile program as a function of its arguments by name.

    kernel = lowbit.compile_program(program)
    kernel(x=x, y=y, m=len(x))

The call is the same on a GPU and in the emulator; only the tensors are on another device. Outputs are
arguments, too: nothing is returned. Arguments are checked at every call, which costs some microseconds: the matmuls of
this package call `pylib.runtime.driver.Function` instead.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.errors import SpecError, TargetError
from lowbit.dialect.signature import WORKSPACE, Param
from lowbit.pylib.build import knobs
from lowbit.pylib.build.driver import Program
from lowbit.pylib.runtime.driver import Function, current_stream, on_device
from lowbit.pylib.runtime.gpu import check_device, load_function
from lowbit.pylib.runtime.interface import memory_of
from lowbit.pylib.runtime.tensor_map import TensorMap
from lowbit.pylib.torch_types import type_name, types_of_views
from lowbit.pylib.weights.tensor_checks import check_storage

if TYPE_CHECKING:
    from lowbit.dialect.types import Element
    from lowbit.passes.launch import Launch
    from lowbit.passes.pipeline import Buildable
    from lowbit.passes.target import Target

_ALIGNMENT = 16  # bytes, which kernels rely on


class Compiled(Protocol):
    """What `load` takes: a `passes.pipeline.CompiledKernel`, or one that was kept."""

    @property
    def launch(self) -> Launch: ...
    @property
    def target(self) -> Target: ...
    @property
    def ptx(self) -> str: ...
    @property
    def stages(self) -> dict[str, str]: ...
    @property
    def elements(self) -> dict[str, tuple[Element, ...]]: ...
    def cubin(self) -> bytes: ...


def compile_program(
    program: Buildable, target: str | None = None, overlap: bool = False, racecheck: bool = True
) -> Kernel:
    """Compiles a tile program and makes it callable.

    program     a `lowbit.passes.builder.Program`, its module, or a function without arguments that returns one of them
    target      a GPU such as "sm_90a" (`lowbit info` lists them), or "emulator:sm_90a", which runs the GPU's PTX on CPU
                tensors; None: this machine's GPU
    overlap     as for `load`
    racecheck   as for `load`

    Raises PassError for a wrong program, with its line; TargetError for an unknown target, a CPU, or where machine code
    can't be made.
    """
    from lowbit.passes.pipeline import lower_program

    return load(lower_program(program, gpu_target(target), lines=knobs.line_info()), overlap, racecheck)


def gpu_target(target: str | None) -> Target:
    """Returns the target of a tile program. Raises TargetError for an unknown one, and for a CPU."""
    from lowbit.pylib.runtime.devices import target_named

    chosen = target_named(target)
    if not chosen.is_gpu:
        why = f"target={target!r}" if target else "target=None without a GPU"
        raise TargetError(f"{why}: tile programs are for GPUs; use a target such as 'emulator:sm_90a' to emulate one")
    return chosen


def load(compiled: Compiled, overlap: bool = False, racecheck: bool = True) -> Kernel:
    """Makes a compiled kernel callable, on the GPU or in the emulator, whichever it was compiled for.

    overlap     lets each launch start before the kernel in front of it has ended (sm_90 on). The program must then wait
                (`grid_wait`) before it touches what an earlier kernel reads or writes; one that never waits does not
                overlap.
    racecheck   in the emulator: report threads that touch the same memory, one of them writing, in no order. False
                takes less time

    Raises TargetError where machine code can't be made.
    """
    if compiled.target.kind == "emulator":
        return EmulatedKernel(compiled, racecheck)
    return CudaKernel(compiled, overlap)


class Kernel:
    """A loaded kernel, as `compile_program` and `load` make it.

    launch   its name, parameters and grid
    target   what it was compiled for
    stages   the program after each stage that was recorded, by the stage's name: all of them by `compile_program`
    """

    def __init__(self, compiled: Compiled) -> None:
        self.launch, self.target, self.stages = compiled.launch, compiled.target, dict(compiled.stages)
        self._types = {name: types_of_views(views) for name, views in compiled.elements.items()}

    @property
    def ptx(self) -> str:
        """Returns the kernel as PTX."""
        return self.stages["ptx"]

    @property
    def cubin(self) -> bytes:
        """Returns the kernel as machine code. Raises TargetError for the emulator."""
        raise TargetError(f"target {self.target} has no cubin; compile for a GPU such as 'sm_90a'")

    def ir(self, stage: str) -> str:
        """Returns the program after a stage: "lowbit", "tile", "gpu", "llvm", "ll" or "ptx".

        Raises SpecError for another stage.
        """
        if stage not in self.stages:
            hint = "; machine code is in .cubin" if stage == "cubin" else ""
            raise SpecError(f"stage={stage!r} must be one of {', '.join(map(repr, self.stages))}{hint}")
        return self.stages[stage]

    def __call__(self, /, **arguments: Any) -> None:
        """Runs the kernel. The grid follows from the arguments and the GPU.

        arguments   every parameter by its name: a contiguous tensor for a pointer, an int for an i32, a number for an
                    f32, and for a tensor map a `TensorMap` of a tensor

        Raises SpecError or TargetError for arguments that do not fit, by their names.
        """
        self.launch.check_names(arguments)
        values = [arguments[param.name] for param in self.launch.arguments]
        for param, value in zip(self.launch.arguments, values):
            self._check(param, value)
        self._check_together(arguments)
        if 0 not in self.launch.blocks(arguments, sm_count=1):  # else there is nothing to do, on any GPU
            self.start(*values)

    def __repr__(self) -> str:
        params = ", ".join(f"{p.name}: {p.kind}" for p in self.launch.arguments)
        return f"Kernel({self.launch.name}({params}); on {self.target})"

    def start(self, *values: Any) -> None:
        """Runs the kernel as a call does, but without its checks, which take some microseconds: for callers that made
        the arguments themselves. Others may have memory overwritten.

        values   the arguments in the order of the program's parameters
        """
        raise NotImplementedError

    def _check_together(self, arguments: Mapping[str, Any]) -> None:
        """Raises TargetError for arguments that do not fit each other."""

    def _check(self, param: Param, value: Any) -> None:
        """Raises SpecError or TargetError if a value does not fit its parameter."""
        wanted = _mismatch(param, value)
        if wanted:
            given = f"{type(value).__name__} {value!r}" if isinstance(value, int | float) else type(value).__name__
            raise SpecError(f"{self.launch.name}: {param.name} must be {wanted}, not {given}")
        tensor = value.address if isinstance(value, TensorMap) else value
        if isinstance(tensor, Tensor):
            self._check_tensor(param.name, tensor)

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        self._check_type(name, tensor)
        what, device = f"{self.launch.name}: {name}", "cpu" if self.target.kind == "emulator" else "cuda"
        if tensor.device.type != device:
            fix = f"use {name}.to({device!r})"
            raise TargetError(f"{what} is on {tensor.device}, but target {self.target} takes {device} tensors; {fix}")
        check_storage(what, tensor, SpecError)
        if tensor.is_neg():
            raise SpecError(f"{what} is a view that negates, which memory does not show; use {name}.resolve_neg()")
        if not tensor.is_contiguous():
            raise SpecError(f"{what} must be contiguous; use {name}.contiguous()")
        if tensor.data_ptr() % _ALIGNMENT:
            raise SpecError(f"{what} must begin at a multiple of {_ALIGNMENT} bytes; use {name}.clone()")

    def _check_type(self, name: str, tensor: Tensor) -> None:
        """Raises SpecError for a tensor of another type than the program's views of it have."""
        allowed = self._types.get(name)
        if allowed and tensor.dtype not in allowed:
            types, given = " or ".join(map(type_name, allowed)), type_name(tensor.dtype)
            wanted = f"torch.{type_name(allowed[0])}"
            fix = f"use {name}.to({wanted}), or .view({wanted}) of the same bytes"
            raise SpecError(f"{self.launch.name}: {name} must be {types}, as the program sees it, not {given}; {fix}")


def _mismatch(param: Param, value: Any) -> str | None:
    """Returns what the parameter takes where that is not what was given."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match param.kind:
        case "pointer":
            return None if isinstance(value, Tensor) else "a torch tensor"
        case "i32":
            fits = number and isinstance(value, int) and -(1 << 31) <= value < 1 << 31
            return None if fits else "an int of 32 bits"
        case "f32":
            if not number:
                return "a number"
            return None if _fits_f32(value) else "a number of f32, at most 3.4e38 (an infinity is one)"
        case "tensor_map":
            fits = isinstance(value, TensorMap) and isinstance(value.address, Tensor)
            return None if fits else "a TensorMap of a torch tensor"


def _fits_f32(value: float) -> bool:
    """Tells whether a number is one of f32 when it is rounded; infinities and NaN are."""
    try:
        struct.pack("<f", float(value))
    except OverflowError:
        return False
    return True


class CudaKernel(Kernel):
    """A kernel for NVIDIA GPUs, loaded on each device at its first use there."""

    def __init__(self, compiled: Compiled, overlap: bool) -> None:
        super().__init__(compiled)
        self._cubin = compiled.cubin()
        self._program = Program(compiled.launch, compiled.ptx, self._cubin)
        self._overlap = overlap
        self._functions: dict[int, Function] = {}

    @property
    def cubin(self) -> bytes:
        return self._cubin

    def start(self, *values: Any) -> None:
        device = next((tensor.get_device() for tensor in map(_tensor, values) if tensor is not None), None)
        device = torch.cuda.current_device() if device is None else device
        function = self._functions.get(device) or self.function(device)
        with on_device(device):
            function(current_stream(device), self._overlap, *map(_for_gpu, values))

    def function(self, device: int) -> Function:
        """Returns the kernel as it is loaded on a device, which takes tensors by their addresses."""
        check_device(self.target, device)
        return self._functions.setdefault(device, load_function(self._program, self.target, device))

    def _check_together(self, arguments: Mapping[str, Any]) -> None:
        tensors = {name: _tensor(value) for name, value in arguments.items()}
        devices = {name: tensor.get_device() for name, tensor in tensors.items() if tensor is not None}
        if len(set(devices.values())) > 1:
            listed = ", ".join(f"{name} on cuda:{device}" for name, device in devices.items())
            raise TargetError(f"{self.launch.name}: all tensors must be on one GPU, not {listed}")


def _tensor(value: Any) -> Tensor | None:
    """Returns the tensor of an argument that has one."""
    memory = value.address if isinstance(value, TensorMap) else value
    return memory if isinstance(memory, Tensor) else None


def _for_gpu(value: Any) -> Any:
    """Returns a checked argument as `Function` takes it."""
    if isinstance(value, TensorMap):
        return value.encode()
    return value.data_ptr() if isinstance(value, Tensor) else value


class EmulatedKernel(Kernel):
    """A kernel in the emulator, on CPU tensors."""

    def __init__(self, compiled: Compiled, racecheck: bool) -> None:
        from lowbit.pylib.emulator import Emulator

        super().__init__(compiled)
        self._racecheck = racecheck
        self._emulator = Emulator(compiled.ptx)
        # It passes from launch to launch, as on a GPU.
        self._workspace = np.zeros(self.launch.workspace_bytes, np.uint8)

    def start(self, *values: Any) -> None:
        names = (param.name for param in self.launch.arguments)
        arguments = dict(zip(names, map(_for_emulator, values), strict=True))
        self._emulator.run(self.launch, {WORKSPACE: self._workspace, **arguments}, racecheck=self._racecheck)


def _for_emulator(value: Any) -> Any:
    """Returns a checked argument as the emulator takes it: memory as an array of bytes."""
    if isinstance(value, TensorMap):
        return replace(value, address=memory_of(value.address))
    return memory_of(value) if isinstance(value, Tensor) else value
