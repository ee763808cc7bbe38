"""A weight in every kind of kernel: on the CPU, and in the emulator in each family of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from compiled import compile_dequantize, compile_matmul
from emulated import Inputs, dequantize_is_right, matmul_is_right, run_dequantize, run_matmul

import lowbit
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill_in_order.schedule import PrefillInOrderSchedule
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.kernels.prefill_mma_in_order.schedule import PrefillMmaInOrderSchedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.pipeline import CompiledKernel
from lowbit.passes.targets import parse_target
from lowbit.pylib.weights.packed import pack

TOKENS = 20  # of the inputs; those of fewer tokens take the first
Check = Callable[[MatmulSpec, Inputs], bool]
"""Tells whether the result is that of the definition."""


def _on_cpu(spec: MatmulSpec, inputs: Inputs) -> bool:
    x, tensors = inputs
    mm, w = lowbit.compile(spec, "cpu"), pack(spec, **tensors)
    return all(
        matmul_is_right(mm(x[:m], w), spec, (x[:m], tensors), dequantized=spec.act == "bf16" and m > 4)
        for m in (1, TOKENS)
    )


def _in_emulator(kernel: CompiledKernel, spec: MatmulSpec, inputs: Inputs, tokens: int) -> bool:
    assert kernel.schedule
    some = inputs[0][:tokens], inputs[1]
    rounding = family_of(kernel.schedule).rounding(spec, kernel.schedule)
    return matmul_is_right(run_matmul(kernel, spec, some), spec, some, **rounding)


def _chosen(target: str, tokens: int) -> Check:
    """What is chosen for up to so many tokens."""

    def check(spec: MatmulSpec, inputs: Inputs) -> bool:
        kernel = compile_matmul(spec, parse_target(target), None, tokens)
        return _in_emulator(kernel, spec, inputs, min(tokens, 9))

    return check


def _scheduled(target: str, schedule: Any) -> Check:
    return lambda spec, inputs: _in_emulator(compile_matmul(spec, parse_target(target), schedule), spec, inputs, 9)


def _in_order(target: str, schedule: PrefillInOrderSchedule | PrefillMmaInOrderSchedule) -> Check:
    """Of the invariant matmul, where it has such a kernel; else a kernel for few tokens."""

    def check(spec: MatmulSpec, inputs: Inputs) -> bool:
        invariant = replace(spec, invariant=True)
        fits = family_of(schedule).allows(invariant, schedule, parse_target(target))
        kernel = compile_matmul(invariant, parse_target(target), schedule if fits else None, 16)
        return _in_emulator(kernel, invariant, inputs, 9)

    return check


def _dequantize(spec: MatmulSpec, inputs: Inputs) -> bool:
    kernel = compile_dequantize(spec, parse_target("sm_80"))
    return dequantize_is_right(run_dequantize(kernel, spec, inputs), spec, inputs)


KERNELS: dict[str, Check] = {
    "cpu": _on_cpu,
    "one token": _chosen("sm_90a", 1),
    "8 tokens": _chosen("sm_80", 8),
    "64 tokens, wgmma": _chosen("sm_90a", 64),
    "prefill": _scheduled("sm_90a", PrefillSchedule(16)),
    "prefill_in_order": _in_order("sm_90a", PrefillInOrderSchedule(16, parts=1)),
    "prefill_mma": _scheduled("sm_80", PrefillMmaSchedule(32, num_stages=2, row_blocks=1)),
    "prefill_mma_in_order": _in_order("sm_80", PrefillMmaInOrderSchedule(32, row_blocks=1)),
    "dequantize": _dequantize,
}
