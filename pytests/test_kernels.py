"""Kernels from spec to result: pack, compile, run the PTX in the emulator, compare with the definition in float64.

Sweeps: all codes of all formats; shapes, types and schedules such that every two choices meet in some case; the same
for what only Hopper has, clusters and wgmma; tables in shared memory; and, marked slow, random ones. Shapes are small,
since the emulator's time is the limit, and few are multiples of anything.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

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
from test_recipes import table

import lowbit
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.kernel import decode_matmul
from lowbit.passes.kernels.decode.legality import check_schedule
from lowbit.passes.kernels.decode.plan import KernelPlan, always_uses_raw_codes
from lowbit.passes.kernels.decode.schedule import Refill, Schedule
from lowbit.passes.pipeline import compile_program
from lowbit.passes.target import parse_target
from lowbit.pylib.reference import agrees, matmul, random_inputs, random_problem, tolerance
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.tune.trial import rounding

TARGETS = ("sm_80", "sm_90a")
TOKENS = (8, 16, 32, 64, 128, 256)  # that a schedule can be for
WEIGHTS = (*all_names(), *(f"lut{bits}" for bits in range(1, 9)))


def spec_of(weight: str, n: int, k: int, **choices: Any) -> MatmulSpec:
    """A spec; lut<b> gets a table."""
    return MatmulSpec(n, k, weight, table=table(int(weight[3:])) if weight.startswith("lut") else None, **choices)


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
MOST_WORK = 64  # mma instructions per warp and step, if there is a choice: LLVM and the emulator take time


@dataclass(frozen=True)
class Case:
    """A kernel and the number of tokens it gets."""

    spec: MatmulSpec
    schedule: Schedule
    target: str
    m: int

    def __str__(self) -> str:
        s, p = self.spec, self.schedule
        parts = [s.weight, f"{s.n}x{s.k}", f"g{s.group_size}", f"z{s.zeros}", s.scale, s.act, s.out_dtype]
        parts += [f"m{self.m}", f"r{p.row_blocks}n{p.warps_n}k{p.warps_k}", f"step{p.step_k}"]
        parts += [f"stages{p.num_stages}", f"splits{p.split_k}", *["cluster"] * (p.cluster > 1), *["wgmma"] * p.wgmma]
        parts += ["preload"] * p.preload_weights + ["overlap"] * p.overlap_groups + ["raw"] * p.raw_codes
        parts += [p.refill] * (p.refill != "before_mma") + [f"grid{p.min_blocks}"] * (p.min_blocks > 0)
        parts += [f"prefetch{p.prefetch_limit}"] * (p.prefetch_limit > 0)
        return "-".join([*parts, self.target, *["rows"] * s.row_scales, *["bias"] * s.bias])


def fit(choice: dict[str, Any]) -> dict[str, Any]:
    """The nearest choice that is a kernel."""
    c = for_integers(choice)
    spec = _spec(c)
    packing = spec.packing
    group = packing.padded_group
    if group is not None and (packing.chunk * c["step"]) % group and group % (packing.chunk * c["step"]):
        c["step"] = 1
    while _work(_schedule(c)) > MOST_WORK and c["row_blocks"] * c["step"] > 1:
        c["step" if c["step"] > 1 else "row_blocks"] //= 2
    while not _is_allowed(spec, _schedule(c), c["target"]):
        name = max(("num_stages", "warps_k", "warps_n"), key=lambda name: c[name])
        c[name] -= 1 if name == "num_stages" else c[name] // 2
    return c


def for_integers(choice: dict[str, Any]) -> dict[str, Any]:
    """Only they have integer zeros, and can be multiplied raw, in f16; where they have no offset they are anyway."""
    integer = choice["weight"][0] in "ui"
    zeros = "float" if choice["zeros"] == "int" and not integer else choice["zeros"]
    optional = integer and choice.get("act") == "f16" and (choice["weight"][0] == "i" or zeros != "none")
    return choice | {"zeros": zeros, "raw_codes": optional and choice.get("raw_codes", False)}


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
    return _asked_for(spec, Schedule(tokens=_tokens(c["m"]), step_k=spec.packing.chunk * c["step"], **chosen))


def _asked_for(spec: MatmulSpec, schedule: Schedule) -> Schedule:
    """Without `raw` where codes are anyway."""
    anyway = schedule.raw_codes and always_uses_raw_codes(spec, schedule)
    return replace(schedule, raw_codes=False) if anyway else schedule


def _work(schedule: Schedule) -> int:
    """mma instructions per warp and step."""
    return schedule.row_blocks * schedule.step_k // 16 * schedule.columns // 8


def _tokens(m: int) -> int:
    return next(tokens for tokens in TOKENS if m <= tokens)


def _is_allowed(spec: MatmulSpec, schedule: Schedule, target: str) -> bool:
    try:
        check_schedule(spec, schedule, parse_target(target))
    except SpecError:
        return False
    return True


def pairs(choice: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    return itertools.combinations(choice.items(), 2)


def covering(
    factors: dict[str, Sequence[Any]],
    fit: Callable[[dict[str, Any]], dict[str, Any]],
    tries: int = 20,
    patience: int = 60,
) -> Iterator[dict[str, Any]]:
    """Choices in which every two values of every two factors meet, if `fit` lets them: at each turn the best of some
    random ones that have a missing pair (Cohen et al., "The AETG System", 1997)."""
    rng = random.Random(0)
    left = {
        ((a, x), (b, y)): None for a, b in itertools.combinations(factors, 2) for x in factors[a] for y in factors[b]
    }

    def gain(choice: dict[str, Any]) -> int:
        return sum(pair in left for pair in pairs(choice))

    def draw() -> dict[str, Any]:
        choice = {name: rng.choice(values) for name, values in factors.items()}
        return choice | dict(rng.choice(wanted))

    failures = 0
    while left and failures < patience:
        wanted = list(left)
        best = fit(max((draw() for _ in range(tries)), key=gain))
        failures = 0 if gain(best) else failures + 1
        if not failures:
            yield best
        for pair in pairs(best):
            left.pop(pair, None)


CASES = [Case(_spec(c), _schedule(c), c["target"], c["m"]) for c in covering(FACTORS, fit)]


@pytest.mark.parametrize("case", CASES, ids=str)
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
    program = compile_program(lambda: decode_matmul(spec, schedule), parse_target("sm_80"), keep=True).stages["lowbit"]
    assert ("arith.remui" in program) == turned


# -- clusters and wgmma

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
    if _work(_hopper(c).schedule) > MOST_WORK or not _hopper_is_allowed(c):
        c["step"] = 1
    if _work(_hopper(c).schedule) > MOST_WORK and c["row_blocks"] == 2:
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
        _tokens(c["m"]), c["row_blocks"], warps_n, c["warps_k"], step, c["num_stages"], splits, cluster, wgmma
    )
    copies = {"num_stages": 1} if c["preload_weights"] else {"prefetch_limit": c["prefetch_limit"]}
    copies["refill"] = _refill(c)
    flags = {name: c[name] for name in ("raw_codes", "preload_weights", "overlap_groups")}
    schedule = replace(schedule, **copies, **flags)
    if c["empty"]:
        schedule = replace(schedule, min_blocks=(KernelPlan(spec, schedule).tiles + c["empty"]) * splits)
    return Case(spec, _asked_for(spec, schedule), "sm_90a", c["m"])


def _hopper_is_allowed(c: dict[str, Any]) -> bool:
    case = _hopper(c)
    return _is_allowed(case.spec, case.schedule, case.target)


HOPPER_CASES = [_hopper(c) for c in covering(HOPPER, fit_hopper)]


def test_hopper_has_cases() -> None:
    """Clusters of every size with and without wgmma, reaching beyond the weight's rows and with m below the tile."""
    for wgmma, cluster in itertools.product((False, True), (1, 2, 3, 4, 8)):
        found = [case for case in HOPPER_CASES if (case.schedule.wgmma, case.schedule.cluster) == (wgmma, cluster)]
        assert any(case.spec.n % case.schedule.rows for case in found)
        assert any(case.m < case.schedule.tokens for case in found)
    assert {case.schedule.warps_n for case in HOPPER_CASES if case.schedule.wgmma} == {4, 8}
    preloaded = [case for case in HOPPER_CASES if case.schedule.preload_weights]
    assert {case.schedule.wgmma for case in preloaded} == {0, 1}
    assert any(KernelPlan(case.spec, case.schedule).rounds > 2 for case in preloaded)
    assert {case.schedule.preload_weights for case in HOPPER_CASES if case.schedule.overlap_groups} == {0, 1}
    assert {case.schedule.wgmma for case in HOPPER_CASES if case.schedule.raw_codes} == {0, 1}
    refilled = [case for case in HOPPER_CASES if case.schedule.refill != "before_mma" and case.schedule.num_stages > 1]
    assert sum(KernelPlan(case.spec, case.schedule).rounds > case.schedule.num_stages for case in refilled) > 5
    assert sum(case.schedule.tokens == 256 for case in HOPPER_CASES) > 5
    limited = [case for case in HOPPER_CASES if 0 < case.schedule.prefetch_limit < case.schedule.num_stages - 1]
    assert any(KernelPlan(case.spec, case.schedule).rounds > 2 for case in limited)


@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_hopper(case: Case) -> None:
    """With the race check: of threads, of the blocks of a cluster, and of the proxy by which wgmma reads x."""
    problem = random_inputs(case.spec, case.m, seed=1, finite=False)
    kernel = compile_matmul(case.spec, parse_target(case.target), case.schedule)
    racecheck = len(kernel.ptx) < 60_000  # it is slow
    launches = 2 if kernel.launch.workspace_bytes else 1
    y = run_matmul(kernel, case.spec, problem, launches=launches, racecheck=racecheck)
    assert matmul_is_right(y, case.spec, problem, **KernelPlan(case.spec, case.schedule).rounding)


PER_WARP = ((16, 4, 2), (64, 8, 1), (128, 8, 2), (64, 16, 1), (256, 4, 1))  # tokens, warps along n and along k


@pytest.mark.parametrize(
    ("weight", "zeros", "group"), [("u4", "none", 128), ("i3", "float", 64), ("nf4", "none", None)]
)
@pytest.mark.parametrize(("tokens", "warps_n", "warps_k"), PER_WARP)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_warps_that_refill_on_their_own(
    weight: str, zeros: str, group: int | None, tokens: int, warps_n: int, warps_k: int, num_stages: int
) -> None:
    """Stages are filled and read two or three times, with no barrier among the warps that share them."""
    step = {"i3": 256}.get(weight, 128) if tokens < 256 else 64
    spec = spec_of(weight, 16 * warps_n + 40, 8 * warps_k * step, group_size=group, zeros=zeros)
    schedule = Schedule(tokens, 1, warps_n, warps_k, step, num_stages, wgmma=True, refill="per_warp")
    if not _is_allowed(spec, schedule, "sm_90a"):
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
