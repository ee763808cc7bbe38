"""Kernels for small groups: one token spread over the columns of a product, and factors computed once per step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from compiled import compile_matmul
from emulated import matmul_is_right, run_matmul

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.kernel import Kernel
from lowbit.passes.kernels.decode.legality import check_schedule, shared_bytes
from lowbit.passes.kernels.decode.plan import KernelPlan
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.decode.spread import _SpreadKernel
from lowbit.passes.kernels.decode.step_factors import StepFactors
from lowbit.passes.target import parse_target
from lowbit.pylib import reference

HOPPER = parse_target("sm_90a")
ONE = Schedule(1, 1, 1, 2, 256, 2, spread_k=True)
SPQR = replace(MatmulSpec.preset("spqr", n=40, k=768), permuted=False, out="f32")
SPECS = {
    "float zeros": MatmulSpec(40, 768, "u3", 16, zeros="float"),
    "int zeros": MatmulSpec(40, 768, "u4", 32, zeros="int", act="bf16"),
    "offsets": MatmulSpec(40, 768, "u2", 64, zeros="offset", out="f32"),
    "signed": MatmulSpec(40, 768, "i4", 64, bias=True),
    "table": MatmulSpec(40, 768, "nf4", 64, scale="f32"),
    "padded": MatmulSpec(40, 800, "u4", 50, zeros="float"),
    "q4_k": MatmulSpec.preset("q4_k", n=40, k=768),
    "q6_k": MatmulSpec.preset("q6_k", n=40, k=768),
    "nvfp4": MatmulSpec.preset("nvfp4", n=40, k=768),
    "spqr": SPQR,
}


def is_right(spec: MatmulSpec, schedule: Schedule, m: int) -> bool:
    check_schedule(spec, schedule, HOPPER)
    problem = reference.random_inputs(spec, m)
    kernel = compile_matmul(spec, HOPPER, schedule)
    assert kernel.launch.shared_bytes <= shared_bytes(spec, schedule)
    y = run_matmul(kernel, spec, problem, racecheck=True)
    return matmul_is_right(y, spec, problem, **KernelPlan(spec, schedule).rounding)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_token(spec: MatmulSpec) -> None:
    """Groups of 16, 32 and 64, every kind of zeros, codes that are padded, and a second level."""
    assert is_right(spec, ONE, 1)


@pytest.mark.parametrize(
    "choices",
    [
        {"row_blocks": 2, "warps_n": 2, "warps_k": 1, "split_k": 2},
        {"num_stages": 1, "raw_codes": True},
        {"split_k": 2, "cluster": 2},
    ],
    ids=str,
)
def test_one_token_split(choices: dict[str, Any]) -> None:
    assert is_right(SPECS["signed"], replace(ONE, **choices), 1)


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "nvfp4", "spqr"])
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(8, 2, 2, 1, 256, 2),
        Schedule(16, 1, 4, 1, 256, 2, wgmma=True),
        Schedule(16, 1, 4, 1, 256, 1, wgmma=True, preload_weights=True),
    ],
    ids=["sums", "weights", "preloaded"],
)
def test_factors_of_a_step(name: str, schedule: Schedule) -> None:
    assert KernelPlan(SPECS[name], schedule).step_factors
    assert is_right(SPECS[name], schedule, schedule.tokens - 1)


def test_mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are wrong with the scales of the next part, shifts in place of scales, or x in all rows."""
    spec, load, numbers = SPECS["q4_k"], StepFactors.load, _SpreadKernel._scale_or_zero
    with monkeypatch.context() as patch:
        patch.setattr(_SpreadKernel, "_scale_or_zero", lambda self, name, part: numbers(self, name, 1 - part))
        assert not is_right(spec, ONE, 1)
    with monkeypatch.context() as patch:
        patch.setattr(StepFactors, "load", lambda self, name, group: load(self, "shifts", group))
        assert not is_right(spec, Schedule(8, 1, 1, 1, 256, 2), 2)
    with monkeypatch.context() as patch:
        patch.setattr(_SpreadKernel, "_fragments_of_x", Kernel._fragments_of_x)
        assert not is_right(spec, ONE, 1)


@pytest.mark.parametrize(
    ("spec", "choices", "message"),
    [
        (SPECS["signed"], {"tokens": 8}, "spread_k=True needs tokens=8 to be 1"),
        (SPECS["signed"], {"step_k": 64}, "step_k=64 to be a multiple of 128"),
        (replace(SPECS["signed"], group_size=128), {}, "spread_k=True is for groups of 16, 32 and 64"),
        (replace(SPECS["signed"], group_size=None), {}, "spread_k=True is for groups of 16, 32 and 64"),
    ],
)
def test_schedules_that_do_not_fit(spec: MatmulSpec, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_schedule(spec, replace(ONE, **choices), HOPPER)
