"""The prefill kernel for activations of 8 bits with mma.sync: its numbers in the emulator, with the race check; what it
takes of a multiprocessor; and which matmuls it serves.

As in `test_eight_bit`, sums are compared to the last bit where f32 holds all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from eight_bit_problems import FITTING, Problem, exact, run_quantized, whole_problem
from sweeps import every_other
from torch import Tensor

import lowbit
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.formats.byte_codes import MOST_UNFOLDED, Compute
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.eight_bit_prefill import plan, weight_bytes
from lowbit.passes.kernels.eight_bit_prefill_mma.family import TOKEN_TILES, EightBitPrefillMma
from lowbit.passes.kernels.eight_bit_prefill_mma.schedule import EightBitPrefillMmaSchedule as Schedule
from lowbit.passes.kernels.persistent.copied_panels import CopiedPanels
from lowbit.passes.kernels.persistent.engine import BYTES_MMA
from lowbit.passes.kernels.registry import request
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.passes.target import Target
from lowbit.passes.targets import GPUS, parse_target
from lowbit.pylib.reference import agrees, matmul, multiplied, random_inputs, random_problem, tolerance

A100, L40S, HOPPER = (parse_target(name) for name in ("sm_80", "sm_89", "sm_90a"))
FAMILY = EightBitPrefillMma()
SMALL, NARROW = Schedule(32, num_stages=2), Schedule(32, num_stages=2, row_blocks=1)


def target_of(spec: MatmulSpec) -> Target:
    return L40S if spec.compute == "f8e4m3" else A100


def compiled(spec: MatmulSpec, schedule: Schedule, target: Target | None = None) -> CompiledKernel:
    return compile_kernel(request(spec, target or target_of(spec), schedule))


def run(spec: MatmulSpec, schedule: Schedule, problem: Problem, target: Target | None = None) -> Tensor:
    return run_quantized(compiled(spec, schedule, target), spec, problem)


def is_exact(spec: MatmulSpec, schedule: Schedule, m: int) -> bool:
    problem = whole_problem(spec, m)
    return torch.equal(run(spec, schedule, problem), exact(spec, problem))


# -- numbers


def spec_of(compute: Compute, weight: str, number: int) -> MatmulSpec:
    """A small spec of a format: group sizes and zeros take turns."""
    bits = dtype(weight).bits
    group = (256 if bits in (3, 5, 6, 7) else 32, None, 256)[number % 3]
    zeros = "int" if weight[0] in "ui" and number % 2 and bits < 8 else "none"
    return MatmulSpec(40, 512, weight, group, zeros=zeros, compute=compute, out="f32")


@pytest.mark.parametrize(("compute", "weight"), every_other(FITTING, 1))
def test_every_format_to_the_last_bit(compute: Compute, weight: str) -> None:
    number = FITTING.index((compute, weight)) // 2
    assert is_exact(spec_of(compute, weight, number), (SMALL, NARROW)[(number + number // 2) % 2], m=5)


FP8, I8 = {"compute": "f8e4m3"}, {"compute": "i8"}
CASES: list[tuple[dict[str, Any], Schedule, int]] = [
    # A tile after the other, rows and tokens that end inside of tiles, columns inside of a round.
    ({"weight": "u4", "n": 300, "k": 544, **I8}, SMALL, 70),
    ({"weight": "i4", "n": 200, "k": 608, "group_size": 32, **FP8}, Schedule(32, num_stages=4), 40),
    ({"weight": "u4", "n": 130, "k": 512, "group_size": 128, "zeros": "int", **FP8}, Schedule(64, num_stages=2), 100),
    ({"weight": "i4", "n": 128, "k": 512, "group_size": 128, **FP8}, Schedule(96, num_stages=2), 100),
    ({"weight": "i3", "n": 136, "k": 1024, "group_size": 512, "zeros": "int", **I8}, NARROW, 40),
    ({"weight": "i8", "n": 130, "k": 768, "group_size": 256, **I8}, Schedule(32, 256, 2), 40),
    ({"weight": "u8", "n": 128, "k": 768, "group_size": 192, **I8}, Schedule(96, num_stages=2, row_blocks=1), 20),
    ({"weight": "f8e4m3", "n": 128, "k": 1024, **FP8}, NARROW, 40),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m"), CASES, ids=str)
def test_small_sizes_to_the_last_bit(choices: dict[str, Any], schedule: Schedule, m: int) -> None:
    assert is_exact(MatmulSpec(**choices, out="f32"), schedule, m)


@pytest.mark.slow
@pytest.mark.parametrize("target", [A100, L40S], ids=str)
def test_what_is_chosen(target: Target) -> None:
    """A tile and a part of one."""
    large = MatmulSpec(8192, 8192, "u4", 128, compute="f8e4m3" if target.has_fp8 else "i8", out="f32")
    for schedule in FAMILY.candidates(large, 4096, target):
        assert is_exact(replace(large, n=272, k=512), schedule, schedule.tokens + 9)


@pytest.mark.parametrize(("name", "compute"), [("sm_80", "i8"), ("sm_89", "f8e4m3"), ("sm_120", "f8e4m3")])
def test_any_number_of_rows_by_one_kernel(name: str, compute: Compute) -> None:
    """As a user calls it: x is quantized, and one launch multiplies."""
    spec = MatmulSpec(128, 512, "u4", 128, zeros="int", compute=compute, bias=True)
    mm = lowbit.compile(spec, f"emulator:{name}")
    assert {mm.choices.launches(m)[0].family for m in (129, 300, 4096, 100000)} == {"eight_bit_prefill_mma"}
    assert len(mm.choices.launches(100000)) == 1 and mm.choices.launches(17)[0].family == "eight_bit"
    x, *of_weight = random_problem(spec, 150)
    y, w = mm(x.view(2, 75, 512), mm.pack(*of_weight)).view(150, 128), replace(spec, compute=None)
    seen = multiplied(spec, x)
    assert agrees(y, matmul(w, seen, *of_weight), tolerance(w, seen, *of_weight)).all()


def test_scales_of_rows_beside_those_of_groups() -> None:
    spec = MatmulSpec(136, 512, "f4e2m1", 32, scale="e4m3", row_scales=True, compute="f8e4m3", out="f32")
    mm = lowbit.compile(spec, "emulator:sm_89")
    x, tensors = random_inputs(spec, 133)
    seen, plain = multiplied(spec, x), replace(spec, compute=None)
    bound = tolerance(plain, seen, **tensors)
    assert agrees(mm(x, mm.pack(**tensors)), matmul(plain, seen, **tensors), bound).all()
    assert mm.choices.launches(133)[0].family == "eight_bit_prefill_mma"


def test_by_request_where_there_is_wgmma() -> None:
    """The other family is chosen there; this one runs, too."""
    spec = MatmulSpec(128, 512, "u4", 128, compute="f8e4m3", out="f32")
    assert FAMILY.token_tiles(spec, HOPPER) == ()
    problem = whole_problem(spec, 40)
    assert torch.equal(run(spec, SMALL, problem, HOPPER), exact(spec, problem))


# -- that these tests can fail


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "power of two": (weight_bytes, "byte_exponent", lambda right: lambda *of: right(*of) + 1),
    "offset": (plan, "zero_code", lambda right: lambda t: right(t) - 1),
    "scales": (weight_bytes.PlainBytes, "scale_of", lambda right: lambda self, some, held: None),
    "tokens": (
        CopiedPanels,
        "_copy_part",
        lambda right: lambda self, target, token, *rest: right(self, target, token * 0, *rest),
    ),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrap = MUTATIONS[what]
    spec = MatmulSpec(64, 512, "i4", 128, compute="f8e4m3", out="f32")
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    assert not is_exact(spec, Schedule(64, num_stages=2, row_blocks=1), 60)


def test_races_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the barrier of a panel, a warp would read x that another has not copied yet."""
    monkeypatch.setattr(Program, "barrier", lambda self, *rest, **others: None)
    with pytest.raises(EmulatorError, match=r"race|without a barrier"):
        is_exact(MatmulSpec(64, 512, "u4", 128, compute="i8", out="f32"), SMALL, 20)


# -- resources

VARIANTS: list[tuple[dict[str, Any], int]] = [
    ({"weight": "u4", **FP8}, 0),
    ({"weight": "u3", "group_size": 256, "zeros": "int", **FP8}, 0),
    ({"weight": "f8e4m3", "group_size": None, **FP8}, 0),
    ({"weight": "u5", "group_size": 256, "zeros": "int", **I8}, 0),
    ({"weight": "i8", **I8}, 32),
    ({"weight": "u8", "group_size": None, **I8}, 8),
    ({"weight": "i4", "group_size": 32, **I8}, 192),
]


@pytest.mark.parametrize(("choices", "most"), VARIANTS, ids=str)
def test_few_spills(choices: dict[str, Any], most: int) -> None:
    """Of the largest tiles that may be chosen. A block has all of a multiprocessor, and needs its registers."""
    fields: dict[str, Any] = {"group_size": 128} | choices
    spec = MatmulSpec(8192, 8192, **fields)
    target = target_of(spec)
    found = FAMILY.candidates(spec, 512, target)
    for schedule in (s for s in found if s.tokens == max(s.tokens for s in found)):
        kernel = compiled(spec, schedule)
        used = resource_usage(kernel.ptx, target)
        assert max(used.spill_stores, used.spill_loads) <= most, schedule
        assert used.registers * kernel.launch.threads <= 65536
        assert plan.bytes_plan(spec, schedule, BYTES_MMA).base.shared_bytes <= kernel.launch.shared_bytes
        assert kernel.launch.shared_bytes <= target.max_shared_per_block


# -- what it serves

SPEC = MatmulSpec(4096, 4096, "u4", 128, compute="i8")


@pytest.mark.parametrize("target", GPUS, ids=str)
def test_every_number_of_tokens_without_wgmma(target: Target) -> None:
    """From where the eight_bit kernels need several launches."""
    many = tuple(tile for tile in TOKEN_TILES if tile > MOST_UNFOLDED)
    assert FAMILY.token_tiles(SPEC, target) == (() if target.has_wgmma else many)
    assert FAMILY.token_tiles(replace(SPEC, compute=None), target) == ()


def test_larger_tiles_for_more_tokens() -> None:
    def best(m: int) -> int:
        return min(FAMILY.candidates(SPEC, m, A100), key=lambda s: FAMILY.predict(SPEC, m, s, A100)).tokens

    assert best(160) <= best(1024) <= best(8192) == 128


REFUSED: list[tuple[dict[str, Any], Schedule, str, str]] = [
    ({"zeros": "int", "weight": "u8"}, SMALL, "sm_80", "no bytes; take an EightBitSchedule"),
    ({"k": 6528, "group_size": 1088}, SMALL, "sm_80", "groups of 1088 and rounds of 256 columns must divide one"),
    ({"compute": None}, SMALL, "sm_80", "needs compute='f8e4m3' or 'i8'"),
    ({"compute": "f8e4m3"}, SMALL, "sm_80", "compute='f8e4m3' needs sm_89 or later"),
    ({}, Schedule(256, 256), "sm_89", "bytes of shared memory, sm_89 allows"),
]


@pytest.mark.parametrize(("change", "schedule", "target", "message"), REFUSED, ids=str)
def test_what_it_refuses(change: dict[str, Any], schedule: Schedule, target: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        request(replace(SPEC, **change), parse_target(target), schedule)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"panel_k": 64}, "panel_k=64 must be one of 128, 256 for EightBitPrefillMmaSchedule"),
        ({"tokens": 48}, "tokens=48 must be one of 32, 64, 96"),
        ({"num_stages": 8}, "num_stages=8 must be one of 2, 4"),
    ],
)
def test_a_wrong_schedule_names_the_field(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Schedule(**choices)
