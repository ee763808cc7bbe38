"""Kernels of lowbit's own tile programs, those around matmuls: from the disk cache, or compiled; and the tensors that
they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit.pylib.build import cache, knobs
from lowbit.pylib.build import driver as build
from lowbit.pylib.runtime.driver import allocate
from lowbit.pylib.runtime.interface import unwritten
from lowbit.pylib.runtime.kernel import Kernel, gpu_target, load
from lowbit.pylib.weights.tensor_checks import ALIGNMENT

if TYPE_CHECKING:
    from lowbit.dialect.types import Element
    from lowbit.passes.builder import Program
    from lowbit.passes.launch import Launch
    from lowbit.passes.target import Target


def own_kernel(program: partial[Program], target: str) -> Kernel:
    """Returns the kernel of a tile program, which starts while the kernel in front of it is still running.

    program   a function of `passes.kernels` and its arguments, which say all that the program depends on
    target    a GPU, or an emulator of one
    """
    on = gpu_target(target)
    name = f"{program.func.__module__}.{program.func.__qualname__}"  # type: ignore[attr-defined]
    key = cache.key(program=name, arguments=program.args, target=on, lines=knobs.line_info())
    found = cache.load_or_build(key, lambda: _build(program, on).to_files(), build.Program.from_files)
    return load(_Kept(found, on), overlap=True, racecheck=False)


def _build(program: partial[Program], target: Target) -> build.Program:
    from lowbit.passes.pipeline import lower_program  # which loads MLIR and LLVM

    compiled = lower_program(program, target, lines=knobs.line_info())
    return build.Program(compiled.launch, compiled.ptx, compiled.cubin() if target.kind == "cuda" else None)


@dataclass(frozen=True)
class _Kept:
    """A kernel of the disk cache as `load` takes one that was compiled now."""

    program: build.Program
    target: Target

    @property
    def launch(self) -> Launch:
        return self.program.launch

    @property
    def ptx(self) -> str:
        return self.program.ptx

    @property
    def stages(self) -> dict[str, str]:
        return {"ptx": self.ptx}

    @property
    def elements(self) -> dict[str, tuple[Element, ...]]:
        return {}

    def cubin(self) -> bytes:
        return self.program.cubin or b""


def aligned(tensor: Tensor) -> Tensor:
    """Returns a tensor as kernels read it: contiguous, at a multiple of 16 bytes, which slices may not be."""
    if tensor.is_contiguous():  # which takes a fifth of the time of `contiguous`
        return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def unwritten_like(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns memory for a result of a kernel, in the type of `like` or in another, on the current device if `like` is
    on a GPU."""
    kind = dtype or like.dtype
    if not like.is_cuda:
        return unwritten(shape, kind)
    return allocate(tuple(shape), _strides(shape), kind)  # it takes no torch.Size


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
