"""What a schedule of the decode family must obey, and what it takes of a multiprocessor."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from known_schedules import HOPPER, NEAR, SPEC

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.registry import FAMILIES
from lowbit.passes.kernels.streaming.legality import check_schedule, shared_bytes
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.launch import COUNTERS
from lowbit.passes.scheduling.choice import schedule_for
from lowbit.passes.targets import parse_target


@pytest.mark.parametrize(
    ("weight", "zeros", "choice", "raw"),
    [
        ("u4", "none", {}, True),  # nothing is to be taken away
        ("i4", "none", {}, False),
        ("u4", "int", {}, False),
        ("i4", "float", {}, True),  # sums of x are there anyway
        ("u4", "float", {"warps_n": 4, "wgmma": True}, False),  # but not where they would cost as much as 64 rows
        ("u2", "float", {"row_blocks": 2}, False),  # decoded too large by a bias instead
        ("nf4", "float", {}, False),
    ],
)
def test_what_is_multiplied_as_it_is_stored(weight: str, zeros: str, choice: dict[str, Any], raw: bool) -> None:
    spec = replace(SPEC, weight=weight, zeros=zeros)  # type: ignore[arg-type]
    s = replace(Schedule(8, 1, 1, 8, 128, 2), **choice)
    assert KernelPlan(spec, s).arithmetic.raw_codes == raw
    assert not KernelPlan(spec, IntegerSchedule()).arithmetic.raw_codes
    if raw:
        with pytest.raises(SpecError, match="multiplied as it is stored anyway; take raw_codes=False"):
            check_schedule(spec, replace(s, raw_codes=True), HOPPER)


LOOKUPS = (replace(SPEC, weight="nf4"), replace(SPEC, weight="lut6", table=tuple(range(64)), act="bf16", scale="bf16"))


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, weight="u3", group_size=32, zeros="int"), NEAR["rows"], *LOOKUPS])
@pytest.mark.parametrize("tile", [1, 16])
def test_shared_memory_is_what_the_kernel_takes(spec: MatmulSpec, tile: int) -> None:
    from compiled import compile_matmul

    kernel = compile_matmul(spec, HOPPER, tokens=tile)
    chosen = schedule_for(spec, tile, HOPPER)
    assert kernel.schedule == chosen
    free = replace(chosen, max_blocks_per_sm=0)  # a limit claims more than it needs
    assert compile_matmul(spec, HOPPER, free).launch.shared_bytes == shared_bytes(spec, free)


HOPPERS = {
    "wgmma": Schedule(tokens=16, row_blocks=1, warps_n=4, warps_k=2, step_k=128, num_stages=3, wgmma=True),
    "wgmma alone along k": Schedule(tokens=64, row_blocks=1, warps_n=8, warps_k=1, step_k=64, num_stages=2, wgmma=True),
    "cluster": Schedule(tokens=8, row_blocks=2, warps_k=4, step_k=64, num_stages=2, split_k=4, cluster=4),
    "cluster of single warps": Schedule(
        tokens=8, row_blocks=1, warps_k=1, step_k=64, num_stages=2, split_k=2, cluster=2
    ),
    "cluster with wgmma": Schedule(
        tokens=32, row_blocks=2, warps_n=4, warps_k=1, step_k=64, num_stages=2, split_k=8, cluster=8, wgmma=True
    ),
    "splits": Schedule(tokens=8, row_blocks=2, warps_k=4, step_k=64, num_stages=1, split_k=4),
    "sums are the most": Schedule(tokens=64, row_blocks=4, warps_k=8, step_k=64, num_stages=1, split_k=2),
}


@pytest.mark.parametrize("schedule", HOPPERS)
@pytest.mark.parametrize("spec", [SPEC, NEAR["rows"], replace(SPEC, zeros="int", scale="e4m3"), LOOKUPS[0]])
def test_shared_memory_of_clusters_and_wgmma(spec: MatmulSpec, schedule: str) -> None:
    from compiled import compile_matmul

    s = HOPPERS[schedule]
    check_schedule(spec, s, HOPPER)
    assert compile_matmul(spec, HOPPER, s).launch.shared_bytes == shared_bytes(spec, s)


PER_WARP = {"refill": "per_warp", "wgmma": True, "warps_n": 4}
UNFIT: list[tuple[str, dict[str, Any]]] = [
    (r"cluster=3 must be 1, or split_k=4 where that is at most 8", {"split_k": 4, "cluster": 3}),
    (r"cluster=2 must be 1, or split_k=1 where", {"cluster": 2}),
    (r"cluster=16 must be 1, or split_k=16 where that is at most 8", {"split_k": 16, "cluster": 16}),
    (r"cluster=3 must be .* and divides the 32 rows of a block", {"split_k": 3, "cluster": 3, "row_blocks": 2}),
    (r"cluster=0 must be in 1\.\.1024", {"cluster": 0}),
    (r"wgmma=1 must be True or False", {"wgmma": 1, "warps_n": 4}),
    (r"wgmma=True needs warps_n=2 to be a multiple of 4", {"wgmma": True, "warps_n": 2}),
    (r"wgmma=True needs .* tokens=1 to be at least 8", {"wgmma": True, "warps_n": 4, "tokens": 1}),
    (r"tokens=128 needs wgmma=True", {"tokens": 128}),
    (r"tokens=48 must be one of 1, 8, 16, 32, 64, 128", {"tokens": 48}),
    (r"preload_weights=True needs num_stages=3 to be 1", {"preload_weights": True}),
    (r"preload_weights=True needs .* prefetch_limit=1 to be 0", {"preload_weights": True, "prefetch_limit": 1}),
    (r"overlap_groups=True needs wgmma=True and row_blocks=1; got wgmma=False", {"overlap_groups": True}),
    (r"overlap_groups=True .* row_blocks=2", {"overlap_groups": True, "wgmma": True, "warps_n": 4}),
    (r"min_blocks=-1 must be in 0\.\.65535, 0: no limit", {"min_blocks": -1}),
    (r"max_blocks_per_sm=-1 must be in 0\.\.32, 0: no limit", {"max_blocks_per_sm": -1}),
    (r"raw_codes=2 must be True or False", {"raw_codes": 2}),
    (r"refill='after_first_mma' needs wgmma=True .* got wgmma=False", {"refill": "after_first_mma"}),
    (r"refill='late' must be one of 'before_mma', 'after_first_mma'", PER_WARP | {"refill": "late"}),
    (r"refill='per_warp' needs .* prefetch_limit=1 to be 0", PER_WARP | {"prefetch_limit": 1}),
    (r"refill='per_warp' needs num_stages=1 to be at least 2", PER_WARP | {"num_stages": 1}),
    (r"prefetch_limit=-1 must be in 0\.\.64, 0: no limit", {"prefetch_limit": -1}),
    (r"outliers_by_step=True needs wgmma=True.* got False", {"outliers_by_step": True}),
    (r"outliers_by_step=True .* got True, False, 'per_warp'", PER_WARP | {"outliers_by_step": True}),
]


@pytest.mark.parametrize(("message", "change"), UNFIT)
def test_fields_that_do_not_fit_each_other(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"schedule: {message}"):
        Schedule(**change)


@pytest.mark.parametrize("value", [10**5, 10**9, 10**21, -(10**21)])
@pytest.mark.parametrize("name", [family.name for family in FAMILIES.values()])
def test_absurd_numbers_are_refused_at_once(name: str, value: int) -> None:
    """Every choice that is a number has a range: a compiler would work for hours, or run out of memory."""
    family = FAMILIES[name]
    spec = replace(SPEC, compute="i8") if family.operation == "quantize" else SPEC
    for field in fields(family.schedule_type):
        if type(field.default) is int:
            with pytest.raises(SpecError, match=f"schedule: .*{field.name}=-?10000"):
                family.check(spec, family.schedule_type(**{field.name: value}), HOPPER)


WIDE = Schedule(tokens=16, row_blocks=1, warps_n=4, warps_k=2, step_k=64, wgmma=True)
UNFIT_HERE: list[tuple[str, MatmulSpec, Schedule, str]] = [
    ("wgmma needs sm_90a, the target is sm_90; take wgmma=False", SPEC, WIDE, "sm_90"),
    ("wgmma needs sm_90a, the target is emulator:sm_80; take wgmma=False", SPEC, WIDE, "emulator:sm_80"),
    (
        "step_k=32 must be a multiple of 64 for wgmma",
        replace(SPEC, weight="u8", group_size=32),
        replace(WIDE, step_k=32),
        "sm_90a",
    ),
    (
        "wgmma multiplies f16 by f16 in whole 16-byte pieces of x; u4 with k=1540 and groups of None needs wgmma=False",
        replace(SPEC, k=1540, group_size=None),
        WIDE,
        "sm_90a",
    ),
    (
        "tokens=256 leaves registers for one set of sums, and .* needs two; take tokens of at most 128",
        replace(SPEC, scale="f32"),
        replace(WIDE, tokens=256, warps_k=1, num_stages=2),
        "sm_90a",
    ),
    ("u4 with k=1536 and groups of 48 needs wgmma=False", replace(SPEC, group_size=48), WIDE, "sm_90a"),
    ("wgmma multiplies f16 by f16 .* f7e6m0 with", replace(SPEC, weight="f7e6m0"), replace(WIDE, step_k=256), "sm_90a"),
    ("cluster=2 needs clusters, which sm_89 does", SPEC, Schedule(warps_k=4, split_k=2, cluster=2), "sm_89"),
]


@pytest.mark.parametrize(("message", "spec", "schedule", "target"), UNFIT_HERE, ids=lambda v: str(v)[:40])
def test_clusters_and_wgmma_where_they_do_not_fit(
    message: str, spec: MatmulSpec, schedule: Schedule, target: str
) -> None:
    with pytest.raises(SpecError, match=f"schedule: .*{message}"):
        check_schedule(spec, schedule, parse_target(target))
    changes = {"cluster": {"cluster": 1}, "tokens=": {"tokens": 128}}
    fitting = replace(schedule, **next((c for name, c in changes.items() if name in message), {"wgmma": False}))
    check_schedule(spec, fitting, parse_target(target))


PRELOADED = Schedule(8, 1, 4, 2, 128, 1, wgmma=True, preload_weights=True)


@pytest.mark.parametrize(
    ("message", "spec", "change"),
    [
        ("preload_weights=True needs steps of .* come out even for k=1280", replace(SPEC, k=1280), {"warps_k": 4}),
        (
            "preload_weights=True needs .* x in 16-byte pieces",
            replace(SPEC, k=1020, group_size=None),
            {"wgmma": False},
        ),
        (
            "preload_weights=True has at most 128 registers of weight .* needs 512",
            replace(SPEC, k=16384),
            {"warps_k": 2},
        ),
        ("overlap_groups=True is for .* group by group", replace(SPEC, group_size=None), {"overlap_groups": True}),
        (
            "overlap_groups=True is for .* needs overlap_groups=False",
            replace(SPEC, group_size=32),
            {"overlap_groups": True, "tokens": 64},
        ),
    ],
)
def test_preloading_and_overlap_where_they_do_not_fit(message: str, spec: MatmulSpec, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"schedule: {message}"):
        check_schedule(spec, replace(PRELOADED, **change), HOPPER)
    check_schedule(SPEC, PRELOADED, HOPPER)


def test_no_more_splits_than_steps() -> None:
    """But for the eight of a cluster, of which some may have nothing to do."""
    spec = replace(SPEC, k=640)
    check_schedule(spec, Schedule(step_k=64, split_k=10), HOPPER)
    check_schedule(spec, Schedule(step_k=128, split_k=8), HOPPER)
    for step_k, steps in ((64, 10), (128, 5)):
        with pytest.raises(SpecError, match=f"split_k=11 must be at most 8, or the {steps} steps of step_k={step_k}"):
            check_schedule(spec, Schedule(step_k=step_k, split_k=11), HOPPER)


def test_more_tiles_than_counters() -> None:
    schedule = Schedule(tokens=8, row_blocks=1, warps_k=1, step_k=64, num_stages=2, split_k=2)
    check_schedule(replace(SPEC, n=16 * COUNTERS), schedule, HOPPER)
    with pytest.raises(SpecError, match=r"split_k=2 in device memory counts blocks of up to 16384 tiles, .* has 16385"):
        check_schedule(replace(SPEC, n=16 * COUNTERS + 1), schedule, HOPPER)
