"""Matmuls of activations of 8 bits on every target.

Sums are compared to the last bit where all numbers are integers times powers of two that f32 holds, and in f32 within
the rounding of its additions elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eight_bit_problems import ADA, AMPERE, FITTING, HOPPER, Problem, exact, run_quantized, whole_problem
from torch import Tensor

import lowbit
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats import byte_codes
from lowbit.dialect.formats.byte_codes import COMPUTE, Compute
from lowbit.dialect.formats.dtypes import dtype
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.kernels.scales.block_scales import Scales
from lowbit.passes.kernels.streaming import arithmetic, scaling
from lowbit.passes.kernels.streaming.activations import SumsOfX
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.lowering import byte_numbers
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import agrees, matmul, multiplied, random_problem, tolerance
from lowbit.pylib.torch_types import TORCH


def spec_of(compute: Compute, weight: str, number: int) -> lowbit.MatmulSpec:
    """A small spec of a format: group sizes and zeros take turns."""
    bits = dtype(weight).bits
    group = (256 if bits in (3, 5, 6, 7) else 32, None, 256)[number % 3]
    zeros = "int" if weight[0] in "ui" and number % 2 else "none"
    return lowbit.MatmulSpec(40, 512, weight, group, zeros=zeros, compute=compute, out="f32")


@pytest.mark.parametrize(
    ("compute", "weight", "target"), [*((*each, HOPPER) for each in FITTING), *((*each, ADA) for each in FITTING[::3])]
)
def test_every_format_to_the_last_bit(compute: Compute, weight: str, target: str) -> None:
    spec = spec_of(compute, weight, FITTING.index((compute, weight)) + (target == ADA))
    problem = whole_problem(spec, m=5)
    x, x_scales, *weight_tensors = problem
    mm = lowbit.compile(spec, target)
    assert mm.kernel(5).schedule.wgmma is (target == HOPPER)
    assert torch.equal(mm(x, mm.pack(*weight_tensors), x_scale=x_scales), exact(spec, problem))


@pytest.mark.parametrize("target", ["cpu", AMPERE])
@pytest.mark.parametrize("weight", ["u4", "i3", "u8", "f8e4m3", "i4", "f6e2m3"])
def test_other_targets_to_the_last_bit(weight: str, target: str) -> None:
    compute: Compute = "i8" if target == AMPERE or weight == "u8" else "f8e4m3"
    if not byte_codes.fits(dtype(weight), compute):
        compute = "f8e4m3"
    spec = spec_of(compute, weight, 1 if weight[0] != "f" else 0)
    if target == AMPERE and compute == "f8e4m3":
        with pytest.raises(SpecError, match="compute='f8e4m3' needs sm_89 or later, the target is emulator:sm_80"):
            lowbit.compile(spec, target)
        return
    for m in (1, 5, 20):
        problem = whole_problem(spec, m)
        x, x_scales, *weight_tensors = problem
        mm = lowbit.compile(spec, target)
        assert torch.equal(mm(x, mm.pack(*weight_tensors), x_scale=x_scales), exact(spec, problem))


RANDOM = [
    lowbit.MatmulSpec(48, 512, "u4", 128, zeros="int", compute="f8e4m3", bias=True),
    lowbit.MatmulSpec(40, 384, "i4", compute="f8e4m3", act="bf16", out="f32"),
    lowbit.MatmulSpec(33, 512, "u8", 64, zeros="int", compute="i8", out="f32", scale="f32"),
    lowbit.MatmulSpec(16, 1024, "i2", None, compute="i8", bias=True, out="bf16"),
    lowbit.MatmulSpec(16, 256, "f4e2m1", 32, scale="e8m0", compute="f8e4m3", act="bf16"),
]


@pytest.mark.parametrize("target", ["cpu", HOPPER, ADA])
@pytest.mark.parametrize("spec", RANDOM, ids=str)
def test_numbers(spec: lowbit.MatmulSpec, target: str) -> None:
    """x as models have it, within the rounding of f32's additions: the emulator adds up f8e4m3 exactly."""
    mm = lowbit.compile(spec, target)
    for m in (1, 140) if target == "cpu" else (1, 9):
        x, *weight = random_problem(spec, m, seed=m)
        x[0, :3] = 0
        x[-1] = 0
        w, plain = mm.pack(*weight), replace(spec, compute=None)
        y = mm(x, w)
        assert y.shape == (m, spec.n) and y.dtype is TORCH[spec.out_dtype]
        seen = multiplied(spec, x)
        assert agrees(y, matmul(plain, seen, *weight), tolerance(plain, seen, *weight)).all()
        assert agrees(y, matmul(spec, x, *weight), tolerance(spec, x, *weight)).all()


@pytest.mark.parametrize("target", ["cpu", HOPPER])
def test_rows_that_are_no_numbers_stay_alone(target: str) -> None:
    spec = RANDOM[0]
    mm = lowbit.compile(spec, target)
    x, *weight = random_problem(spec, 4)
    x[1, 3], x[2, 5] = torch.nan, -torch.inf
    y = mm(x, mm.pack(*weight))
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


SCHEDULES = [
    EightBitSchedule(8, 1, 4, 2, 128, 2, wgmma=True, overlap_groups=True),
    EightBitSchedule(16, 2, 4, 1, 128, 3, wgmma=True),
    EightBitSchedule(32, 1, 4, 1, 128, 2, split_k=2, cluster=2, wgmma=True, refill="per_warp"),
    EightBitSchedule(128, 1, 4, 1, 128, 2, wgmma=True, refill="after_first_mma"),
    EightBitSchedule(8, 2, 2, 2, 64, 2),
    EightBitSchedule(16, 1, 1, 2, 256, 2, split_k=2),
]


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.tokens}-{s.row_blocks}x{s.warps_n}x{s.warps_k}")
def test_schedules_to_the_last_bit(schedule: EightBitSchedule, compute: Compute) -> None:
    """Also in random order of blocks, under the race check."""
    for group, zeros in ((64, "int"), (None, "none")):
        if group is None and schedule.overlap_groups:
            continue
        spec = lowbit.MatmulSpec(72, 704, "i4", group, zeros=zeros, compute=compute, out="f32")
        problem = whole_problem(spec, m=7)
        assert torch.equal(run(spec, schedule, problem), exact(spec, problem))


DIFFERENCES = [
    EightBitSchedule(16, 1, 4, 1, 256, 2, wgmma=True),
    EightBitSchedule(64, 2, 4, 1, 128, 2, wgmma=True),
    EightBitSchedule(32, 1, 2, 2, 128, 2),
]
OF_FORMATS: list[dict[str, Any]] = [
    {"weight": "u4", "group_size": 32, "zeros": "int"},  # groups of a step have zeros of their own
    {"weight": "i3", "group_size": 256, "zeros": "int"},
    {"weight": "u2", "zeros": "int"},  # rows have
    {"weight": "i4", "group_size": 64},
    {"weight": "i1"},
]


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("schedule", DIFFERENCES, ids=lambda s: f"{s.tokens}-{s.row_blocks}x{s.warps_n}x{s.warps_k}")
@pytest.mark.parametrize("fields", OF_FORMATS, ids=lambda fields: str(list(fields.values())))
def test_zeros_are_subtracted_from_codes_for_more_than_eight_tokens(
    fields: dict[str, Any], schedule: EightBitSchedule, compute: Compute
) -> None:
    spec = lowbit.MatmulSpec(72, 768, **fields, compute=compute, out="f32")
    if schedule.step_k % spec.packing.chunk:
        schedule = replace(schedule, step_k=spec.packing.chunk)
    assert not KernelPlan(spec, schedule).x.reads_sums
    problem = whole_problem(spec, m=schedule.tokens - 3)
    assert torch.equal(run(spec, schedule, problem), exact(spec, problem))


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({"weight": "u4", "zeros": "int", "compute": "f8e4m3"}, False),
        ({"weight": "u4", "zeros": "int", "compute": "f8e4m3", "invariant": True}, True),  # as for one token
        ({"weight": "u4", "zeros": "int", "compute": "i8", "invariant": True}, False),  # integers are exact
        ({"weight": "u8", "zeros": "int", "compute": "i8"}, True),  # differences are no bytes
        ({"weight": "u8", "compute": "i8"}, False),
    ],
    ids=str,
)
def test_which_sums_of_x_are_read(fields: dict[str, Any], reads: bool) -> None:
    """By tiles of many tokens; those of a few read them wherever something is to be made up for."""
    spec = lowbit.MatmulSpec(64, 512, **{"group_size": 128} | fields)
    few, many = (KernelPlan(spec, EightBitSchedule(tokens, 1, 4, 1, 128, 2)) for tokens in (8, 16))
    assert (few.x.reads_sums, many.x.reads_sums) == (spec.zeros == "int", reads)


def run(spec: lowbit.MatmulSpec, schedule: EightBitSchedule, problem: Problem) -> Tensor:
    return run_quantized(compile_kernel(request(spec, parse_target(HOPPER), schedule)), spec, problem)


def test_sums_of_fp8_are_promoted() -> None:
    """A product is of at most 128 columns, with one scale per row, too: tensor cores keep 13 bits of a sum."""
    spec = lowbit.MatmulSpec(64, 512, "u4", compute="f8e4m3")
    ptx = compile_kernel(request(spec, parse_target(HOPPER), EightBitSchedule(8, 1, 4, 1, 256, 2, wgmma=True))).ptx
    round_of_steps = ptx.count("k32.f32.e4m3.e4m3"), ptx.count("setp.ne.b32 add")
    assert round_of_steps == (8, 2)  # of eight instructions in 256 columns two begin from zero


# -- that these tests can fail


def no_sums(right: Any) -> Any:
    return lambda sums, start, columns, layout: sums.p.constant(0.0, "f32", layout)


def others(right: Any) -> Any:
    """Every register has the codes of the one beside it: rows g and g + 8 exchanged."""

    def places(t: Any, layout: Any) -> Any:
        found = right(t, layout)
        return [found[i ^ 1] for i in range(len(found))]

    return places


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "sums lost": (SumsOfX, "load", no_sums),
    "columns exchanged": (byte_numbers, "moves", lambda right: lambda t, c, of, signed: right(t, c, of[::-1], signed)),
    "power of two": (scaling, "byte_exponent", lambda right: lambda *of: right(*of) + 1),
    "offset": (arithmetic, "zero_code", lambda right: lambda t: right(t) + 1),
    "signs": (byte_numbers, "_HIGHEST", lambda right: 0x80800080),
    "rows exchanged": (byte_numbers, "places_of", others),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute: Compute = "f8e4m3" if what in ("power of two", "offset", "sums lost") else "i8"
    spec = lowbit.MatmulSpec(64, 256, "i4", 64, compute=compute, out="f32")
    problem, schedule = whole_problem(spec, 7), EightBitSchedule(8, 1, 4, 1, 128, 2, wgmma=True)
    assert torch.equal(run(spec, schedule, problem), exact(spec, problem))
    owner, name, wrap = MUTATIONS[what]
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    assert not torch.equal(run(spec, schedule, problem), exact(spec, problem))


def test_zeros_of_another_group_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, stored = lowbit.MatmulSpec(64, 256, "u4", 64, zeros="int", compute="i8", out="f32"), Scales.stored_zeros
    problem, schedule = whole_problem(spec, 7), DIFFERENCES[0]
    assert torch.equal(run(spec, schedule, problem), exact(spec, problem))
    monkeypatch.setattr(Scales, "stored_zeros", lambda scales: stored(scales)[::-1])
    assert not torch.equal(run(spec, schedule, problem), exact(spec, problem))
