"""One token in integers: which codes meet which limbs of x, kernels against float64, and how fine they are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compiled import compile_matmul
from emulated import Problem, matmul_is_right, run_matmul
from kernel_cases import covering, share_of_pairs
from sweeps import without
from test_mutations import without_barrier

import lowbit
from lowbit.dialect.errors import EmulatorError, SpecError
from lowbit.dialect.formats.integer_limbs import BITS, HALVES, PIECE, halves
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, Packing, run_of
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.streaming import arithmetic, candidates
from lowbit.passes.kernels.streaming.legality import check_schedule
from lowbit.passes.lowering import emit
from lowbit.passes.lowering import integer_mma as lower_limbs
from lowbit.passes.lowering.registry import RULES
from lowbit.passes.pipeline import CompiledKernel
from lowbit.passes.scheduling.choice import default_schedule
from lowbit.passes.targets import parse_target
from lowbit.pylib.reference import dequantize, matmul, random_problem
from lowbit.pylib.torch_types import TORCH

TARGETS = ("sm_80", "sm_90a")


@pytest.mark.parametrize("bits", BITS)
def test_halves(bits: int) -> None:
    """Every code of a piece is in one register of bytes, and the column it is said to be of is where packing put it."""
    packing = Packing(bits, ROWS, PIECE)
    order = Packing.fragment_order()
    run = run_of(bits)
    where: dict[tuple[int, int, int], tuple[int, int]] = {}  # (lane, word, bit) -> (row, column)
    for block, register, lane, which in itertools.product(range(PIECE // BLOCK_K), range(4), range(32), range(2)):
        chunk, within = divmod(block, packing.chunk // BLOCK_K)
        first, number = packing.place(within, register)
        (piece,) = run[number]
        row, column = divmod(int(order[lane, 2 * register + which]), BLOCK_K)
        where[lane, 4 * chunk + first + piece.word, piece.shift + 16 * which] = row, BLOCK_K * block + column
    assert len(where) == ROWS * PIECE and len(halves(bits)) == HALVES
    for half, lane, upper, byte in itertools.product(halves(bits), range(32), range(2), range(4)):
        g, q = divmod(lane, 4)
        column = half.column + 2 * q + (0, 32 // bits, 1, 32 // bits + 1)[byte]
        assert where.pop((lane, half.word, half.shift + bits * upper + 8 * byte)) == (g + 8 * upper, column)
    assert not where


# -- choices, pair by pair

FACTORS: dict[str, Any] = {
    "weight": ("u1", "u2", "u4", "i1", "i2", "i4"),
    "group": (None, 100, 128, 256, 384, "k"),
    "length": (1, 2, 5),  # groups in k, or which k
    "n": (1, 16, 40, 72),
    "zeros": ("none", "int", "float"),
    "scale": ("f16", "bf16", "f32", "e8m0", "e4m3"),
    "act": ("f16", "bf16"),
    "out": (None, "f32"),
    "bias": (False, True),
    "target": TARGETS,
    "row_blocks": (1, 2, 4),
    "warps_k": (1, 2, 4),
    "stages": (1, 2, 3),
    "sharing": ((1, 1), (2, 1), (2, 2)),  # splits of k, of them in a cluster
    "step": (128, 256),
}
K = {1: 16, 2: 250, 5: 1000}  # without groups


def fit(choice: dict[str, Any]) -> dict[str, Any]:
    """The nearest choice that is a kernel."""
    c = dict(choice)
    if c["target"] == "sm_80":
        c["sharing"] = (c["sharing"][0], 1)
    packing = _spec(c).packing
    c["step"] = max(c["step"], packing.chunk)
    if packing.padded_group == 384 and packing.bits == 1:
        c["group"] = 256  # steps of 256 columns fit it
    return c


def _spec(c: dict[str, Any]) -> MatmulSpec:
    group, length = c["group"], c["length"]
    group = 128 * length if group == "k" else group
    names = ("zeros", "scale", "act", "out", "bias")
    k = group * length if group else K[length]
    return MatmulSpec(c["n"], k, c["weight"], group_size=group, **{name: c[name] for name in names})


def _schedule(c: dict[str, Any]) -> Schedule:
    group = _spec(c).packing.padded_group
    step = c["step"] if group is None or group % c["step"] == 0 or c["step"] % group == 0 else 128
    splits, cluster = c["sharing"]
    shape = c["row_blocks"], 1, c["warps_k"], step, c["stages"], splits, cluster
    return IntegerSchedule(1, *shape)


CHOICES = covering(FACTORS, fit)
CASES = [(_spec(c), _schedule(c), c["target"]) for c in CHOICES]
IN_CI = 34


def test_most_choices_meet_in_ci() -> None:
    assert share_of_pairs(CHOICES, IN_CI) > 0.95


@pytest.mark.parametrize(("spec", "schedule", "target"), [*CASES[:IN_CI], *map(without, CASES[IN_CI:])])
def test_choices(spec: MatmulSpec, schedule: Schedule, target: str) -> None:
    problem = random_problem(spec, 1, seed=1)
    kernel = compile_matmul(spec, parse_target(target), schedule)
    launches = 2 if kernel.launch.workspace_bytes else 1
    y = run_matmul(kernel, spec, problem, launches=launches, racecheck=len(kernel.ptx) < 60_000)
    assert "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32" in kernel.ptx
    assert matmul_is_right(y, spec, problem)


@pytest.mark.parametrize("target", TARGETS)
def test_the_rule_takes_limbs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is much of a narrow weight. Through the door, for one token; more have a kernel with reals."""
    large = MatmulSpec(57344, 8192, "u2", group_size=128, zeros="int")
    assert default_schedule(large, 1, parse_target(target)).integer_mma
    monkeypatch.setattr(candidates, "_ONE_TOKEN", ())  # for a small weight, too
    spec = replace(large, n=256, k=4096)
    assert default_schedule(spec, 1, parse_target(target)).integer_mma
    mm = lowbit.compile(spec, f"emulator:{target}")
    problem = random_problem(spec, 3)
    x, *weight = problem
    w = mm.pack(*weight)
    for m in (1, 3):
        assert matmul_is_right(mm(x[:m], w), spec, (x[:m], *weight))


# -- how fine x is


def _numbers(kind: str, k: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "outliers":  # as activations of language models have them
        return rng.standard_normal(k) * np.where(rng.random(k) < 0.01, 1000.0, 1.0)
    if kind == "decades":
        return rng.standard_normal(k) * 10.0 ** rng.uniform(-6, 4, k)
    if kind == "tiny":
        return rng.integers(-3, 4, k) * 2.0**-24  # f16's subnormals
    if kind == "huge":
        return rng.choice([-65504.0, 65504.0, 32768.0], k)
    return np.zeros(k)


def _problem(spec: MatmulSpec, x: np.ndarray) -> Problem:
    _, *weight = random_problem(spec, 1, seed=4)
    return torch.from_numpy(x[None]).to(TORCH[spec.act]), *weight


@pytest.mark.parametrize("kind", ["outliers", "decades", "tiny", "huge", "zero"])
@pytest.mark.parametrize("weight", ["u1", "i2", "u4"])
@pytest.mark.parametrize("act", ["f16", "bf16"])
def test_precision(weight: str, kind: str, act: str) -> None:
    """Far finer than the tolerance of f16's kernels: a few roundings of f32, of terms and of the largest of a piece."""
    spec = MatmulSpec(24, 1024, weight, group_size=256, act=act, out="f32", scale="f32")  # type: ignore[arg-type]
    x, *weights = problem = _problem(spec, _numbers(kind, spec.k))
    kernel = compile_matmul(spec, parse_target("sm_80"), IntegerSchedule(1, 2, 1, 2, 256, 2))
    y = run_matmul(kernel, spec, problem).double().numpy()
    size = np.abs(x.double().numpy())
    largest = np.repeat(size.reshape(-1, PIECE).max(axis=1), PIECE)[None]
    scale = np.abs(dequantize(spec, np.full((24, 1024), 1), *weights[1:3]))
    bound = 2.0**-24 * ((largest + 16 * size) @ scale.T) * spec.dtype.codes
    assert (np.abs(y - matmul(spec, *problem)) <= bound).all()


@pytest.mark.parametrize("weight", ["u1", "u2", "u4"])
def test_largest_sums(weight: str) -> None:
    """All codes the largest, and of all x the third limb -128: sums of limbs still fit a mantissa."""
    spec = MatmulSpec(16, 256, weight, group_size=128, out="f32", scale="f32")
    codes = torch.full((16, 256), spec.dtype.codes - 1, dtype=torch.uint8)
    x = torch.full((1, 256), 1 + 2.0**-6, dtype=torch.float16)
    problem = x, codes, torch.ones(16, 2), None, None
    kernel = compile_matmul(spec, parse_target("sm_80"), IntegerSchedule(1, 1, 1, 1, 256, 2))
    assert (run_matmul(kernel, spec, problem) == 256 * (1 + 2.0**-6) * (spec.dtype.codes - 1)).all()


@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("act", ["f16", "bf16"])
def test_no_number_stays_none(special: float, act: str) -> None:
    """As with f16, where a bias is subtracted from all products."""
    spec = MatmulSpec(24, 1024, "u2", group_size=128, act=act)  # type: ignore[arg-type]
    x = _numbers("outliers", spec.k)
    x[700] = special
    kernel = compile_matmul(spec, parse_target("sm_80"), IntegerSchedule(1, 2, 1, 2, 256, 2))
    assert not torch.isfinite(run_matmul(kernel, spec, _problem(spec, x))).any()


@pytest.mark.parametrize("largest", [2.0**-100, 2.0**-60, 2.0**60, 2.0**110])
def test_range(largest: float) -> None:
    """All that bf16 can hold but its last few powers of two."""
    spec = MatmulSpec(24, 512, "u2", group_size=128, act="bf16", out="f32", scale="f32")
    x = _numbers("outliers", spec.k)
    problem = _problem(spec, x / np.abs(x).max() * largest)
    kernel = compile_matmul(spec, parse_target("sm_80"), IntegerSchedule(1, 2, 1, 1, 256, 2))
    assert matmul_is_right(run_matmul(kernel, spec, problem), spec, problem)


# -- broken compilers

BROKEN: dict[str, tuple[Any, str, Any]] = {
    "no carries": (lower_limbs, "_CARRIES", 0),
    "one carry less": (lower_limbs, "_CARRIES", 0x00008080),
    "another origin": (lower_limbs, "_ORIGIN", 2.0**23),
    "shifts not taken from x": (lower_limbs, "_scale", lambda values, shift: SCALE(values, emit.constant(0))),
    "limbs in another order": (lower_limbs, "_limbs", lambda numbers: DIGITS_OF(numbers)[::-1]),
    "columns in another order": (lower_limbs, "_limbs", lambda numbers: DIGITS_OF(numbers[::-1])),
    "coarser limbs": (lower_limbs, "TOP", 21),
    "offset forgotten": (arithmetic, "zero_code", lambda format_: 0.0),
}
SCALE, DIGITS_OF = lower_limbs._scale, lower_limbs._limbs
I2 = MatmulSpec(40, 1024, "i2", group_size=256, zeros="float", out="f32", scale="f32")


def _is_right(kernel: CompiledKernel, racecheck: bool = False) -> bool:
    """With x of which most are small next to a few."""
    x = np.where(np.arange(I2.k) % PIECE == 5, 1000.0, 2.0**-12)
    problem = _problem(I2, x)
    y = run_matmul(kernel, I2, problem, racecheck=racecheck).double().numpy()
    bound = 2.0**-24 * 4 * np.abs(problem[0].double().numpy()) @ np.abs(dequantize(I2, *problem[1:4])).T
    return bool((np.abs(y - matmul(I2, *problem)) <= bound).all())


def _compiled(stages: int = 2) -> CompiledKernel:
    return compile_matmul(I2, parse_target("sm_80"), IntegerSchedule(1, 1, 1, 2, 256, stages))


@pytest.mark.parametrize("what", BROKEN)
def test_broken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[what])
    assert not _is_right(_compiled())


@pytest.mark.parametrize(("stages", "number"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0), (3, 1)])
def test_no_barrier_can_go(stages: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrived, split, (consumed): every one keeps limbs or weights from being read too early, or overwritten."""
    monkeypatch.setitem(RULES, "lowbit.barrier", without_barrier(number)(RULES["lowbit.barrier"]))
    with pytest.raises(EmulatorError):
        _is_right(_compiled(stages), racecheck=True)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_nothing_broken(stages: int) -> None:
    assert _is_right(_compiled(stages), racecheck=True)


# -- what is refused


@pytest.mark.parametrize(
    ("weight", "group", "schedule", "message"),
    [
        ("u1", 128, IntegerSchedule(1, step_k=128), "step_k=128 must be a multiple of 256"),
        ("u3", 128, IntegerSchedule(1, step_k=256),
         "decode_integer multiplies integers of 1, 2 or 4 bits in groups of"),
        ("lut2", 128, IntegerSchedule(1), "lut2 in groups of 128 needs a Schedule of the decode family"),
        ("u2", 64, IntegerSchedule(1), "u2 in groups of 64 needs a Schedule of the decode family"),
    ],
)
def test_schedules_that_do_not_fit(weight: str, group: int, schedule: Schedule, message: str) -> None:
    table = (0.0, 1.0, 2.0, 4.0) if weight == "lut2" else None
    with pytest.raises(SpecError, match=message):
        check_schedule(MatmulSpec(64, 1024, weight, group_size=group, table=table), schedule, parse_target("sm_90a"))


def test_steps_are_whole_pieces() -> None:
    with pytest.raises(SpecError, match="step_k=64 must be a multiple of 128 for decode_integer"):
        check_schedule(MatmulSpec(64, 1024, "u4"), IntegerSchedule(1, step_k=64), parse_target("sm_90a"))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"tokens": 8}, "tokens=1; got tokens=8"),
        ({"warps_n": 2}, "warps_n=1; got warps_n=2"),
        ({"preload_weights": True, "num_stages": 1}, "preload_weights=False; got preload_weights=True"),
        ({"raw_codes": True}, "raw_codes=False; got raw_codes=True"),
    ],
)
def test_limbs_are_for_one_token_and_one_warp(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=f"schedule: decode_integer needs {message}"):
        IntegerSchedule(**choice)
