"""The rule that chooses a schedule where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from known_schedules import HOPPER, SPEC
from sweeps import swept

from lowbit.dialect.errors import SpecError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.base import KernelSchedule
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.registry import FAMILIES, family_of
from lowbit.passes.kernels.streaming.cost_model import predict, spills
from lowbit.passes.kernels.streaming.plan import KernelPlan, known_plan
from lowbit.passes.kernels.streaming.search_space import all_schedules
from lowbit.passes.scheduling.choice import TOKEN_TILES, Chooser, default_schedule, schedule_for
from lowbit.passes.target import Target
from lowbit.passes.targets import parse_target


def rule(spec: MatmulSpec, target: Target) -> Iterator[tuple[int, KernelSchedule]]:
    """The rule's schedule for each token tile of the decode families that has one."""
    chooser = Chooser(spec, target)
    for tile in TOKEN_TILES:
        if tile in chooser.token_tiles:
            yield tile, chooser.predicted(tile).schedule


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_87", "sm_89", "sm_90a"])
def test_the_rule_always_fits(target: str) -> None:
    """Formats of all chunk sizes, groups that are padded, one row block to very many, k of one step to very many."""
    t = parse_target(target)
    weights, groups = ("u1", "u2", "u3", "u4", "i6", "f8e4m3", "u8"), (None, 16, 32, 128, 1000)
    sizes = (1, 16), (16, 2000), (4096, 512), (1000, 28000), (131072, 8192)
    for weight, group, (n, k) in product(weights, groups, sizes):
        if group and k % group:
            continue
        spec = MatmulSpec(n, k, weight, group_size=group, zeros="float", scale="f32")
        for tile, s in rule(spec, t):
            family_of(s).check(spec, s, t)
            if not isinstance(s, Schedule):  # a prefill kernel, for any number of tokens
                continue
            plan = KernelPlan(spec, s)
            assert s.tokens in (tile, max(8, tile)) and (s.warps_k == 1 or plan.steps.count >= s.warps_k)
            assert s.split_k == 1 or plan.steps.rounds >= 2


def test_the_rule_fills_the_multiprocessors() -> None:
    for n, target in product((2048, 4096, 6144, 8192, 14336, 57344), (HOPPER, parse_target("sm_90"))):
        spec = replace(SPEC, n=n, k=8192)
        for tile, s in rule(spec, target):
            if isinstance(s, Schedule):  # a prefill kernel has a block for each
                # Half of them were enough to win at 2048 x 5632.
                assert KernelPlan(spec, s).steps.tiles * s.split_k >= min(0.45 * 132, n / 16), (n, tile)


def test_clusters_of_four_leave_multiprocessors_out() -> None:
    """128 blocks for 132 multiprocessors: in one go in clusters of two, not in clusters of four."""
    spec, two = replace(SPEC, n=4096, k=8192), Schedule(16, 1, 4, 4, 128, 2, 2, 2, True, 1)
    four = replace(two, warps_n=8, warps_k=2, split_k=4, cluster=4)
    assert KernelPlan(spec, two).steps.tiles * 2 == KernelPlan(spec, four).steps.tiles * 4 == 128
    fewer = replace(spec, n=3072)  # 96 blocks

    def ratio(spec: MatmulSpec) -> float:
        return predict(spec, 16, four, HOPPER) / predict(spec, 16, two, HOPPER)

    assert ratio(spec) > 1.3 * ratio(fewer)


@pytest.mark.parametrize(
    "s",
    [
        Schedule(8, 1, 4, 4, 128, 2, wgmma=True),
        Schedule(64, 2, 4, 1, 256, 2, wgmma=True),
        Schedule(128, 1, 4, 4, 64, 2, wgmma=True),
        Schedule(8, 1, 4, 4, 512, 1, wgmma=True, preload_weights=True),
        Schedule(8, 1, 2, 8, 512, 1, preload_weights=True),
        Schedule(8, 2, 1, 8, 128, 3),
        IntegerSchedule(1, 4, 1, 8, 256, 2),
    ],
)
def test_registers_are_about_what_the_assembler_takes(s: Schedule) -> None:
    from compiled import compile_matmul

    from lowbit.passes.codegen.cubin import resource_usage

    spec = replace(SPEC, k=4096 if s.preload_weights else 8192)
    used = resource_usage(compile_matmul(spec, HOPPER, s).ptx, HOPPER)
    assert used.spill_stores == 0 and abs(KernelPlan(spec, s).engine.registers - used.registers) <= 16


@pytest.mark.parametrize(
    ("n", "k", "tile", "shape"),
    [
        (4096, 4096, 16, (4, 1)),  # warps along k, splits
        (2048, 8192, 8, (4, 2)),
        (1024, 2048, 16, (1, 4)),  # too few rows for blocks of 16 warps
        (2560, 2560, 64, (1, 2)),
        (4096, 4096, 64, None),  # too large for so many tokens
        (8192, 4096, 8, None),
        (4096, 4096, 1, None),
        (4000, 4000, 8, None),  # comes out even with no split
    ],
)
def test_small_matrices_are_preloaded_by_rule(n: int, k: int, tile: int, shape: tuple[int, int] | None) -> None:
    spec = replace(SPEC, n=n, k=k, weight="u4", group_size=None)
    s = default_schedule(spec, tile, HOPPER)
    assert s.preload_weights == (shape is not None) and shape in (None, (s.warps_k, s.split_k))
    assert not default_schedule(spec, min(tile, 64), parse_target("sm_80")).preload_weights


@pytest.mark.parametrize(
    ("n", "weight", "tile"), swept(product([1024, 2048, 6144, 14336], ["u4", "u3", "nf4"], [8, 64, 128]))
)
def test_the_rule_with_wgmma_is_the_best_predicted(n: int, weight: str, tile: int) -> None:
    """About: of all schedules, not only of the few that there is time for."""
    spec = replace(SPEC, n=n, k=8192, weight=weight)
    s = min(FAMILIES["decode"].candidates(spec, tile, HOPPER), key=lambda s: predict(spec, tile, s, HOPPER))
    found = [e for e in all_schedules(spec, tile, HOPPER, FAMILIES["decode"]) if e.wgmma and e.warps_n <= 8]
    every = (e for e in found if not e.preload_weights and not spills(known_plan(spec, e), HOPPER))
    assert s.wgmma
    most = 1.15 if s.preload_weights else 1.07  # preloaded weights take less time than is predicted
    assert predict(spec, tile, s, HOPPER) <= most * min(predict(spec, tile, each, HOPPER) for each in every)


def test_a_tile_that_is_none() -> None:
    for choice in (default_schedule, schedule_for):
        with pytest.raises(SpecError, match="tokens=5 must be one of 1, 8, 16, 32, 64, 80, 88, 96, 104, 112, 120, 128"):
            choice(SPEC, 5, HOPPER)
        with pytest.raises(SpecError, match=r"tokens=256 must be .*, 64 for u4, k=1020 .* whose x is not in whole"):
            choice(replace(SPEC, k=1020, group_size=None), 256, HOPPER)
        with pytest.raises(SpecError, match=r"64, 160, .* for u4, k=.* on sm_80, which has no wgmma"):
            choice(SPEC, 128, parse_target("sm_80"))
        with pytest.raises(SpecError, match=r"tokens=80 must be .* for u4, k=4096 on sm_90a$"):  # wgmma is not why
            choice(replace(SPEC, k=4096, compute="f8e4m3"), 80, HOPPER)
