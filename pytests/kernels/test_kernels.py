"""Kernels from spec to result: pack, compile, run the PTX in the emulator, compare with the definition in float64.

Sweeps: all codes of all formats; shapes, types and schedules such that every two choices meet in some case; zeros;
tables in shared memory; and, marked slow, random ones. Shapes are small, since the time of the emulator is the limit,
and few are multiples of anything. `test_hopper_kernels` has clusters and wgmma.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compiled import compile_dequantize, compile_matmul
from emulated import (
    dequantize_is_right,
    exhaustive_problem,
    matmul_is_right,
    run_dequantize,
    run_matmul,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    MOST_WORK,
    Case,
    as_asked,
    covering,
    for_integers,
    in_ci,
    is_allowed,
    share_of_pairs,
    spec_of,
    tokens_of,
    work_of,
)

import lowbit
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Schedule
from lowbit.passes.kernels.registry import family_of
from lowbit.passes.pipeline import lower_program
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import agrees, matmul, random_inputs, random_problem, tolerance
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune.trial import rounding

TARGETS = ("sm_80", "sm_90a")
WEIGHTS = (*all_names(), *(f"lut{bits}" for bits in range(1, 9)))


# -- all codes


@pytest.mark.parametrize("act", ["f16", "bf16"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_code(weight: str, act: str) -> None:
    """Results in f32, where a code that is off by one is far outside the tolerance.

    Each format is decoded on both targets, for one act each, since decoding is the same program on both.
    """
    chunk = spec_of(weight, 16, 16).packing.chunk
    spec = spec_of(weight, n=25, k=chunk + 32, group_size=None, act=act, out="f32")
    problem = exhaustive_problem(spec, m=5)
    schedule = Schedule(row_blocks=1, warps_k=2, step_k=chunk, num_stages=1)
    target = parse_target(TARGETS[(WEIGHTS.index(weight) + (act == "bf16")) % 2])
    y = run_matmul(compile_matmul(spec, target, schedule), spec, problem)
    assert matmul_is_right(y, spec, problem)
    w = run_dequantize(compile_dequantize(spec, target), spec, problem)
    assert dequantize_is_right(w, spec, problem)


# -- choices, pair by pair

FACTORS: dict[str, Sequence[Any]] = {
    "weight": ("u1", "u3", "u4", "u6", "u8", "i2", "i4", "i7", "f5e2m2", "f6e3m2", "f7e6m0", "f8e4m3", "nf4"),
    "group": (None, 16, 17, 32, 48, 100, 128, "k"),
    "length": (1, 2, 3),  # groups in k, or which k
    "n": (1, 16, 17, 40, 72),
    "zeros": ("none", "int", "float", "offset"),
    "scale": ("f16", "bf16", "f32", "e8m0", "e4m3"),
    "row_scales": (False, True),
    "act": ("f16", "bf16"),
    "out": (None, "f16", "bf16", "f32"),
    "bias": (False, True),
    "m": (1, 3, 8, 9, 16, 33, 64),
    "target": TARGETS,
    "row_blocks": (1, 2, 4),
    "warps_n": (1, 2, 4),
    "warps_k": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "split_k": (1, 2, 3),
    "step": (1, 2),  # chunks
    "raw_codes": (False, True),
}
K = {1: 16, 2: 250, 3: 264}  # without groups


def fit(choice: dict[str, Any]) -> dict[str, Any]:
    """The nearest choice that is a kernel."""
    c = for_integers(choice)
    spec = _spec(c)
    packing = spec.packing
    group = packing.padded_group
    if group is not None and (packing.chunk * c["step"]) % group and group % (packing.chunk * c["step"]):
        c["step"] = 1
    while work_of(_schedule(c)) > MOST_WORK and c["row_blocks"] * c["step"] > 1:
        c["step" if c["step"] > 1 else "row_blocks"] //= 2
    while not is_allowed(spec, _schedule(c), c["target"]):
        name = max(("num_stages", "warps_k", "warps_n"), key=lambda name: c[name])
        c[name] -= 1 if name == "num_stages" else c[name] // 2
    return c


def _spec(c: dict[str, Any]) -> MatmulSpec:
    group, length = c["group"], c["length"]
    k = K[length] if group in (None, "k") else group * length
    names = ("zeros", "scale", "act", "out", "bias", "row_scales")
    others = {name: c[name] for name in names if name in c}
    return spec_of(c["weight"], c["n"], k, group_size=k if group == "k" else group, **others)


def _schedule(c: dict[str, Any]) -> Schedule:
    names = ("row_blocks", "warps_n", "warps_k", "num_stages", "split_k", "raw_codes")
    spec = _spec(c)
    chosen = {name: c[name] for name in names if name in c}
    return as_asked(spec, Schedule(tokens=tokens_of(c["m"]), step_k=spec.packing.chunk * c["step"], **chosen))


CHOICES = covering(FACTORS, fit)
CASES = [Case(_spec(c), _schedule(c), c["target"], c["m"]) for c in CHOICES]
IN_CI = 72


def test_most_choices_meet_in_ci() -> None:
    assert share_of_pairs(CHOICES, IN_CI) > 0.95


@pytest.mark.parametrize("case", in_ci(CASES, IN_CI))
def test_choices(case: Case) -> None:
    spec, target = case.spec, parse_target(case.target)
    problem = random_inputs(spec, case.m, seed=1, finite=False)
    kernel = compile_matmul(spec, target, case.schedule)
    racecheck = case.schedule.threads <= 128 and len(kernel.ptx) < 60_000  # it is slow
    y = run_matmul(kernel, spec, problem, launches=2 if case.schedule.split_k > 1 else 1, racecheck=racecheck)
    assert matmul_is_right(y, spec, problem)


@pytest.mark.parametrize(("tokens", "turned"), [(1, False), (8, True), (16, True), (32, False)])
def test_blocks_begin_at_columns_of_their_own(tokens: int, turned: bool) -> None:
    """Where x is much and the weight still decides: or all blocks would read the same few lines at once."""
    spec, schedule = MatmulSpec(64, 512, "u4"), Schedule(tokens, 1, 1, 2, 64)
    program = lower_program(lambda: family_of(schedule).build(spec, schedule), parse_target("sm_80")).stages["lowbit"]
    assert ("arith.remui" in program) == turned


# -- integer zeros

ZEROS = [  # half of all, in which every pair of choices meets
    (weight, act, wgmma, group)
    for (a, weight), (b, act), wgmma, (c, group) in itertools.product(
        enumerate(("u1", "u2", "u3", "u4", "i4", "u5", "u8", "i8")),
        enumerate(("f16", "bf16")),
        (False, True),
        enumerate((32, 64, 128, None)),
    )
    if (a + b + wgmma + c) % 2 == 0
]


@pytest.mark.parametrize(("weight", "act", "wgmma", "group"), ZEROS)
def test_integer_zeros(weight: str, act: str, wgmma: bool, group: int | None) -> None:
    """Exactly: x are small integers, scales powers of two. Steps have several groups. In the first rows codes are all
    the least, and all the largest, with zeros of both, and with the largest zero that there can be."""
    chunk = spec_of(weight, 16, 16).packing.chunk
    step = max(chunk, 2 * (group or 0), 64)
    spec = spec_of(weight, n=25, k=step + (group or 32), group_size=group, zeros="int", act=act, out="f32")
    _, codes, _, zeros, _ = exhaustive_problem(spec, m=5)
    assert zeros is not None
    least, most = int(spec.dtype.values().min()), int(spec.dtype.values().max())
    zeros[:6] = torch.tensor([least, most, least + spec.zero_span]).repeat(2)[:, None]
    codes[:3], codes[3:6] = least, most
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (5, spec.k), generator=draw).to(TORCH[act])
    scales = torch.randint(-2, 3, (spec.n, spec.groups), generator=draw).float().exp2().to(TORCH[spec.scale])
    schedule = Schedule(row_blocks=1, warps_n=4 if wgmma else 1, warps_k=1, step_k=step, num_stages=2, wgmma=wgmma)
    y = run_matmul(compile_matmul(spec, parse_target("sm_90a"), schedule), spec, (x, codes, scales, zeros, None))
    assert (y.double().numpy() == matmul(spec, x, codes, scales, zeros)).all()


# -- tables in shared memory


@pytest.mark.parametrize(("weight", "warps"), [("lut1", 3), ("lut3", 1), ("nf4", 3), ("lut8", 5)])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_tables(weight: str, warps: int, num_stages: int) -> None:
    """Filled by threads that do not divide it, or of which some have nothing to do; one row of x."""
    chunk = spec_of(weight, 16, 16).packing.chunk
    spec = spec_of(weight, n=25, k=3 * chunk * warps, group_size=chunk, out="f32")
    problem = exhaustive_problem(spec, m=1)
    schedule = Schedule(tokens=1, row_blocks=1, warps_k=warps, step_k=chunk, num_stages=num_stages)
    kernel = compile_matmul(spec, parse_target("sm_90a"), schedule)
    assert matmul_is_right(run_matmul(kernel, spec, problem, racecheck=True), spec, problem)


# -- random choices


@pytest.mark.slow
@settings(max_examples=200)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FACTORS.items()}), st.integers(0, 99))
def test_random_choices(choice: dict[str, Any], seed: int) -> None:
    c = fit(choice)
    spec = _spec(c)
    problem = random_inputs(spec, c["m"], seed, finite=False)
    kernel = compile_matmul(spec, parse_target(c["target"]), _schedule(c))
    assert matmul_is_right(run_matmul(kernel, spec, problem, launches=2), spec, problem)


# -- the dequantize kernel

DEQUANTIZE = {name: FACTORS[name] for name in ("group", "length", "n", "zeros", "scale", "act", "row_scales")}
DEQUANTIZE |= {"weight": ("u1", "u4", "i6", "f6e3m2", "f7e6m0", "nf4")}
WEIGHT_CASES = [_spec(c) for c in covering(DEQUANTIZE, for_integers)]


@pytest.mark.parametrize("spec", WEIGHT_CASES, ids=lambda s: f"{s}".replace(" ", "-"))
def test_dequantize(spec: MatmulSpec) -> None:
    problem = random_inputs(spec, 1, seed=2, finite=False)
    racecheck = spec.n <= 17
    w = run_dequantize(compile_dequantize(spec, parse_target("sm_80")), spec, problem, racecheck=racecheck)
    assert dequantize_is_right(w, spec, problem)


# -- through the door


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("m", [0, 1, 7, 8, 9, 17, 64, 65, 130, 193, 385])
def test_number_of_tokens(m: int, target: str) -> None:
    """`compile` picks the kernel; above three of the widest tile dequantizes and multiplies."""
    spec = MatmulSpec(n=24, k=160, weight="u4", group_size=32, zeros="int", bias=True)
    x, *weight = problem = random_problem(spec, m, seed=3)
    mm = lowbit.compile(spec, f"emulator:{target}")
    y = mm(x, mm.pack(*weight))
    assert y.shape == (m, spec.n) and y.dtype == torch.float16
    bound = tolerance(spec, *problem, **rounding(mm, m))
    assert agrees(y, matmul(spec, *problem), bound).all()
