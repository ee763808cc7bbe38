"""The prefill kernel: persistent blocks in the emulator, with its race check; what it takes of a multiprocessor; and
which matmuls it is for.

The emulated GPU has four multiprocessors, so that a few tiles are enough for blocks to go from one to the next.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated import HOPPER, exhaustive_problem, is_right, matmul_is_right, run_matmul
from tables import table

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import SpecError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.formats.recipes import compute_element
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.codegen.cubin import resource_usage
from lowbit.passes.kernels.persistent.engine import WGMMA
from lowbit.passes.kernels.persistent.group_columns import groups_of_panel
from lowbit.passes.kernels.persistent.plan import PersistentPlan
from lowbit.passes.kernels.persistent.schedule import PrefillSchedule
from lowbit.passes.kernels.prefill.family import Prefill
from lowbit.passes.kernels.prefill.legality import check_schedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.pipeline import CompiledKernel, compile_kernel
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import random_problem

PREFILL = Prefill()
SMALL = PrefillSchedule(16)


def spec_of(weight: str, n: int, k: int, **choices: Any) -> MatmulSpec:
    """A spec; lut<b> gets a table."""
    return MatmulSpec(n, k, weight, table=table(int(weight[3:])) if weight.startswith("lut") else None, **choices)


def compiled(spec: MatmulSpec, schedule: PrefillSchedule) -> CompiledKernel:
    return compile_kernel(request(spec, HOPPER, schedule))


# -- numbers


EVERY = [*all_names(), "lut3", "lut8"]
WITHIN_F16 = [name for name in EVERY if compute_element(spec_of(name, 16, 1024).dtype, "f16") == "f16"]


@pytest.mark.parametrize("weight", WITHIN_F16)
def test_every_code(weight: str) -> None:
    """One scale per row, and results in f32, where a code that is off by one is far outside the tolerance."""
    spec = spec_of(weight, n=21, k=16)
    spec = replace(spec, k=spec.packing.chunk + PersistentPlan(spec, SMALL, WGMMA).round.step, out="f32")
    problem = exhaustive_problem(spec, m=5)
    y = run_matmul(compiled(spec, SMALL), spec, problem)
    assert matmul_is_right(y, spec, problem)


CASES: list[tuple[dict[str, Any], PrefillSchedule, int]] = [
    # A tile after the other, rows and tokens that end inside of tiles, columns inside of a round.
    ({"weight": "u4", "n": 300, "k": 264, "group_size": None}, SMALL, 70),
    ({"weight": "i4", "n": 200, "k": 584, "group_size": None}, PrefillSchedule(16, num_stages=8), 20),
    ({"weight": "u4", "n": 130, "k": 512, "group_size": 128, "zeros": "int", "bias": True}, SMALL, 40),
    ({"weight": "i4", "n": 128, "k": 768, "group_size": 768, "zeros": "float", "act": "bf16", "scale": "bf16"}, SMALL, 9),  # noqa: E501
    ({"weight": "u4", "n": 128, "k": 512, "group_size": None, "zeros": "int"}, SMALL, 20),
    ({"weight": "u3", "n": 128, "k": 1024, "group_size": 64, "out": "f32"}, SMALL, 20),
    ({"weight": "i5", "n": 100, "k": 1024, "group_size": 16}, SMALL, 20),
    ({"weight": "u8", "n": 129, "k": 1152, "group_size": 192}, SMALL, 20),
    ({"weight": "f6e3m2", "n": 136, "k": 512, "group_size": 128}, PrefillSchedule(32), 40),
    ({"weight": "f4e2m1", "n": 128, "k": 512, "group_size": 32, "scale": "e4m3"}, SMALL, 20),
    ({"weight": "nf4", "n": 128, "k": 512, "group_size": 64, "zeros": "float"}, SMALL, 20),
    ({"weight": "f6e3m2", "n": 128, "k": 1024, "group_size": 512, "scale": "e8m0", "act": "bf16"}, SMALL, 20),
    # Wide panels, and clusters, of which one block may be beyond the last row.
    ({"weight": "u4", "n": 128, "k": 1024, "group_size": 64}, PrefillSchedule(16, panel_k=128), 40),
    ({"weight": "u4", "n": 300, "k": 512, "group_size": 128}, PrefillSchedule(32, cluster=2), 70),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "schedule", "m"), CASES, ids=str)
def test_small_sizes(choices: dict[str, Any], schedule: PrefillSchedule, m: int) -> None:
    spec = MatmulSpec(**choices)
    assert is_right(spec, schedule, m)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PREFILL.candidates(MatmulSpec(8192, 8192, "u4", 128), 4096, HOPPER), ids=str)
def test_what_is_chosen(schedule: PrefillSchedule) -> None:
    spec = MatmulSpec(272, 2 * PersistentPlan(MatmulSpec(8192, 8192, "u4", 128), schedule, WGMMA).round.step, "u4", 128)
    assert is_right(spec, schedule, schedule.tokens + 9, racecheck=False)


def test_any_number_of_rows_by_one_kernel() -> None:
    """The runtime makes a tensor map for every call; no rows need none."""
    mm = lowbit.compile(MatmulSpec(128, 512, "u4", group_size=128), "emulator:sm_90a")
    assert {mm.choices.launches(m)[0].family for m in (257, 300, 4096)} == {"prefill"}
    x, *weight = random_problem(mm.spec, 300)
    w, rounding = mm.pack(*weight), PREFILL.rounding(mm.spec, SMALL)
    y = mm(x.view(2, 150, 512), w)
    assert matmul_is_right(y.view(300, 128), mm.spec, (x, *weight), **rounding)
    assert mm(torch.empty(0, 512, dtype=torch.float16), w).shape == (0, 128)


# -- parts


@pytest.mark.parametrize("group", [16, 32, 64, 96, 128, 192, 256, 1024])
@pytest.mark.parametrize(("weight", "panel_k"), [("u4", 64), ("u8", 64), ("u8", 128)])
def test_groups_of_panels(weight: str, panel_k: int, group: int) -> None:
    """They cover every column of a round once, in order, and a part is of one group."""
    spec = MatmulSpec(128, 3072, weight, group_size=group)
    plan, group = PersistentPlan(spec, PrefillSchedule(16, panel_k), WGMMA), spec.packing.padded_group or 0
    panels = range(plan.round.panels)
    parts = [(panel * panel_k + part.start, part) for panel in panels for part in groups_of_panel(plan, panel)]
    assert [start for start, _ in parts] == [sum(part.width for _, part in parts[:i]) for i in range(len(parts))]
    assert sum(part.width for _, part in parts) == plan.round.step
    size = min(group, plan.round.step)
    assert all(part.group == start // size == (start + part.width - 1) // size for start, part in parts)


@pytest.mark.parametrize(("group", "columns"), [(16, 16), (64, 64), (192, 192), (704, 64), (1024, 256)])
def test_scales_of_rounds(group: int, columns: int) -> None:
    """Every number of a round is replaced once, after the last panel that needs it."""
    plan = PersistentPlan(MatmulSpec(128, 33792, "u4", group_size=group), SMALL, WGMMA)
    scales, width = plan.tensors.every["scales"], SMALL.panel_k
    assert (scales.columns, scales.count * scales.columns) == (columns, plan.round.step)
    assert scales.columns * scales.repeat == group
    ended = [(i, panel) for panel in range(plan.round.panels) for i in scales.ended(width, panel)]
    assert [i for i, _ in ended] == list(range(scales.count))
    assert all(panel == ((i + 1) * columns - 1) // 64 for i, panel in ended)


# -- resources

VARIANTS: list[dict[str, Any]] = [
    {"weight": "u4"},
    {"weight": "u4", "act": "bf16", "scale": "bf16", "zeros": "float"},
    {"weight": "u3", "group_size": 32, "zeros": "int"},
    {"weight": "u8", "group_size": None},
    {"weight": "f6e3m2"},
    {"weight": "nf4", "group_size": 64},
    {"weight": "nf4", "group_size": 64, "scale": "f32"},
    {"weight": "u3", "group_size": 16, "zeros": "float", "outliers": True},
    {"weight": "u4", "group_size": 32, "zeros": "offset", "scale": "u6", "bilevel": Bilevel()},
    {"weight": "f4e2m1", "group_size": 16, "scale": "e4m3", "row_scales": True},
]


@pytest.mark.parametrize(
    ("choices", "tokens"),
    [(choices, (128, 512, 4096)[(i + j) % 3]) for i, choices in enumerate(VARIANTS) for j in range(2)],
    ids=str,
)
def test_no_spills_and_products_overlap(choices: dict[str, Any], tokens: int) -> None:
    """Of what the rule takes. A block has all of a multiprocessor, and needs its registers."""
    spec = MatmulSpec(8192, 8192, **({"group_size": 128} | choices))
    found = PREFILL.candidates(spec, tokens, HOPPER)
    best = min(found, key=lambda s: PREFILL.predict(spec, tokens, s, HOPPER))
    kernel = compiled(spec, best)
    used = resource_usage(kernel.ptx, HOPPER)
    assert (used.spill_stores, used.spill_loads, used.stack, used.serialized) == (0, 0, 0, False), best
    assert used.registers * kernel.launch.threads <= 65536
    assert kernel.launch.shared_bytes >= PersistentPlan(spec, best, WGMMA).shared_bytes


@pytest.mark.slow
@pytest.mark.parametrize("weight", EVERY)
def test_no_spills_of_any_format(weight: str) -> None:
    for choices in ({"group_size": None}, {"group_size": 128}, {"group_size": 32, "act": "bf16", "scale": "bf16"}):
        spec = spec_of(weight, 8192, 8192, **choices)
        for schedule in PREFILL.candidates(spec, 512, HOPPER) if PREFILL.token_tiles(spec, HOPPER) else ():
            used = resource_usage(compiled(spec, schedule).ptx, HOPPER)
            assert (used.spill_stores, used.spill_loads, used.serialized) == (0, 0, False), (spec, schedule)


# -- what it is for

SPEC = MatmulSpec(256, 1024, "u4", group_size=128)


@pytest.mark.parametrize(
    ("change", "schedule", "message"),
    [
        ({"k": 1020, "group_size": 17 * 60}, SMALL, "whole 16-byte pieces; u4 with k=1020 and groups of 1020 does not"),
        ({"k": 960, "group_size": 24}, SMALL, "groups of 24 does not fit; take a Schedule of the decode family"),
        ({"compute": "i8"}, SMALL, "prefill takes no activations of 8 bits"),
        ({}, PrefillSchedule(256, panel_k=128), "bytes of shared memory, sm_90a allows"),
    ],
)  # fmt: skip
def test_what_does_not_fit(change: dict[str, Any], schedule: PrefillSchedule, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_schedule(replace(SPEC, **change), schedule, HOPPER)


def test_only_where_there_is_wgmma() -> None:
    with pytest.raises(SpecError, match="prefill needs sm_90a, the target is sm_80; take a Schedule of the decode"):
        check_schedule(SPEC, SMALL, parse_target("sm_80"))
    assert PREFILL.token_tiles(SPEC, parse_target("sm_90")) == ()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tokens": 20}, "tokens=20 must be one of 16, 24, 32"),
        ({"tokens": 24, "cluster": 2}, "cluster=2 must cut tokens=24 into multiples of 8"),
        ({"panel_k": 32}, "panel_k=32 must be one of 64, 128, 256 for PrefillSchedule"),
        ({"num_stages": 5}, "num_stages=5 must be one of 4, 6, 8"),
        ({"cluster": True}, "cluster=True must be one of 1, 2"),
    ],
)
def test_a_wrong_schedule_names_the_field(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PrefillSchedule(**choices)


def test_larger_tiles_for_more_tokens() -> None:
    """By the prediction, which knows waves: as many tiles as multiprocessors are best, or many; or half as many, of
    which two blocks have one."""
    spec = MatmulSpec(8192, 8192, "u4", 128)

    def best(m: int) -> tuple[int, int]:
        found = min(PREFILL.candidates(spec, m, HOPPER), key=lambda s: PREFILL.predict(spec, m, s, HOPPER))
        return found.tokens, found.split_k

    assert [best(m) for m in (128, 256, 512, 4096)] == [(128, 2), (256, 2), (256, 1), (256, 1)]
