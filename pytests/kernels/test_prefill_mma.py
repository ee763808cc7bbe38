"""The prefill kernel with mma.sync: persistent blocks in the emulator, with its race check; what it takes of a
multiprocessor; and for which rows it is chosen.

The emulated GPU has four multiprocessors, so that a few tiles are enough for blocks to go from one to the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import exhaustive_problem, is_right, matmul_is_right, run_matmul
from tables import table

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.presets import preset_fields
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.persistent.engine import MMA
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.prefill_mma import cost_model
from lowbit.passes.kernels.prefill_mma.family import TOKEN_TILES, PrefillMma
from lowbit.passes.kernels.prefill_mma.legality import check_schedule
from lowbit.passes.kernels.prefill_mma.schedule import PrefillMmaSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.passes.target import Target
from lowbit.passes.targets import GPUS, parse_target
from lowbit.pylib.build.choices import find_rows, rows_of_any_tokens
from lowbit.pylib.reference import random_problem

A100, L40S = parse_target("sm_80"), parse_target("sm_89")
FAMILY = PrefillMma()
SMALL, NARROW = PrefillMmaSchedule(32, num_stages=2), PrefillMmaSchedule(32, num_stages=2, row_blocks=1)


def spec_of(weight: str, n: int, k: int, **choices: Any) -> MatmulSpec:
    """A spec; lut<b> gets a table."""
    return MatmulSpec(n, k, weight, table=table(int(weight[3:])) if weight.startswith("lut") else None, **choices)


def compiled(spec: MatmulSpec, schedule: PrefillMmaSchedule, target: Target = A100) -> CompiledKernel:
    return compile_kernel(request(spec, target, schedule))


# -- numbers

KINDS = ["u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8", "i4", "f4e2m1", "f6e3m2", "f8e4m3", "nf4", "lut3", "lut8"]


@pytest.mark.parametrize("weight", KINDS)
def test_every_code(weight: str) -> None:
    """One scale per row, and results in f32, where a code that is off by one is far outside the tolerance."""
    spec = spec_of(weight, n=21, k=16)
    spec = replace(spec, k=spec.packing.chunk + 24, out="f32")
    problem = exhaustive_problem(spec, m=5)
    assert matmul_is_right(run_matmul(compiled(spec, SMALL), spec, problem), spec, problem)


CASES: list[tuple[dict[str, Any], PrefillMmaSchedule, int]] = [
    # A tile after the other, rows and tokens that end inside of tiles, columns inside of a round.
    ({"weight": "u4", "n": 300, "k": 264, "group_size": None}, SMALL, 70),
    ({"weight": "u4", "n": 300, "k": 264, "group_size": None}, NARROW, 70),
    ({"weight": "u4", "n": 130, "k": 512, "group_size": 128, "zeros": "int", "bias": True}, PrefillMmaSchedule(64), 100),  # noqa: E501
    ({"weight": "i4", "n": 128, "k": 768, "group_size": 768, "zeros": "float", "act": "bf16", "scale": "bf16"}, SMALL, 9),  # noqa: E501
    ({"weight": "u3", "n": 136, "k": 1024, "group_size": 64, "out": "f32"}, SMALL, 40),
    ({"weight": "i5", "n": 100, "k": 1024, "group_size": 16}, NARROW, 20),
    ({"weight": "u8", "n": 129, "k": 384, "group_size": 192}, SMALL, 40),
    ({"weight": "f4e2m1", "n": 128, "k": 512, "group_size": 32, "scale": "e4m3"}, PrefillMmaSchedule(32, 128, 2), 40),
    ({"weight": "nf4", "n": 128, "k": 256, "group_size": 64, "zeros": "float"}, SMALL, 40),
    ({"weight": "f6e3m2", "n": 128, "k": 512, "group_size": 512, "scale": "e8m0", "act": "bf16"}, SMALL, 20),
    # Scales in f32 and of rows, offsets, codes beyond f16, groups that no round divides, less columns than a round.
    ({"weight": "f7e6m0", "n": 40, "k": 512, "group_size": 64, "scale": "f32"}, SMALL, 20),
    ({"weight": "f4e2m1", "n": 40, "k": 256, "group_size": 16, "scale": "e4m3", "row_scales": True}, SMALL, 20),
    ({"weight": "u4", "n": 40, "k": 3520, "group_size": 704, "zeros": "offset"}, SMALL, 20),
    ({"weight": "u8", "n": 20, "k": 16, "group_size": None, "zeros": "float"}, SMALL, 5),
    # A single round of as many columns as there are, and tokens that end with a tile: x ends there.
    ({"weight": "u4", "n": 300, "k": 128, "group_size": 64}, SMALL, 64),
    # Scales and zeros by way of shared memory, in a tile after the other; outliers.
    ({"weight": "u3", "n": 300, "k": 528, "group_size": 16, "zeros": "float", "scale": "u3",
      "bilevel": Bilevel(16, 1, "f16", True)}, SMALL, 70),
    ({"weight": "u4", "n": 300, "k": 512, "group_size": 16, "zeros": "offset", "outliers": True}, NARROW, 40),
    ({"n": 300, "k": 512, **preset_fields("nf4_nested", 512), "act": "bf16"}, SMALL, 70),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m"), CASES, ids=str)
def test_small_sizes(choices: dict[str, Any], schedule: PrefillMmaSchedule, m: int) -> None:
    spec = MatmulSpec(**choices)
    assert is_right(spec, schedule, m, A100)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [*all_names(), "lut3", "lut8"])
def test_what_is_chosen(weight: str) -> None:
    """A tile and a part of one, of every format."""
    spec = spec_of(weight, 272, 1024, group_size=128)
    for tokens in FAMILY.token_tiles(spec, A100):
        schedule = min(FAMILY.candidates(spec, tokens, A100), key=lambda s: FAMILY.predict(spec, tokens, s, A100))
        problem = random_problem(spec, schedule.tokens + 9)
        y = run_matmul(compiled(spec, schedule), spec, problem)
        assert matmul_is_right(y, spec, problem, **FAMILY.rounding(spec, schedule))


def test_any_number_of_rows_by_one_kernel() -> None:
    mm = lowbit.compile(MatmulSpec(128, 512, "u4", group_size=128), "emulator:sm_80")
    assert {mm.choices.launches(m)[0].family for m in (129, 300)} == {"prefill_mma"}
    x, *weight = random_problem(mm.spec, 150)
    w, rounding = mm.pack(*weight), FAMILY.rounding(mm.spec, SMALL)
    y = mm(x.view(2, 75, 512), w)
    assert matmul_is_right(y.view(150, 128), mm.spec, (x, *weight), **rounding)
    assert mm(torch.empty(0, 512, dtype=torch.float16), w).shape == (0, 128)


# -- resources

VARIANTS: list[dict[str, Any]] = [
    {"weight": "u4"},
    {"weight": "u4", "act": "bf16", "scale": "bf16", "zeros": "float"},
    {"weight": "u7", "group_size": 32, "zeros": "int"},
    {"weight": "u8", "group_size": None},
    {"weight": "nf4", "group_size": 64},
]


@pytest.mark.parametrize("target", [A100, L40S], ids=str)
@pytest.mark.parametrize("choices", VARIANTS, ids=str)
def test_few_spills(choices: dict[str, Any], target: Target) -> None:
    """Of the largest tile that may be chosen. A block has all of a multiprocessor, and needs its registers. Of 255 the
    assembler may spill a few: on an H200 a tile of 256 tokens that spills seven is the fastest of all."""
    spec = MatmulSpec(8192, 8192, **({"group_size": 128} | choices))
    schedule = max(FAMILY.candidates(spec, 512, target), key=lambda s: s.tokens * s.row_blocks)
    kernel = compiled(spec, schedule, target)
    used = resource_usage(kernel.ptx, target)
    assert max(used.spill_stores, used.spill_loads) <= 32, schedule
    assert used.registers * kernel.launch.threads <= 65536
    needed = PersistentPlan(spec, schedule, MMA).shared_bytes
    assert needed <= kernel.launch.shared_bytes <= target.max_shared_per_block


@pytest.mark.slow
@pytest.mark.parametrize("target", [A100, L40S], ids=str)
@pytest.mark.parametrize("weight", [*all_names(), "lut3", "lut8"])
def test_few_spills_of_any_format(weight: str, target: Target) -> None:
    for choices in ({"group_size": None}, {"group_size": 128}, {"group_size": 32, "act": "bf16", "scale": "bf16"}):
        spec = spec_of(weight, 8192, 8192, **choices)
        for schedule in FAMILY.candidates(spec, 512, target):
            used = resource_usage(compiled(spec, schedule, target).ptx, target)
            assert max(used.spill_stores, used.spill_loads) <= 48, (spec, schedule)


# -- what it is for

SPEC = MatmulSpec(4096, 4096, "u4", group_size=128)


@pytest.mark.parametrize(
    ("change", "schedule", "target", "message"),
    [
        ({}, SMALL, "sm_90a", "prefill_mma is for targets without wgmma, sm_90a has it; take a Schedule of the decode"),
        ({"k": 1020, "group_size": 17 * 60}, SMALL, "sm_80", "whole 16-byte pieces"),
        ({"outliers": True}, SMALL, "sm_80", "outliers are found by warps of one row block; .* needs row_blocks=1"),
        ({}, PrefillMmaSchedule(256), "sm_89", "bytes of shared memory, sm_89 allows"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], schedule: PrefillMmaSchedule, target: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_schedule(replace(SPEC, **change), schedule, parse_target(target))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tokens": 48}, "tokens=48 must be one of 32, 64, 96"),
        ({"cluster": 2}, "cluster=2 must be one of 1 for PrefillMmaSchedule"),
        ({"row_blocks": 4}, "row_blocks=4 must be one of 1, 2"),
    ],
)
def test_a_wrong_schedule_names_the_field(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PrefillMmaSchedule(**choices)


@pytest.mark.parametrize("target", GPUS, ids=str)
def test_up_to_where_it_is_predicted_to_win(target: Target) -> None:
    """Not where there is wgmma, nor where the vendor's matmul has instructions that are several times as fast."""
    tiles = FAMILY.token_tiles(SPEC, target)
    assert tiles == TOKEN_TILES[: len(tiles)]
    if target.has_wgmma or target.name in ("sm_100", "sm_103"):
        assert not tiles
    elif not target.has_clusters:
        assert len(tiles) >= 4
        best = min(FAMILY.predict(SPEC, tiles[-1], s, target) for s in FAMILY.candidates(SPEC, tiles[-1], target))
        assert best < 1.1 * cost_model.predict_vendor(SPEC, tiles[-1], target)


def test_rows() -> None:
    """Up to 128 rows by launches of the decode kernels, then by one launch."""
    rows = rows_of_any_tokens((1, 8, 16, 32, 64, 160, 256), (160, 256), 128, most=256)
    found = {m: find_rows(rows, m).token_tiles for m in (64, 65, 100, 128, 129, 161, 256, 257)}
    assert found == {
        64: (64,),
        65: (64, 1),
        100: (64, 64),
        128: (64, 64),
        129: (160,),
        161: (256,),
        256: (256,),
        257: (),
    }


def test_weights_of_a_wide_range_are_not_rounded() -> None:
    """Kernels that scale sums serve any number of rows then (`pylib.weights.value_range`)."""
    from lowbit.pylib.build.kernels import Artifacts

    assert Artifacts(SPEC, A100, None, late_scaling=True).token_tiles(300) == [64] * 5
