"""Kernels of a spec, compiled without the disk cache."""

from __future__ import annotations

from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.passes.scheduling.choice import fixed_schedule, schedule_for
from lowbit.passes.target import Target


def compile_matmul(
    spec: MatmulSpec, target: Target, schedule: KernelSchedule | None = None, tokens: int = 8, keep: bool = False
) -> CompiledKernel:
    """A kernel for up to `tokens` tokens (of TOKEN_TILES). Raises SpecError where the schedule does not fit."""
    return compile_kernel(request(spec, target, schedule or schedule_for(spec, tokens, target)), keep)


def compile_dequantize(spec: MatmulSpec, target: Target, keep: bool = False) -> CompiledKernel:
    """The kernel that writes W [n, k] in the act type."""
    return compile_kernel(request(spec, target, fixed_schedule("dequantize")), keep)


def compile_prepack(spec: MatmulSpec, target: Target, keep: bool = False) -> CompiledKernel:
    """The kernel that packs codes (i8 [n, k]) into the order of `dialect.formats.packing`."""
    return compile_kernel(request(spec, target, fixed_schedule("prepack")), keep)
