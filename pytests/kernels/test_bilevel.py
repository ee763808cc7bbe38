"""Scales, zeros and offsets that are codes with a second level: their values, on every target."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compiled import compile_dequantize, compile_matmul
from emulated import Inputs, dequantize_is_right, matmul_is_right, run_dequantize, run_matmul
from hypothesis import given, settings
from hypothesis import strategies as st

import lowbit
from lowbit.dialect.bilevel import SCALE_CODES, TABLE_CODE, Bilevel, integers_of
from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.packing import Packing
from lowbit.dialect.presets import PRESETS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.builder import Program
from lowbit.passes.kernels.decode.schedule import IntegerSchedule, Schedule
from lowbit.passes.kernels.scales.conversion import ScaleConversion
from lowbit.passes.kernels.scales.group_scales import GroupScales
from lowbit.passes.kernels.streaming.legality import check_schedule, shared_bytes
from lowbit.passes.kernels.streaming.plan import KernelPlan
from lowbit.passes.kernels.streaming.steps import Steps
from lowbit.passes.targets import parse_target
from lowbit.pylib import reference
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.weights.packed import PackedWeight, pack

Q4_K = MatmulSpec(24, 512, "u4", 32, zeros="offset", scale="u6", bilevel=Bilevel(groups=8), out="f32")
Q6_K = MatmulSpec(24, 512, "i6", 16, scale="i8", bilevel=Bilevel(groups=16), out="f32")
Q3_K = MatmulSpec(24, 512, "i3", 16, scale="i6", bilevel=Bilevel(groups=16), out="f32")
Q2_K = MatmulSpec(24, 512, "u2", 16, zeros="offset", scale="u4", bilevel=Bilevel(groups=16), out="f32")
SPQR = MatmulSpec(
    40, 512, "u3", 16, zeros="float", scale="u3", bilevel=Bilevel(rows=16, groups=1, zeros=True), out="f32"
)
NESTED = MatmulSpec(40, 256, "nf4", 64, scale="u8", bilevel=Bilevel(groups=4, scale="f32"), act="bf16", out="f32")
ROWS = MatmulSpec(
    40, 384, "u8", 32, zeros="int", scale="u8", bilevel=Bilevel(rows=16, groups=1), row_scales=True, out="f32"
)
FP4 = MatmulSpec(40, 256, "f4e2m1", 16, scale="e4m3", bilevel=Bilevel(groups=8), act="bf16", bias=True, out="f32")
PADDED = MatmulSpec(
    24, 400, "u4", 50, zeros="offset", scale="u6", bilevel=Bilevel(rows=16, groups=2, zeros=True), out="f32"
)
TABLE = MatmulSpec.preset("nf4_nested", 40, 512, act="bf16", out="f32")
MINIMA = MatmulSpec(  # offsets that have an offset themselves
    24, 512, "u4", 32, zeros="offset", scale="u6", bilevel=Bilevel(rows=16, groups=4, offsets=True), out="f32"
)
SPECS = {
    "q4_k": Q4_K, "q6_k": Q6_K, "q3_k": Q3_K, "q2_k": Q2_K,
    "spqr": SPQR, "nested": NESTED, "rows": ROWS, "fp4": FP4, "padded": PADDED,
    "table": TABLE, "minima": MINIMA,
}  # fmt: skip


def inputs(spec: MatmulSpec, m: int, seed: int = 0) -> Inputs:
    return reference.random_inputs(spec, m, seed)


def by_hand(spec: MatmulSpec, t: dict[str, torch.Tensor]) -> np.ndarray:
    """W in f32, every operation rounded."""
    bilevel = spec.bilevel or Bilevel()
    f32 = {name: tensor.float().numpy() for name, tensor in t.items()}

    def numbers(name: str, role: str) -> np.ndarray:
        def of_groups(level: str) -> np.ndarray:
            rows = np.repeat(f32[f"{role}_{level}"], bilevel.rows, axis=0)[: spec.n]
            return np.repeat(rows, bilevel.groups, axis=1)

        codes = np.float32(bilevel.table)[t[name].int().numpy()] if bilevel.table else f32[name]
        codes = codes - of_groups("zeros") if bilevel.zeros else codes
        scaled = codes * of_groups("scales")
        return (scaled + of_groups("offsets") if bilevel.offsets else scaled)[:, :, None]

    scales, rows = numbers("scales", "scale"), f32["row_scales"][:, None, None] if spec.row_scales else 1
    values = spec.dtype.values().astype(np.float32)[t["codes"].numpy().astype(int) % spec.dtype.codes]
    values = values.reshape(spec.n, spec.groups, -1)
    if spec.zeros == "int":
        values = values - f32["zeros"][:, :, None]
    elif spec.zeros == "float":
        values = values - numbers("zeros", "zero")
    values = values * (rows * scales).astype(np.float32)
    if spec.zeros == "offset":
        values = values + (rows * numbers("offsets", "offset")).astype(np.float32)
    return values.astype(np.float32).reshape(spec.n, spec.k)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_values_saved_and_loaded(spec: MatmulSpec) -> None:
    _, tensors = inputs(spec, 1)
    w = pack(spec, **tensors)
    assert np.array_equal(w.dequantize().numpy(), by_hand(spec, dict(tensors)))
    loaded = PackedWeight.from_state_dict(w.state_dict())
    assert loaded.spec is w.spec and all(torch.equal(loaded[name], w[name]) for name in w)
    assert all(torch.equal(w.unpack_tensor(name).double(), t.double()) for name, t in tensors.items())
    assert MatmulSpec.from_dict(spec.to_dict()) == spec and w.nbytes == spec.bytes


@pytest.mark.parametrize("code", [*SCALE_CODES, TABLE_CODE])
@pytest.mark.parametrize("target", ["cpu", "emulator:sm_80"])
def test_every_code_of_scales(code: Any, target: str) -> None:
    """W is written out exactly: all codes of the scales and offsets, powers of two for the rest."""
    table = tuple((7 * place % 256) - 100.0 for place in range(256)) if code == TABLE_CODE else None
    bilevel = Bilevel(groups=4, offsets=True, table=table)
    spec = MatmulSpec(16, 512, "u1", 32, zeros="offset", scale=code, bilevel=bilevel, act="bf16")
    t = integers_of(code)
    every = torch.from_numpy(np.resize(t.values(), (2, 16, 16))).int()
    every[1] = every[1].flip(1)
    blocks = torch.ones(16, 4)
    w = pack(
        spec, torch.ones(16, 512, dtype=torch.int32), every[0], offsets=every[1],
        scale_scales=blocks / 4, offset_scales=blocks * -8, scale_offsets=blocks * 2, offset_offsets=blocks * 16,
    )  # fmt: skip
    values = torch.tensor(table)[every] if table else every
    expected = (values[0] / 4 - 8 * values[1] + 18).repeat_interleave(32, 1)
    assert len(every.unique()) == t.codes and torch.equal(w.dequantize(), expected)
    assert torch.equal(lowbit.compile(spec, target).dequantize(w), expected.bfloat16())


def test_spqr_whole() -> None:
    """With outliers, and columns in another order."""
    spec = replace(SPQR, outliers=True, permuted=True, act="f16", out="f16")
    x, tensors = inputs(spec, 3)
    w = pack(spec, **tensors)
    assert torch.equal(w.unpack_tensor("outliers").to_dense(), tensors["outliers"].to_dense())
    assert np.allclose(w.dequantize().numpy(), reference.dequantize(spec, **tensors), rtol=2**-20, atol=2**-20)
    for target in ("cpu", "emulator:sm_80"):
        assert matmul_is_right(lowbit.compile(spec, target)(x, w), spec, (x, tensors))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("target", ["cpu", "emulator:sm_90a"])
def test_targets(spec: MatmulSpec, target: str) -> None:
    x, tensors = inputs(spec, 20)
    mm, w = lowbit.compile(spec, target), pack(spec, **tensors)
    for m in (3,) if target != "cpu" else (1, 3, 20):
        dequantized = spec.act == "bf16" and m > (4 if target == "cpu" else 1)
        rounding = {"dequantized": dequantized, "rounded_zeros": target != "cpu" and m > 1}
        assert matmul_is_right(mm(x[:m], w), spec, (x[:m], tensors), **rounding)
    if spec.zeros == "offset":
        assert torch.equal(mm.dequantize(w), w.dequantize(torch.float16))


SCHEDULES = {
    "stages": Schedule(8, 1, 1, 2, 256, 3),
    "row_blocks": Schedule(8, 2, 1, 1, 256, 2, raw_codes=False),
    "splits": Schedule(1, 1, 2, 1, 256, 2, split_k=2),
    "wgmma": Schedule(16, 1, 4, 1, 256, 2, wgmma=True),
    "preload": Schedule(16, 1, 4, 1, 256, 1, wgmma=True, preload_weights=True),
    "per_warp": Schedule(64, 1, 8, 1, 256, 2, wgmma=True, refill="per_warp"),
    "cluster": Schedule(8, 1, 1, 1, 256, 2, split_k=2, cluster=2),
    "rounded": Schedule(128, 1, 4, 1, 256, 1, wgmma=True),
}


CASES = [  # half of all pairs
    (weight, schedule)
    for (i, weight), (j, schedule) in itertools.product(
        enumerate(("q4_k", "table", "spqr", "padded", "q2_k")), enumerate(SCHEDULES)
    )
    if (i + j // 2) % 2 == 0
]


@pytest.mark.parametrize(("weight", "choices"), CASES)
def test_schedules(weight: str, choices: str) -> None:
    """Blocks of groups that several steps share, and steps that have several; a last step with fewer."""
    spec, schedule = SPECS[weight], SCHEDULES[choices]
    if spec is PADDED:
        if schedule.wgmma:
            schedule = replace(schedule, wgmma=False, preload_weights=False, refill="before_mma", tokens=16)
        schedule = replace(schedule, step_k=128, num_stages=2)
    if spec is Q4_K:
        schedule = replace(schedule, step_k=64 if schedule.num_stages > 2 else 256)
    target = parse_target("sm_90a")
    check_schedule(spec, schedule, target)
    problem = inputs(spec, min(schedule.tokens, 17))
    kernel = compile_matmul(spec, target, schedule)
    y = run_matmul(kernel, spec, problem, racecheck=len(kernel.ptx) < 60_000)
    assert matmul_is_right(y, spec, problem, **KernelPlan(spec, schedule).rounding)
    assert kernel.launch.shared_bytes <= shared_bytes(spec, schedule)


def test_one_token_in_integers() -> None:
    spec = replace(Q2_K, group_size=128, k=1024, bilevel=Bilevel(groups=4))
    schedule = IntegerSchedule(1, 1, 1, 2, 256, 2)
    problem = inputs(spec, 1)
    y = run_matmul(compile_matmul(spec, parse_target("sm_80"), schedule), spec, problem, racecheck=True)
    assert matmul_is_right(y, spec, problem)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_dequantize_kernel(spec: MatmulSpec) -> None:
    problem = inputs(spec, 1)
    w = run_dequantize(compile_dequantize(spec, parse_target("sm_80")), spec, problem, racecheck=spec.n <= 24)
    assert dequantize_is_right(w, spec, problem)


def _exchanged(role: str) -> Any:
    """Reads the second level of the scales for that of zeros or offsets, and the other way round."""
    pairs = [("scale_" + part, f"{role}_{part}") for part in ("scales", "zeros")]
    other = dict(pairs) | {b: a for a, b in pairs}
    return lambda right: lambda self, name, block, layout, bilevel: right(self, other[name], block, layout, bilevel)


def _twice(right: Any) -> Any:
    return property(lambda self: 2 * right.fget(self))


def _without(slot: str) -> Any:
    def wrap(right: Any) -> Any:
        def two_level(self: Any, coded: Any, tile: Any, of_block: Any) -> Any:
            one = self.p.constant(1.0 if slot.endswith("scales") else 0.0, "f32", tile.layout)
            return right(self, coded, tile, lambda name, b: one if name == slot else of_block(name, b))

        return two_level

    return wrap


MUTATIONS = {
    "second level of scales and offsets exchanged": (Q4_K, GroupScales, "_of_blocks", _exchanged("offset")),
    "second level of scales and zeros exchanged": (SPQR, GroupScales, "_of_blocks", _exchanged("zero")),
    "codes of scales and zeros exchanged": (SPQR, ScaleConversion, "two_level", lambda right: lambda self, slot,
        *r: right(self, replace(slot, bit=3 - slot.bit), *r)),
    "second level of the block before": (Q4_K, Steps, "per_block", _twice),
    "offset of scales dropped": (TABLE, ScaleConversion, "two_level", _without("scale_offsets")),
    "table of scales forgotten": (TABLE, Program, "lookup_bytes", lambda right: lambda self, places, table: self.cast(
        places, "f32", "unsigned")),
    "scale of scales dropped": (Q6_K, ScaleConversion, "two_level", _without("scale_scales")),
    "zero of scales dropped": (SPQR, ScaleConversion, "two_level", _without("scale_zeros")),
    "zero of zeros dropped": (SPQR, ScaleConversion, "two_level", _without("zero_zeros")),
    "least code forgotten": (Q3_K, ScaleConversion, "two_level", lambda right: lambda self, slot, tile, of_block: right(
        self, replace(slot, code="u6"), tile, of_block)),
}  # fmt: skip


@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_mutations(mutation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with the second level read wrongly gives wrong numbers."""
    specs = [Q4_K, SPQR, TABLE]
    if mutation:
        spec, owner, name, wrap = MUTATIONS[mutation]
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
        specs = [spec]
    for spec in specs:
        problem = inputs(spec, 2)
        kernel = compile_matmul(spec, parse_target("sm_80"), Schedule(8, 1, 1, 1, 256, 1))
        assert matmul_is_right(run_matmul(kernel, spec, problem), spec, problem) == (mutation is None)


def second_levels(groups: list[int]) -> st.SearchStrategy[tuple[str, Bilevel]]:
    """Formats of scales, each with a second level."""
    zeros = st.sampled_from([{}, {"zeros": True}, {"offsets": True}])
    codes = st.sampled_from([*SCALE_CODES, "e4m3", TABLE_CODE])
    kinds = st.tuples(codes, st.sampled_from([1, 16]), st.sampled_from(groups), st.sampled_from(["f16", "f32"]), zeros)
    table = PRESETS["nf4_nested"]["bilevel"].table
    return kinds.map(lambda t: (t[0], Bilevel(*t[1:4], table=table if t[0] == TABLE_CODE else None, **t[4])))


@settings(max_examples=15)
@given(
    st.sampled_from(["u2", "u3", "u4", "i5", "f6e3m2", "nf4"]),
    st.sampled_from(["none", "float", "offset"]),
    second_levels([1, 2, 4]),
    st.sampled_from([(16, 4), (32, 8), (48, 4), (128, 4)]),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_any_cpu(
    weight: str, zeros: Any, second: tuple[Any, Bilevel], group: tuple[int, int], n: int, seed: int
) -> None:
    scale, bilevel = second
    spec = MatmulSpec(n, group[0] * group[1], weight, group[0], zeros=zeros, scale=scale, bilevel=bilevel, out="f32")
    x, tensors = inputs(spec, 3, seed)
    w = pack(spec, **tensors)
    assert np.array_equal(w.dequantize().numpy(), by_hand(spec, dict(tensors)))
    assert matmul_is_right(lowbit.compile(spec, "cpu")(x, w), spec, (x, tensors))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["u1", "u2", "u3", "u4", "u7", "u8", "i6", "f6e3m2", "nf4"]),
    st.sampled_from(["none", "float", "offset"]),
    second_levels([1, 2, 4, 8]),
    st.sampled_from([16, 17, 48, 64, 128]),
    st.integers(1, 3),
    st.sampled_from(["sm_80", "sm_90a"]),
    st.sampled_from([1, 8, 64]),
)
def test_any_kernel(
    weight: str, zeros: Any, second: tuple[Any, Bilevel], group: int, blocks: int, target: str, tile: int
) -> None:
    """The kernels that the rule chooses, with the race check."""
    scale, bilevel = second
    k = group * bilevel.groups * blocks
    spec = MatmulSpec(40, k, weight, group, zeros=zeros, scale=scale, bilevel=bilevel, out="f32")
    schedule = Artifacts(spec, parse_target(target), None).request(tile).schedule
    assert isinstance(schedule, Schedule)
    problem = inputs(spec, min(tile, 3))
    kernel = compile_matmul(spec, parse_target(target), schedule)
    y = run_matmul(kernel, spec, problem, racecheck=len(kernel.ptx) < 60_000)
    assert matmul_is_right(y, spec, problem, **KernelPlan(spec, schedule).rounding)


def test_shards() -> None:
    spec = replace(Q4_K, n=32, k=1024)
    w = pack(spec, **inputs(spec, 1)[1])
    for dim in (0, 1):
        parts = [w.shard(dim, i, 2) for i in range(2)]
        assert torch.equal(torch.cat([part.dequantize() for part in parts], dim), w.dequantize())
    with pytest.raises(PackError, match=r"k=1024 can't be cut into 8 parts of a multiple of 256"):
        w.shard(1, 0, 8)


def test_bits_per_weight() -> None:
    """A code takes a byte, but two of up to four bits share one."""
    large = {name: replace(spec, n=4096, k=4096) for name, spec in SPECS.items() if name != "padded"}
    bits = {name: spec.bytes * 8 / spec.n / spec.k for name, spec in large.items()}
    assert bits["q4_k"] == 4.625 and bits["q6_k"] == 6.5625 and bits["q3_k"] == 3.5625 and bits["q2_k"] == 2.625
    assert bits["spqr"] == 3.75 and bits["table"] == 4.25  # of k=512: with more columns fewer second levels
    assert MatmulSpec.preset("nf4_nested", 4096, 4096).bytes * 8 / 4096**2 == 4 + (8 + 2 * 32 / 16) / 64
    assert Bilevel(16, 1).lanes(Packing(8, 16, 64, 32)) == 2 and Bilevel(16, 1).lanes(Packing(4, 16, 64, 32)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bilevel": None}, r"scale='u6' is a code: it needs a second level, such as bilevel=Bilevel\(groups=8\)"),
        ({"scale": "f16"}, r"scale='f16' must be one of 'u3', .*, 'e4m3' with bilevel=; or drop bilevel="),
        ({"group_size": None}, r"group_size=None has one scale per row: bilevel= needs groups"),
        ({"k": 640}, r"bilevel: groups=8 must divide the 20 groups of a row; try 4"),
        ({"bilevel": {"block": 3}}, r"bilevel=.* must be a Bilevel, with the fields rows, .*, table, or None"),
        ({"bilevel": {"rows": 2}}, r"bilevel: rows=2 must be 1 or 16"),
        ({"bilevel": {"groups": 3}}, r"bilevel: groups=3 must be a power of two"),
        ({"bilevel": {"scale": "e4m3"}}, r"bilevel: scale='e4m3' must be one of 'f16', 'bf16', 'f32'"),
        ({"bilevel": {"zeros": 1}}, r"bilevel: zeros=1 must be True or False"),
        ({"bilevel": {"zeros": True, "offsets": True}}, r"bilevel: codes have zeros=True or offsets=True, not both"),
        ({"scale": "lut8"}, r"bilevel: table= has the 256 numbers of scale='lut8', and goes with it alone"),
        ({"bilevel": TABLE.bilevel}, r"bilevel: table= has the 256 numbers of scale='lut8', and goes with it alone"),
        ({"bilevel": {"table": [1.0] * 255}}, r"bilevel: table= must be 256 numbers, the values of codes of lut8"),
        ({"bilevel": {"table": ["x"] * 256}}, r"bilevel: table= must be numbers: could not convert"),
        ({"bilevel": {"table": [1e39] * 256}}, r"bilevel: table= must be finite numbers, within the range of f32"),
    ],
)  # fmt: skip
def test_wrong_specs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(Q4_K, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.full((24, 16), 64)}, r"scales\[0, 0\] = 64 must be in 0..63$"),
        ({"scales": torch.rand(24, 16)}, r"scales must be integers, not torch.float32; use .int\(\)$"),
        ({"scale_scales": None}, r"needs scale_scales; pass scale_scales="),
        ({"offset_scales": torch.ones(24, 3)}, r"offset_scales must be \[n / rows, .*groups\] = \[24, 2\]"),
        ({"offset_scales": torch.full((24, 2), 1e6)}, r"offset_scales\[0, 0\] = 1e\+06 overflows f16"),
        ({"scale_zeros": torch.ones(24, 2)}, r"has no scale_zeros"),
    ],
)  # fmt: skip
def test_wrong_tensors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PackError, match=message):
        pack(Q4_K, **{**inputs(Q4_K, 1)[1], **change})


def test_a_damaged_file() -> None:
    w = pack(Q4_K, **inputs(Q4_K, 1)[1])
    damaged = {**w.state_dict(), "scales": torch.full_like(w.scales, 64)}
    with pytest.raises(PackError, match="saved scales hold 64 at 0: codes of u6 must be at most 63"):
        PackedWeight.from_state_dict(damaged)
