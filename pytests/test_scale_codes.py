"""Codes of scales by the size of the second level: every pair, in all kinds of kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from compiled import compile_dequantize, compile_matmul
from emulated import Inputs, dequantize_is_right, matmul_is_right, run_dequantize, run_matmul

import lowbit
from lowbit.dialect.bilevel import SCALE_CODES, TABLE_CODE, Bilevel
from lowbit.dialect.presets import dynamic_table
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.prefill.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.pipeline import CompiledKernel
from lowbit.passes.target import parse_target
from lowbit.pylib.reference import random_inputs
from lowbit.pylib.weights.packed import pack

CODES = (*SCALE_CODES, "e4m3", TABLE_CODE)
SUPERS: tuple[dict[str, Any], ...] = (  # as SpQR, GGUF with 8 and 16 groups, and nested bitsandbytes have it
    {"rows": 16, "groups": 1},
    {"groups": 8},
    {"groups": 16},
    {"groups": 4, "scale": "f32"},
)
ROLES: tuple[dict[str, Any], ...] = (  # scales alone; zeros, with a zero point of codes; offsets, with an offset
    {"zeros": "none"},
    {"zeros": "float"},
    {"zeros": "offset"},
)
WEIGHTS = ("u3", "i6", "u4", "nf4", "u2")


def spec_of(i: int, code: str, super_: dict[str, Any], role: dict[str, Any], **others: Any) -> MatmulSpec:
    """The i-th spec of 16 groups to a row."""
    level = {"float": {"zeros": True}, "offset": {"offsets": True}}.get(role["zeros"], {})
    bilevel = Bilevel(**super_, **level, table=dynamic_table() if code == TABLE_CODE else None)
    fields = {"act": ("f16", "bf16")[i // 2 % 2], "out": "f32", **role, **others}
    return MatmulSpec(24, 512, WEIGHTS[i % 5], 32, scale=code, bilevel=bilevel, **fields)


def on_cpu(spec: MatmulSpec) -> None:
    x, tensors = random_inputs(spec, 20)
    mm, w = lowbit.compile(spec, "cpu"), pack(spec, **tensors)
    for m in (1, 20):
        assert matmul_is_right(mm(x[:m], w), spec, (x[:m], tensors), dequantized=spec.act == "bf16" and m > 4)


def in_emulator(kernel: CompiledKernel, spec: MatmulSpec, tokens: int) -> None:
    assert kernel.schedule
    inputs: Inputs = random_inputs(spec, tokens)
    y = run_matmul(kernel, spec, inputs)
    assert matmul_is_right(y, spec, inputs, **family_of(kernel.schedule).rounding(spec, kernel.schedule))


def chosen(target: str, tokens: int) -> Callable[[MatmulSpec], None]:
    """What is chosen for up to so many tokens."""
    return lambda spec: in_emulator(compile_matmul(spec, parse_target(target), None, tokens), spec, min(tokens, 9))


def with_schedule(target: str, schedule: Any) -> Callable[[MatmulSpec], None]:
    return lambda spec: in_emulator(compile_matmul(spec, parse_target(target), schedule), spec, 9)


def dequantize(spec: MatmulSpec) -> None:
    inputs: Inputs = random_inputs(spec, 1)
    w = run_dequantize(compile_dequantize(spec, parse_target("sm_80")), spec, inputs)
    assert dequantize_is_right(w, spec, inputs)


KERNELS: dict[str, Callable[[MatmulSpec], None]] = {
    "cpu": on_cpu,
    "one token": chosen("sm_90a", 1),
    "8 tokens": chosen("sm_80", 8),
    "64 tokens, wgmma": chosen("sm_90a", 64),
    "prefill": with_schedule("sm_90a", PrefillSchedule(16)),
    "prefill_mma": with_schedule("sm_80", PrefillMmaSchedule(32, num_stages=2, row_blocks=1)),
    "dequantize": dequantize,
}
PAIRS = list(enumerate(product(CODES, SUPERS)))


@pytest.mark.parametrize(("part", "kernel"), list(enumerate(KERNELS)))
def test_every_pair(part: int, kernel: str) -> None:
    """Each in one kind of kernel, the pairs of a code in four kinds."""
    for i, (code, super_) in PAIRS[part :: len(KERNELS)]:
        KERNELS[kernel](spec_of(i, code, super_, ROLES[i % 3]))


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pair_in_every_kernel(kernel: str, code: str) -> None:
    """With all roles, and with outliers in half of all cases."""
    for i, (super_, role) in enumerate(product(SUPERS, ROLES)):
        KERNELS[kernel](spec_of(i, code, super_, role, outliers=(i + i // 3) % 2 == 0))
