"""Kernels with what only Hopper has, clusters and wgmma, from spec to result in the emulator."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
from compiled import compile_matmul
from emulated import (
    matmul_is_right,
    run_matmul,
)
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
from sweeps import swept

from lowbit.dialect.errors import EmulatorError
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import Refill, Schedule
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator.machine.machine import Block
from lowbit.pylib.emulator.machine.memory import DeviceMemory
from lowbit.pylib.emulator.machine.shared_memory import SharedMemory
from lowbit.pylib.reference import random_inputs, random_problem

HOPPER: dict[str, Sequence[Any]] = {
    "wgmma": (False, True),
    "sharing": ((1, 1), (2, 1), (2, 2), (3, 3), (4, 4), (8, 8)),  # splits of k, of them in a cluster
    "weight": ("u2", "u3", "u4", "u8", "f6e3m2", "nf4"),
    "group": (None, 32, 128),
    "length": (1, 3, 11),  # groups in k, or which k: 11 are no whole steps
    "n": (24, 72, 100),  # no whole tile
    "zeros": ("none", "int", "float", "offset"),
    "scale": ("f16", "bf16", "e8m0"),
    "row_scales": (False, True),
    "act": ("f16", "bf16"),
    "bias": (False, True),
    "m": (3, 8, 13, 16, 50, 100, 200),
    "row_blocks": (1, 2),
    "warps": (1, 2),  # along n; warpgroups with wgmma
    "warps_k": (1, 2),
    "num_stages": (1, 2, 3),
    "step": (1, 2),  # chunks, or 64 columns for wgmma
    "prefetch_limit": (0, 1),
    "raw_codes": (False, True),
    "preload_weights": (False, True),
    "empty": (0, 1, 3),  # tiles that the grid has beyond those with work
    "overlap_groups": (False, True),
    "refill": get_args(Refill),
}
HOPPER_K = {1: 64, 3: 328, 11: 1000}  # without groups


def fit_hopper(choice: dict[str, Any]) -> dict[str, Any]:
    """The nearest choice that is a kernel."""
    c = for_integers(choice)
    if c["m"] > 64:
        c["wgmma"] = True
    if c["sharing"][1] == 3:
        c["row_blocks"] = 3  # 48 rows are three equal parts
    least = {"num_stages": 1, "warps_k": 1, "step": 1, "prefetch_limit": 0}
    least |= {"preload_weights": False, "overlap_groups": False}
    if c["m"] > 128 and not _hopper_is_allowed(c | least):  # sums that are scaled leave no room for so many
        c["m"] = 100
    if not c["wgmma"] or c["row_blocks"] > 1:
        c["overlap_groups"] = False
    at_once = c["zeros"] in ("float", "offset") and not c["raw_codes"]
    if c["overlap_groups"] and at_once:  # scaled at once: nothing overlaps
        c["zeros"] = "none"
    if c["overlap_groups"] and c["preload_weights"]:  # whole steps, of groups that are longer than the tile is wide
        c |= {"group": 128, "warps_k": 1, "sharing": (1, 1), "m": min(c["m"], 64)}
    if c["prefetch_limit"]:  # which takes two rounds ahead
        c |= {"num_stages": 3, "warps_k": 1}
    for name in ("overlap_groups", "preload_weights"):
        if not _hopper_is_allowed(c):
            c[name] = False
    c["refill"] = _refill(c)
    if work_of(_hopper(c).schedule) > MOST_WORK or not _hopper_is_allowed(c):
        c["step"] = 1
    if work_of(_hopper(c).schedule) > MOST_WORK and c["row_blocks"] == 2:
        c["row_blocks"] = 1
    while not _hopper_is_allowed(c):
        name = max(("num_stages", "warps_k"), key=lambda name: c[name])
        c[name] -= 1
    return c


def _refill(c: dict[str, Any]) -> str:
    """The chosen refill, or the nearest that the other choices allow."""
    if not c["wgmma"] or c["preload_weights"]:
        return "before_mma"
    per_warp = c["num_stages"] > 1 and not c["prefetch_limit"]
    return c["refill"] if per_warp or c["refill"] != "per_warp" else "after_first_mma"


def _hopper(c: dict[str, Any]) -> Case:
    group, length = c["group"], c["length"]
    k = group * length if group else HOPPER_K[length]
    others = {name: c[name] for name in ("zeros", "scale", "act", "bias", "row_scales")}
    spec = spec_of(c["weight"], c["n"], k, group_size=group, **others)
    (splits, cluster), wgmma = c["sharing"], c["wgmma"]
    step = c["step"] * max(spec.packing.chunk, 64 if wgmma else 0)
    warps_n = c["warps"] * (4 if wgmma else 1)
    schedule = Schedule(
        tokens_of(c["m"]), c["row_blocks"], warps_n, c["warps_k"], step, c["num_stages"], splits, cluster, wgmma
    )
    copies = {"num_stages": 1} if c["preload_weights"] else {"prefetch_limit": c["prefetch_limit"]}
    copies["refill"] = _refill(c)
    flags = {name: c[name] for name in ("raw_codes", "preload_weights", "overlap_groups")}
    schedule = replace(schedule, **copies, **flags)
    if c["empty"]:
        schedule = replace(schedule, min_blocks=(KernelPlan(spec, schedule).steps.tiles + c["empty"]) * splits)
    return Case(spec, as_asked(spec, schedule), "sm_90a", c["m"])


def _hopper_is_allowed(c: dict[str, Any]) -> bool:
    case = _hopper(c)
    return is_allowed(case.spec, case.schedule, case.target)


HOPPER_CHOICES = covering(HOPPER, fit_hopper)
EVERY_HOPPER_CASE = [_hopper(c) for c in HOPPER_CHOICES]
IN_CI = 50
HOPPER_CASES = EVERY_HOPPER_CASE[:IN_CI]


def test_most_choices_meet_in_ci() -> None:
    assert share_of_pairs(HOPPER_CHOICES, IN_CI) > 0.95


def test_hopper_has_cases() -> None:
    """CI has clusters of all sizes with and without wgmma that reach beyond the weight's rows, and m below the tile."""
    for wgmma, cluster in itertools.product((False, True), (1, 2, 3, 4, 8)):
        found = [case for case in HOPPER_CASES if (case.schedule.wgmma, case.schedule.cluster) == (wgmma, cluster)]
        assert any(case.spec.n % case.schedule.rows for case in found)
    below = [case.schedule for case in HOPPER_CASES if case.m < case.schedule.tokens]
    assert {schedule.cluster for schedule in below} == {1, 2, 3, 4, 8}
    assert {schedule.wgmma for schedule in below} == {False, True}
    assert {case.schedule.warps_n for case in HOPPER_CASES if case.schedule.wgmma} == {4, 8}
    preloaded = [case for case in HOPPER_CASES if case.schedule.preload_weights]
    assert {case.schedule.wgmma for case in preloaded} == {0, 1}
    assert any(KernelPlan(case.spec, case.schedule).steps.rounds > 2 for case in preloaded)
    assert {case.schedule.preload_weights for case in HOPPER_CASES if case.schedule.overlap_groups} == {0, 1}
    assert {case.schedule.wgmma for case in HOPPER_CASES if case.schedule.raw_codes} == {0, 1}
    refilled = [case for case in HOPPER_CASES if case.schedule.refill != "before_mma" and case.schedule.num_stages > 1]
    assert sum(KernelPlan(case.spec, case.schedule).steps.rounds > case.schedule.num_stages for case in refilled) > 3
    assert sum(case.schedule.tokens == 256 for case in HOPPER_CASES) > 5
    limited = [case for case in HOPPER_CASES if 0 < case.schedule.prefetch_limit < case.schedule.num_stages - 1]
    assert any(KernelPlan(case.spec, case.schedule).steps.rounds > 2 for case in limited)


@pytest.mark.parametrize("case", in_ci(EVERY_HOPPER_CASE, IN_CI))
def test_hopper(case: Case) -> None:
    """With the race check: of threads, of the blocks of a cluster, and of the proxy by which wgmma reads x."""
    problem = random_inputs(case.spec, case.m, seed=1, finite=False)
    kernel = compile_matmul(case.spec, parse_target(case.target), case.schedule)
    racecheck = len(kernel.ptx) < 60_000  # it is slow
    launches = 2 if kernel.launch.workspace_bytes else 1
    y = run_matmul(kernel, case.spec, problem, launches=launches, racecheck=racecheck)
    assert matmul_is_right(y, case.spec, problem, **KernelPlan(case.spec, case.schedule).rounding)


def test_memory_of_a_launch_is_free_afterwards() -> None:
    """At once: shadow memory of the race check takes hundreds of megabytes, and the garbage collector comes late."""
    spec, case = spec_of("u4", 72, 256, group_size=32), Schedule(64, 1, 4, 1, 64, 2, 2, cluster=2, wgmma=True)
    kernel = compile_matmul(spec, parse_target("sm_90a"), case)
    problem = random_inputs(spec, 40, seed=1)
    gc.collect()
    gc.disable()
    try:
        before = live_memories()
        run_matmul(kernel, spec, problem, racecheck=True)
        assert live_memories() == before
    finally:
        gc.enable()


def live_memories() -> int:
    """How many blocks and memories the emulator holds."""
    return sum(type(each) in (Block, SharedMemory, DeviceMemory) for each in gc.get_objects())


PER_WARP = ((16, 4, 2), (64, 8, 1), (128, 8, 2), (64, 16, 1), (256, 4, 1))  # tokens, warps along n and along k


REFILLED = (("u4", "none", 128), ("i3", "float", 64), ("nf4", "none", None))  # weight, zeros, group


@pytest.mark.parametrize(
    ("stored", "block", "num_stages"), swept(itertools.product(REFILLED, PER_WARP, (2, 3))), ids=str
)
def test_warps_that_refill_on_their_own(
    stored: tuple[str, str, int | None], block: tuple[int, int, int], num_stages: int
) -> None:
    """Stages are filled and read two or three times, with no barrier among the warps that share them."""
    (weight, zeros, group), (tokens, warps_n, warps_k) = stored, block
    step = {"i3": 256}.get(weight, 128) if tokens < 256 else 64
    spec = spec_of(weight, 16 * warps_n + 40, 8 * warps_k * step, group_size=group, zeros=zeros)
    schedule = Schedule(tokens, 1, warps_n, warps_k, step, num_stages, wgmma=True, refill="per_warp")
    if not is_allowed(spec, schedule, "sm_90a"):
        schedule = replace(schedule, step_k=spec.packing.chunk, num_stages=2, tokens=min(tokens, 64))
    problem = random_problem(spec, schedule.tokens - 3, seed=2, finite=False)
    kernel = compile_matmul(spec, parse_target("sm_90a"), schedule)
    loop = kernel.ptx.split("griddepcontrol.wait")[1]
    assert loop.count("mbarrier.try_wait") == 2 and loop.count("bar.sync") <= 3  # of sums and stores
    y = run_matmul(kernel, spec, problem, racecheck=tokens < 64)
    assert matmul_is_right(y, spec, problem, **KernelPlan(spec, schedule).rounding)


@pytest.mark.parametrize("signal", [0, 1])
def test_warps_that_do_not_wait(signal: int) -> None:
    """Neither wait can go: the emulator sees it, whatever the numbers come to."""
    spec = MatmulSpec(128, 1024, "u4", group_size=128)
    kernel = compile_matmul(spec, parse_target("sm_90a"), Schedule(16, 1, 8, 1, 128, 2, wgmma=True, refill="per_warp"))
    waits = re.findall(r"mbarrier\.try_wait.*\n@!over bra again;", kernel.ptx)
    assert len(waits) == 2
    broken = replace(kernel, stages={**kernel.stages, "ptx": kernel.ptx.replace(waits[signal], "")})
    problem = random_problem(spec, 16, seed=2)
    run_matmul(kernel, spec, problem, racecheck=True)
    with pytest.raises(EmulatorError, match=r"race|in flight|waited"):
        run_matmul(broken, spec, problem, racecheck=True)
