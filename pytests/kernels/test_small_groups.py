"""Kernels for small groups: one token spread over the columns of a product, and factors computed once per step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import compile_matmul
from emulated import HOPPER, decodes_right, matmul_is_right, run_matmul

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.scales.step_scales import StepScales
from lowbit.passes.kernels.streaming.cost_model import blocks_per_sm
from lowbit.passes.kernels.streaming.legality import check_schedule
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.kernels.streaming.scaling import Scaling
from lowbit.passes.kernels.streaming.spread import SpreadScaling
from lowbit.passes.lowering import mma
from lowbit.pylib import reference

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
    "q3_k": MatmulSpec.preset("q3_k", n=40, k=768),
    "q2_k": MatmulSpec.preset("q2_k", n=40, k=768),
    "q8_0": MatmulSpec.preset("q8_0", n=40, k=768),
    "mxfp4": MatmulSpec.preset("mxfp4", n=40, k=768),
    "nvfp4": MatmulSpec.preset("nvfp4", n=40, k=768),
    "spqr": SPQR,
}


def is_right(spec: MatmulSpec, schedule: Schedule, m: int) -> bool:
    return decodes_right(spec, schedule, reference.random_inputs(spec, m))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_token(spec: MatmulSpec) -> None:
    """Groups of 16, 32 and 64, every kind of zeros, codes that are padded, and a second level."""
    assert is_right(spec, ONE, 1)


@pytest.mark.parametrize("name", ["float zeros", "int zeros", "offsets", "signed", "q2_k", "q3_k", "q6_k", "spqr"])
def test_one_token_in_bf16(name: str) -> None:
    """Offsets of codes differ between blocks of 16 columns, for codes of 2, 3 and 6 bits."""
    spec = replace(SPECS[name], act="bf16", out="f32")
    spec = replace(spec, scale="bf16") if spec.scale == "f16" and not spec.bilevel else spec
    assert KernelPlan(spec, ONE).arithmetic.defers_offset
    assert is_right(spec, replace(ONE, row_blocks=2), 1)


@pytest.mark.parametrize(
    "choices",
    [
        {"row_blocks": 2, "warps_n": 2, "warps_k": 1, "split_k": 2},
        {"num_stages": 1},
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
def test_scales_of_a_step(name: str, schedule: Schedule) -> None:
    assert KernelPlan(SPECS[name], schedule).arithmetic.step_scales
    assert is_right(SPECS[name], schedule, schedule.tokens - 1)


FORMATS = ("q4_k", "q6_k", "q3_k", "q2_k", "nvfp4")
SMALL = {name: replace(MatmulSpec.preset(name, n=136, k=512), out="f32") for name in FORMATS} | {
    "q4_k bf16": replace(MatmulSpec.preset("q4_k", n=136, k=512, act="bf16"), out="f32"),
    "u4 in 32": MatmulSpec(136, 512, "u4", 32, out="f32"),
    "spqr": replace(SPQR, n=136, k=512, outliers=False),
    "u3 float zeros": MatmulSpec(136, 512, "u3", 16, zeros="float", out="f32"),
    "u4 in 16": MatmulSpec(136, 512, "u4", 16, scale="bf16", act="bf16", out="f32"),
}


IN_PLACE = (
    Schedule(8, 2, 4, 1, 256, 2, wgmma=True),
    Schedule(16, 4, 4, 1, 256, 2, wgmma=True),
    Schedule(32, 2, 4, 2, 256, 2, wgmma=True, refill="after_first_mma"),
    Schedule(64, 2, 4, 1, 256, 2, 2, 2, wgmma=True, refill="per_warp"),
)
CASES = [("q4_k", s) for s in IN_PLACE] + [(name, IN_PLACE[i % 4]) for i, name in enumerate(SMALL) if i]


@pytest.mark.parametrize(("name", "schedule"), CASES, ids=lambda v: v if isinstance(v, str) else f"m{v.tokens}")
def test_sums_that_stay_in_place(name: str, schedule: Schedule) -> None:
    """Several blocks of rows to a warp, with every way to refill the stages, splits, and rows beyond the last."""
    assert KernelPlan(SMALL[name], schedule).arithmetic.sums_in_place
    assert is_right(SMALL[name], schedule, schedule.tokens - 1)


@pytest.mark.parametrize("name", ["q4_k", "q3_k", "q2_k", "spqr"])
@pytest.mark.parametrize(("tokens", "row_blocks"), [(16, 1), (64, 2)])
def test_registers_of_sums_in_place_are_about_as_expected(name: str, tokens: int, row_blocks: int) -> None:
    schedule = Schedule(tokens, row_blocks, 4, 1, 256, 2, wgmma=True)
    used = resource_usage(compile_matmul(SMALL[name], HOPPER, schedule).ptx, HOPPER)
    assert used.spill_stores == 0 and not used.serialized
    assert abs(KernelPlan(SMALL[name], schedule).engine.registers - used.registers) <= 16


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q8_0", "nvfp4", "spqr"])
def test_registers_of_one_token_are_about_as_expected(name: str) -> None:
    spec = replace(SPECS[name], n=8192, k=8192)
    for row_blocks in (1, 2):
        schedule = Schedule(1, row_blocks, 1, 8, 256, 2, spread_k=True)
        used = resource_usage(compile_matmul(spec, HOPPER, schedule).ptx, HOPPER)
        assert used.spill_stores == 0
        assert abs(KernelPlan(spec, schedule).engine.registers - used.registers) <= 20


def test_one_block_of_rows_keeps_its_loop() -> None:
    """Without scales of a step, few waits do with one block of rows; and many tokens leave no room for small waits."""
    for choices in ({"row_blocks": 1}, {"tokens": 128}):
        schedule = replace(Schedule(32, 2, 4, 1, 256, 2, wgmma=True), **choices)
        plan = KernelPlan(SMALL["u3 float zeros"], schedule)
        assert plan.scaling.rounds_scales and not plan.arithmetic.sums_in_place


@pytest.mark.parametrize("group", [16, 32])
def test_odd_numbers_of_groups(group: int) -> None:
    """Six and three groups to a step, which do not fill accesses or share out evenly among lanes."""
    spec = MatmulSpec(40, 192, "u8", group, scale="e4m3", out="f32")
    assert is_right(spec, Schedule(8, 1, 1, 1, 96, 2), 3)


def holds_over_all_scales(spec: MatmulSpec) -> bool:
    """Whether a matmul with the largest and least scales of e4m3 is right without a tolerance for rounding."""
    schedule = Schedule(16, 1, 4, 1, 128, 2, wgmma=True)
    assert KernelPlan(spec, schedule).scaling.rounds_scales
    x, tensors = reference.random_inputs(spec, 5)
    scales = torch.tensor([448.0, 2.0**-9, -448.0, 0.0, 1.875, -(2.0**-6)]).to(torch.float8_e4m3fn)
    count = tensors["scales"].numel()
    tensors["scales"] = scales.repeat(count)[:count].view(tensors["scales"].shape)
    return matmul_is_right(run_matmul(compile_matmul(spec, HOPPER, schedule), spec, (x, tensors)), spec, (x, tensors))


@pytest.mark.parametrize("act", ["f16", "bf16"])
@pytest.mark.parametrize("weight", ["f4e2m1", "f6e3m2", "f6e2m3", "u4"])
def test_products_with_scales_of_e4m3_are_exact(weight: str, act: Any) -> None:
    assert holds_over_all_scales(MatmulSpec(64, 256, weight, 16, scale="e4m3", act=act, out="f32"))


def test_registers_are_limited_so_that_the_blocks_asked_for_fit() -> None:
    """With eight warps and three blocks, a thread has 80 of an H200's registers; alone it would take more."""
    spec = replace(SPQR, n=11008, k=4096, outliers=False)
    schedule = Schedule(1, 2, 1, 8, 256, 2, max_blocks_per_sm=3, spread_k=True)
    assert blocks_per_sm(KernelPlan(spec, schedule), HOPPER) == 3
    assert ".minnctapersm 3" in compile_matmul(spec, HOPPER, schedule).ptx
    assert ".minnctapersm" not in compile_matmul(spec, HOPPER, replace(schedule, max_blocks_per_sm=0)).ptx


def test_mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are wrong with the scales of the next part, offsets in place of scales, the first rows' weights for the
    others, a power of two that scales have no room for, or x in all rows."""
    spec, load, numbers = SPECS["q4_k"], StepScales.load, SpreadScaling.of_part
    with monkeypatch.context() as patch:
        patch.setattr(SpreadScaling, "of_part", lambda self, name, part: numbers(self, name, 1 - part))
        assert not is_right(spec, ONE, 1)
    with monkeypatch.context() as patch:
        patch.setattr(StepScales, "load", lambda self, name, group: load(self, "offsets", group))
        assert not is_right(spec, Schedule(8, 1, 1, 1, 256, 2), 2)
    with monkeypatch.context() as patch:
        begin = Program.accumulate
        patch.setattr(Program, "accumulate", lambda *args, block, **others: begin(*args, block=0, **others))
        assert not is_right(SMALL["q4_k"], Schedule(16, 2, 4, 1, 256, 2, wgmma=True), 2)
    with monkeypatch.context() as patch:
        patch.setattr(Scaling, "scale_power", Scaling.exponent)
        assert not holds_over_all_scales(MatmulSpec(64, 256, "f4e2m1", 16, scale="e4m3", out="f32"))
    with monkeypatch.context() as patch:
        patch.setattr(mma._Rows, "kept", lambda self, pair, rows: pair)
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
