"""Scales folded into weights of 8 bits: which numbers are multiplied, the kernels that multiply them in the emulator
and on the CPU, and what does not go together with it.

Sums are compared to the last bit where f32 holds all of them, as in `test_eight_bit`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import test_eight_bit_prefill as wgmma
import test_eight_bit_prefill_mma as mma_sync
import test_prefill_resources as resources
import torch
from eight_bit_problems import FITTING, Problem, whole_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import PackError, SpecError
from lowbit.dialect.formats.byte_codes import MOST_UNFOLDED
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.eight_bit_prefill.schedule import EightBitPrefillSchedule as Schedule
from lowbit.passes.kernels.eight_bit_prefill.weight_bytes import FoldedBytes
from lowbit.passes.kernels.persistent.fragments import Fragments
from lowbit.passes.kernels.persistent.weight_registers import WeightRegisters
from lowbit.passes.lowering import byte_numbers
from lowbit.passes.scheduling.choice import schedule_for, token_tiles
from lowbit.passes.targets import parse_target
from lowbit.pylib import reference
from lowbit.pylib.build.kernels import Artifacts
from lowbit.pylib.reference import agrees, matmul, random_inputs, tolerance
from lowbit.pylib.tune.trial import rounding
from lowbit.pylib.weights.packed import PackedWeight, pack

FOLDED: dict[str, Any] = {"compute": "f8e4m3", "fold_scales": True}
IN_I8: dict[str, Any] = {"compute": "i8", "fold_scales": True}
BOTH = pytest.mark.parametrize("folded", [FOLDED, IN_I8], ids=lambda folded: folded["compute"])
HOPPER, ADA, AMPERE = "emulator:sm_90a", "emulator:sm_89", "emulator:sm_80"


def folded_problem(spec: MatmulSpec, m: int) -> Problem:
    """Scales are a power of two times 4, 5, 6 or 7, so that products with codes have to be rounded."""
    x, x_scales, codes, _, zeros = whole_problem(spec, m)
    rng = np.random.default_rng(1)
    drawn = rng.integers(4, 8, (spec.n, spec.groups)) * np.exp2(rng.integers(-1, 2, (spec.n, spec.groups)))
    if spec.scale == "e8m0":
        drawn = np.exp2(np.log2(drawn).round())
    if spec.dtype.exponent > 3:  # and the same scale for all of a row, where codes have so wide a range
        drawn = np.broadcast_to(drawn[:, :1], drawn.shape).copy()
    return x, x_scales, codes, torch.from_numpy(drawn).float(), zeros


def tensors_of(problem: Problem) -> dict[str, Tensor]:
    codes, scales, zeros = problem[2:]
    return {"codes": codes, "scales": scales} | ({} if zeros is None else {"zeros": zeros})


def expected(spec: MatmulSpec, problem: Problem) -> Tensor:
    """y of the definition: the weight without the scale of its row is rounded to 8 bits."""
    x, x_scales = problem[0].double(), problem[1].double()
    w = reference.folded_weight(spec, tensors_of(problem))
    return ((x * x_scales[:, None]) @ torch.from_numpy(w).T).float()


# -- what is multiplied


def test_pack_chooses_powers_of_two() -> None:
    """The least with which no weight of a row is beyond 448; the weight is what it was."""
    spec = MatmulSpec(5, 64, "u4", 32, zeros="int", **FOLDED)
    scales = torch.tensor([[0.01, 0.02], [448 / 8, 1.0], [-449 / 8, 1.0], [0.0, 0.0], [3e-5, 6e4]])
    plain = replace(spec, compute=None, fold_scales=False, row_scales=False)
    codes = torch.randint(0, 16, (5, 64))
    zeros = torch.tensor([[7, 8]] * 5)
    w = pack(spec, codes, scales, zeros=zeros)
    rows, stored = w.unpack_row_scales(), w.unpack_scales().float()
    assert rows is not None and torch.equal(torch.frexp(rows)[0], torch.full((5,), 0.5))
    largest = (stored.abs() * 8).amax(1)
    assert (largest <= 448).all() and (largest[[0, 1, 2, 4]] > 224).all()
    assert rows[1:4].tolist() == [1.0, 2.0, 1.0]
    kept = slice(0, 4)  # the last row has a scale that becomes a subnormal number
    assert torch.equal(w.dequantize()[kept], pack(plain, codes, scales, zeros=zeros).dequantize()[kept])


def test_pack_chooses_powers_of_two_for_integers() -> None:
    """The least with which no weight of a row is beyond 127. It goes when the type of products changes."""
    spec = MatmulSpec(4, 64, "u4", 32, zeros="int", **IN_I8)
    scales = torch.tensor([[0.01, 0.02], [127 / 8, 1.0], [-128 / 8, 1.0], [0.0, 0.0]])
    codes = torch.arange(16).repeat(4, 4)
    w = pack(spec, codes, scales, zeros=torch.full((4, 2), 8))
    rows, near = w.unpack_row_scales(), w.folded()
    assert rows is not None and rows[1:].tolist() == [1.0, 2.0, 1.0]
    integers = near / rows[:, None]
    assert torch.equal(integers, integers.round()) and integers.abs().amax(1).tolist()[1:] == [127.0, 64.0, 0.0]
    assert integers[0].abs().max() > 63
    floats = w.with_compute(**FOLDED)
    of_floats = floats.unpack_row_scales()
    assert of_floats is not None and of_floats[1:].tolist() == [0.5, 0.5, 1.0]
    for each in (floats, w):
        back = each.with_compute(**IN_I8)
        assert torch.equal(back.folded(), near) and torch.equal(back.dequantize(), w.dequantize())


def test_row_scales_that_are_given_stay() -> None:
    spec = MatmulSpec(3, 64, "f4e2m1", 32, scale="e4m3", **FOLDED)
    rows = torch.tensor([0.3, 5.0, 1e-3])
    scales = torch.tensor([[1.0, 0.5], [448.0, 2.0], [0.25, 2.0]])
    w = pack(spec, torch.randint(0, 16, (3, 64)), scales, row_scales=rows)
    found = w.unpack_row_scales()
    assert found is not None
    powers = (found / rows).log2()
    assert torch.equal(powers, powers.round()) and powers[1] == 3.0  # 6 * 448 is beyond 448 by 2^3


@given(st.integers(0, 2**32 - 1), st.sampled_from(["u4", "i3", "u1", "f4e2m1", "f8e4m3"]), st.integers(-12, 8))
@settings(max_examples=30, deadline=None)
def test_folded_weights_are_the_nearest_numbers(seed: int, weight: str, power: int) -> None:
    """By the definition in float64, and never off by more than half of the spacing at their size."""
    spec = MatmulSpec(6, 64, weight, 32, **FOLDED)
    rng = np.random.default_rng(seed)
    t = dtype(weight)
    codes = t.encode(rng.standard_normal((6, 64)) * min(t.max, 4.0))
    codes = torch.from_numpy(t.decode(codes) if t.kind == "int" else codes).to(torch.int16)
    scales = torch.from_numpy(rng.uniform(0.5, 2.0, (6, 2)) * 2.0**power).half()
    w = pack(spec, codes, scales)
    near, exact, rows = w.folded(), w.dequantize(), w.unpack_row_scales()
    assert rows is not None
    np.testing.assert_array_equal(near.numpy(), reference.folded_weight(spec, {"codes": codes, "scales": scales}))
    bytes_ = near / rows[:, None]
    assert torch.equal(bytes_, bytes_.to(torch.float8_e4m3fn).float())
    spacing = torch.exp2(exact.abs().clamp(min=2.0**-6 * rows[:, None]).log2().floor() - 3)
    assert ((near - exact).abs() <= (0.5 + 2.0**-8) * spacing).all()


@pytest.mark.parametrize("scale", ["f16", "e4m3"])
@pytest.mark.parametrize("weight", ["f8e5m2", "f6e5m0", "f8e6m1", "f8e7m0"])
def test_wide_formats_are_brought_down_from_the_values_that_codes_have(weight: str, scale: Any) -> None:
    """Their largest values are up to 2^64: brought down from these, all scales would be 0, or all weights."""
    spec = MatmulSpec(20, 128, weight, 32, scale=scale, **FOLDED)
    without = replace(spec, compute=None, fold_scales=False, row_scales=False)
    _, tensors = random_inputs(without, 1)
    plain = pack(without, **tensors)
    for w in (pack(spec, **tensors), plain.with_compute(**FOLDED)):
        assert (w.dequantize() - plain.dequantize()).norm() < plain.dequantize().norm() / 20
        assert (w.folded() - w.dequantize()).norm() < w.dequantize().norm() / 20


def test_scales_that_their_type_loses() -> None:
    codes = torch.tensor([0, 1, 2, 3]).repeat(2, 16)
    spec = MatmulSpec(2, 64, "lut2", 32, table=[0.0, 1.0, 2.0, 3e12], **FOLDED)
    scales = torch.tensor([[1.0, 2.0], [1.0, 0.5]])
    with pytest.raises(PackError, match=r"takes 2\^34 from the scales of row 0, .* f16 holds; use a wider scale"):
        pack(spec, codes, scales)
    with pytest.raises(PackError, match=r"codes\[0, 0\] = 4 must be in 0..3"):
        pack(spec, codes + 4, scales)
    with torch.device("meta"):
        w = pack(replace(spec, scale="bf16"), codes, scales)
    assert torch.equal(w.dequantize()[0, :4], torch.tensor([0.0, 1.0, 2.0, 3e12]))


def test_scales_that_are_powers_of_two_lose_nothing() -> None:
    """MX formats, but for numbers that become subnormal."""
    spec = MatmulSpec.preset("mxfp4", 16, 128, **FOLDED)
    _, tensors = random_inputs(spec, 1)
    w = pack(spec, **tensors)
    assert torch.equal(w.folded(), w.dequantize())


def test_one_scale_per_row_is_not_folded() -> None:
    spec = MatmulSpec(16, 128, "f8e4m3", **FOLDED)
    assert not spec.folds and not spec.row_scales
    w = pack(spec, *(t for t in random_inputs(spec, 1)[1].values()))
    assert torch.equal(w.folded(), w.dequantize())


# -- kernels


def spec_of(weight: str, number: int, folded: dict[str, Any] = FOLDED) -> MatmulSpec:
    """A small spec of a format: group sizes and zeros take turns."""
    group = (256 if dtype(weight).bits in (3, 5, 6, 7) else 32, 128, None, 256)[number % 4]
    zeros = "int" if weight[0] in "ui" and number % 2 else "none"
    group = 256 if group and dtype(weight).bits in (3, 5, 6, 7) else group
    return MatmulSpec(40, 1024, weight, group, zeros=zeros, out="f32", **folded)


@pytest.mark.parametrize(("compute", "weight"), FITTING)
def test_every_format_to_the_last_bit(compute: str, weight: str) -> None:
    number = [name for of, name in FITTING if of == compute].index(weight)
    spec = spec_of(weight, number, IN_I8 if compute == "i8" else FOLDED)
    problem = folded_problem(spec, m=5)
    assert torch.equal(wgmma.run(spec, wgmma.SMALL, problem), expected(spec, problem))


CASES: list[tuple[dict[str, Any], Schedule, int]] = [
    # A tile after the other, rows and tokens that end inside of tiles, columns inside of a round.
    ({"n": 300, "k": 1120, "group_size": 32}, Schedule(16, num_stages=8), 70),
    ({"n": 130, "k": 1024, "group_size": 64, "zeros": "int"}, Schedule(32), 40),
    ({"n": 136, "k": 1024, "group_size": 1024, "act": "bf16"}, Schedule(48), 50),
    ({"n": 128, "k": 1280, "group_size": 256, "scale": "f32"}, Schedule(32, 256), 40),
    ({"n": 128, "k": 1536, "scale": "bf16", "zeros": "int", "act": "bf16"}, Schedule(32), 20),
    ({"n": 128, "k": 1088, "group_size": 32, "scale": "e8m0", "weight": "f4e2m1"}, Schedule(64), 60),
    ({"n": 128, "k": 1024, "group_size": 32, "scale": "e4m3", "weight": "f4e2m1"}, Schedule(64, num_stages=8), 60),
    # Clusters, of which one block may be beyond the last row.
    ({"n": 300, "k": 1024, "zeros": "int"}, Schedule(32, cluster=2), 70),
    ({"n": 300, "k": 1088, "group_size": 64}, Schedule(32, split_k=2), 70),
]  # fmt: skip


IN_INTEGERS = [(choices | IN_I8, schedule, m) for choices, schedule, m in CASES[1::2]]


@pytest.mark.parametrize(("choices", "schedule", "m"), CASES + IN_INTEGERS, ids=str)
def test_small_sizes_to_the_last_bit(choices: dict[str, Any], schedule: Schedule, m: int) -> None:
    spec = MatmulSpec(**{"weight": "u4", "group_size": 128, "out": "f32", **FOLDED, **choices})
    problem = folded_problem(spec, m)
    assert torch.equal(wgmma.run(spec, schedule, problem), expected(spec, problem))


BY_MMA_SYNC = [*product(("u4", "i3", "f6e3m2"), (FOLDED, IN_I8)), ("f8e4m3", FOLDED)]


@pytest.mark.parametrize(("weight", "folded"), BY_MMA_SYNC, ids=str)
def test_mma_sync_to_the_last_bit(weight: str, folded: dict[str, Any]) -> None:
    spec = spec_of(weight, 1, folded)
    problem = folded_problem(spec, m=40)
    assert torch.equal(mma_sync.run(spec, mma_sync.SMALL, problem), expected(spec, problem))


def test_rounding_shows() -> None:
    """What these tests compare with is not the weight itself."""
    spec = spec_of("u4", 1)
    given = tensors_of(folded_problem(spec, 5))
    assert (reference.folded_weight(spec, given) != reference.dequantize(spec, **given)).mean() > 0.2


FROM_129 = [(HOPPER, FOLDED), (ADA, FOLDED), ("cpu", FOLDED), (HOPPER, IN_I8), (AMPERE, IN_I8), ("cpu", IN_I8)]


@pytest.mark.parametrize(("target", "folded"), FROM_129, ids=str)
def test_from_129_tokens_on(target: str, folded: dict[str, Any]) -> None:
    """As a user calls it. Up to 128 tokens scales multiply sums, and weights are not rounded."""
    spec = MatmulSpec(40, 512, "u4", 128, zeros="int", bias=True, **folded)
    mm = lowbit.compile(spec, target)
    x, tensors = random_inputs(spec, MOST_UNFOLDED + 1)
    w = mm.pack(**tensors)
    few, many = mm(x[:MOST_UNFOLDED], w), mm(x, w)
    for y, m in ((few, MOST_UNFOLDED), (many, MOST_UNFOLDED + 1)):
        folds = rounding(mm, m).get("folded", False)
        assert folds == (m > MOST_UNFOLDED)
        given = {name: t for name, t in tensors.items() if name != "bias"}
        weight = reference.folded_weight(spec, given) if folds else reference.dequantize(spec, **given)
        right = reference.multiplied(spec, x[:m]) @ weight.T + tensors["bias"].double().numpy()
        assert np.abs(y.double().numpy() - right).max() <= 2.0**-10 * np.abs(right).max()
        assert agrees(y, matmul(spec, x[:m], **tensors), tolerance(spec, x[:m], **tensors, **rounding(mm, m))).all()
    assert not torch.equal(few, many[:MOST_UNFOLDED])


def test_kernels_up_to_128_tokens_are_those_without_folding() -> None:
    target = parse_target("sm_90a")
    for n, k in (4096, 4096), (28672, 4096):
        spec = MatmulSpec(n, k, "u4", 128, zeros="int", **FOLDED)
        plain = replace(spec, fold_scales=False)
        few = [tile for tile in token_tiles(plain, target) if tile <= MOST_UNFOLDED]
        assert few == [tile for tile in token_tiles(spec, target) if tile <= MOST_UNFOLDED]
        assert all(schedule_for(spec, tile, target) == schedule_for(plain, tile, target) for tile in few)
        kernels = Artifacts(spec, target, None)
        assert kernels.request(MOST_UNFOLDED).spec == plain and kernels.request(256).spec == spec


@pytest.mark.parametrize("target", [HOPPER, "cpu"])
@BOTH
def test_rows_of_zeros_and_of_what_is_no_number(target: str, folded: dict[str, Any]) -> None:
    spec = MatmulSpec(24, 256, "u4", 128, out="f32", **folded)
    codes, scales = torch.randint(0, 16, (24, 256)), torch.rand(24, 2) + 0.1
    scales[5] = 0.0
    scales[6, 0] = 0.0
    x = torch.randn(140, 256).half()
    x[3], x[4, 7], x[9, 255] = 0.0, torch.nan, -torch.inf
    mm = lowbit.compile(spec, target)
    y = mm(x, mm.pack(codes, scales))
    bad = torch.zeros(140, dtype=torch.bool)
    bad[[4, 9]] = True
    assert y[bad].isnan().all() and y[~bad].isfinite().all()
    assert not y[3].any() and not y[~bad][:, 5].any() and y[~bad][:, 6].any()


@pytest.mark.parametrize("target", [HOPPER, "cpu"])
@BOTH
def test_rows_of_any_size(target: str, folded: dict[str, Any]) -> None:
    """Rows of large and of small scales are as exact as each other; in a row, small groups lose bits beside large."""
    spec = MatmulSpec(48, 256, "i4", 64, scale="f32", out="f32", **folded)
    codes = torch.randint(-8, 8, (48, 256))
    scales = (1 + torch.rand(48, 4)) * torch.exp2(torch.arange(48.0) - 24)[:, None]
    scales[:, 1] *= 2.0**-30  # of which nothing is left
    x = torch.randn(130, 256).half()
    mm = lowbit.compile(spec, target)
    w = mm.pack(codes, scales)
    assert not w.folded()[:, 64:128].any()
    right = torch.from_numpy(reference.multiplied(spec, x)) @ w.folded().double().T
    assert ((mm(x, w) - right).abs() <= 1e-6 * right.abs().amax(0)).all()


def test_values_that_are_no_numbers() -> None:
    """A code of NaN makes NaN of its row of the weight, for every token."""
    spec = MatmulSpec(16, 256, "f8e4m3", 128, out="f32", **FOLDED)
    codes = torch.randint(0, 0x70, (16, 256))
    codes[3, 5] = 0x7F
    w = pack(spec, codes, torch.ones(16, 2))
    for target in (HOPPER, "cpu"):
        y = lowbit.compile(spec, target)(torch.ones(130, 256).half(), w)
        assert y[:, 3].isnan().all() and y[:, :3].isfinite().all()


OTHERS: list[MatmulSpec] = [
    MatmulSpec(24, 256, "nf4", 64, out="f32", **FOLDED),
    MatmulSpec(24, 512, "u8", 128, zeros="int", out="f32", **FOLDED),
    MatmulSpec(24, 512, "u5", 256, zeros="float", act="bf16", out="f32", **FOLDED),
    MatmulSpec(24, 256, "f8e5m2", 32, zeros="offset", act="bf16", out="f32", **FOLDED),
    MatmulSpec(24, 512, "f7e5m1", 256, scale="f32", out="f32", **FOLDED),
    MatmulSpec(24, 512, "lut3", 256, scale="f32", table=(1e5, 0.3, -2e4, 7, 1, 2, 3, 4), out="f32", **FOLDED),
    MatmulSpec(32, 512, "u3", 256, "float", "u3", bilevel=Bilevel(16, 1, zeros=True), out="f32", **FOLDED),
    *(MatmulSpec.preset(name, 24, 512, out="f32", **FOLDED) for name in ("q2_k", "q4_k", "q6_k", "iq4_xs", "nvfp4")),
]


INTEGERS = [replace(spec, compute="i8") for spec in OTHERS if spec.weight not in ("f8e5m2", "u8")]


@pytest.mark.parametrize("spec", OTHERS + INTEGERS, ids=str)
@pytest.mark.parametrize("target", [HOPPER, "cpu"])
def test_formats_that_no_other_kernel_multiplies(spec: MatmulSpec, target: str) -> None:
    """Every format, kind of zeros and second level, for any number of tokens; sums are in f32."""
    mm = lowbit.compile(spec, target)
    for m in (3, 130) if target == "cpu" else (3,):
        x, tensors = random_inputs(spec, m)
        w = mm.pack(**tensors)
        np.testing.assert_allclose(w.dequantize().numpy(), reference.dequantize(spec, **tensors), rtol=2e-6, atol=1e-6)
        right = reference.multiplied(spec, x) @ reference.folded_weight(spec, tensors).T
        assert np.linalg.norm(mm(x, w).numpy() - right) <= 2e-5 * np.linalg.norm(right)
        assert rounding(mm, m)["folded"]


@pytest.mark.parametrize("n", [1, 16, 40])
def test_rows_that_share_a_second_level_may_be_cut(n: int) -> None:
    """The last block has as many rows as are left."""
    spec = MatmulSpec.preset("spqr", n, 64, permuted=False, outliers=False, **FOLDED)
    _, tensors = random_inputs(spec, 1)
    w = pack(spec, **tensors).dequantize().numpy()
    np.testing.assert_allclose(w, reference.dequantize(spec, **tensors), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("weight", ["u4", "nf4"])
def test_gpus_without_the_type_are_refused(weight: str) -> None:
    with pytest.raises(SpecError, match="compute='f8e4m3' needs sm_89 or later, the target is emulator:sm_86; use"):
        lowbit.compile(MatmulSpec(24, 256, weight, 64, **FOLDED), "emulator:sm_86")


@pytest.mark.parametrize("name", ["q4_k", "nvfp4"])
def test_other_formats_with_mma_sync(name: str) -> None:
    spec = MatmulSpec.preset(name, 24, 512, out="f32", **FOLDED)
    x, tensors = random_inputs(spec, 40)
    right = reference.multiplied(spec, x) @ reference.folded_weight(spec, tensors).T
    mm = lowbit.compile(spec, ADA)
    assert np.linalg.norm(mm(x, mm.pack(**tensors)).numpy() - right) <= 2e-5 * np.linalg.norm(right)


def test_one_family_for_all_tokens() -> None:
    mm = lowbit.compile(MatmulSpec(8192, 8192, "nf4", 64, **FOLDED), HOPPER)
    assert {mm.choices.launches(m)[0].family for m in (1, 16, 100, 128, 129, 5000)} == {"eight_bit_prefill"}
    assert all(len(mm.choices.launches(m)) == 1 for m in (1, 33, 128, 129, 100000))
    with pytest.raises(SpecError, match="take an EightBitPrefillSchedule"):
        lowbit.compile(mm.spec, HOPPER, schedule=EightBitSchedule(8, 1, 4, 1, 128))


@pytest.mark.parametrize("target", [HOPPER, ADA])
def test_every_spec_has_kernels(target: str) -> None:
    """Every format and kind of scale, with zeros and groups in turn, for any number of tokens."""
    gpu = parse_target(target)
    for (i, weight), j in product(enumerate(resources.FORMATS), range(len(resources.SCALES))):
        group = (16, 1536, 64, 512, 32, 768, 128)[(i + 3 * j) % 7]
        spec = replace(resources.folded_spec(weight, i, j), n=1000, k=12288, group_size=group)
        kernels = Artifacts(spec, gpu, None)
        assert all(kernels.token_tiles(m) for m in (1, 16, 17, 128, 129, 70000)), spec


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "order of columns": (byte_numbers, "_ROWS", lambda rows: {t: partial(exchanged, row) for t, row in rows.items()}),
    "group": (FoldedBytes, "_as_round", lambda right: lambda self, held: swapped(right(self, held))),
    "scale of rows": (Fragments, "_in_type_of_x", lambda right: lambda self, numbers, *others: numbers),
}


def exchanged(row: Any, near: Any, far: Any) -> Any:
    """What `row` makes of two pairs of columns in the other order."""
    return row(far, near)


def swapped(registers: WeightRegisters) -> WeightRegisters:
    """The same with the scales of another group."""
    first, second, *others = registers.scales["scales"]
    return replace(registers, scales={**registers.scales, "scales": [second, first, *others]})


@pytest.mark.parametrize("what", MUTATIONS)
@BOTH
def test_mutations_are_found(what: str, folded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrap = MUTATIONS[what]
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    spec = MatmulSpec(64, 1024, "i4", 64, out="f32", **folded)
    problem = folded_problem(spec, 20)
    assert not torch.equal(wgmma.run(spec, Schedule(32), problem), expected(spec, problem))


# -- which kernels, and what goes on disk


@pytest.mark.parametrize("group", [128, None])
def test_schedules_have_no_parts(group: int | None) -> None:
    """Sums stay in the tensor core, which multiplies all tokens of a tile at once; so that takes less time."""
    spec = MatmulSpec(8192, 8192, "u4", group, **FOLDED)
    usual = replace(spec, fold_scales=False)
    for m in (256, 512, 4096):
        found = {each: wgmma.FAMILY.candidates(each, m, wgmma.HOPPER) for each in (spec, usual)}
        assert {(s.parts, s.banks) for s in found[spec]} == {(1, 1)}
        times = {e: min(wgmma.FAMILY.predict(e, m, s, wgmma.HOPPER) for s in some) for e, some in found.items()}
        assert times[spec] < times[usual]
    with pytest.raises(SpecError, match="needs parts=1 and banks=1"):
        wgmma.FAMILY.check(spec, Schedule(32, parts=2), wgmma.HOPPER)


def test_a_saved_weight_is_the_same() -> None:
    spec = MatmulSpec(32, 256, "u4", 128, zeros="int", **FOLDED)
    w = pack(spec, **random_inputs(spec, 1)[1])
    loaded = PackedWeight.from_state_dict(w.state_dict())
    assert loaded.spec is w.spec and torch.equal(loaded.folded(), w.folded())
    assert MatmulSpec.from_dict(spec.to_dict()) == spec
    with pytest.raises(PackError, match=r"was packed with compute='f8e4m3' \(not 'i8'\); load it with that spec"):
        PackedWeight.from_state_dict(w.state_dict(), replace(spec, compute="i8"))


def test_a_quantized_model() -> None:
    """`QuantConfig` hands the option on."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 64, dtype=torch.float16))
    usual = torch.nn.Sequential(torch.nn.Linear(256, 64, dtype=torch.float16))
    usual.load_state_dict(model.state_dict())
    config = lowbit.QuantConfig("u4", 128, compute="f8e4m3", fold_scales=True)
    assert lowbit.QuantConfig.from_dict(config.to_dict()) == config
    lowbit.quantize_(model, config)
    lowbit.quantize_(usual, replace(config, fold_scales=False))
    x = torch.randn(200, 256).half()
    y, exact = model(x), usual(x)
    assert model[0].spec.folds and torch.equal(model(x[:5]), usual(x[:5]))
    error = (y - exact).float().norm() / exact.float().norm()
    assert 0.01 < error < 0.04


# -- what does not go together

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"compute": None}, "fold_scales=True needs compute='f8e4m3' or 'i8'; name one"),
    (
        {"compute": "i8", "weight": "f8e4m3"},
        "fold_scales=True and compute='i8' multiply numbers, and 'f8e4m3' has codes that are none; use compute=",
    ),
    ({"compute": "i8", "weight": "f8e5m2", "fold_scales": False}, "not 'f8e5m2'; use one of them, or compute=None"),
    ({"weight": "nf4", "group_size": None}, "multiplies u1, .*, not 'nf4'; use one of them, or fold_scales=True and g"),
    ({"weight": "nf4", "fold_scales": False}, "not 'nf4'; use one of them, or fold_scales=True and groups, or co"),
    ({"group_size": 24, "k": 768}, "needs group_size=24 to be a multiple of 16 that divides"),
    (
        {"group_size": 16, "fold_scales": False},
        "needs group_size=16 to be a multiple of 32 that divides 64 or is a multiple of it; use one, or fold_scales=",
    ),
    ({"weight": "u8", "zeros": "int", "group_size": 160, "k": 800}, "group_size=160 to be a divisor of 1536 or"),
    ({"outliers": True}, "has no outliers=True"),
    ({"fold_scales": 1}, "fold_scales=1 must be True or False"),
    (
        {"act": "bf16", "scale": "e4m3", "zeros": "float"},
        "fold_scales=True with scale='e4m3' and zeros='float' needs act='f16', in which kernels read such zeros; or sc",
    ),
    ({"act": "bf16", "scale": "e8m0", "zeros": "offset"}, "scale='e8m0' and zeros='offset' needs act='f16'"),
]


@pytest.mark.parametrize(("choices", "message"), REFUSED, ids=str)
def test_wrong_specs_name_the_fix(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        MatmulSpec(**{"n": 32, "k": 256, "weight": "u4", "group_size": 128, **FOLDED, **choices})


def test_scales_that_are_not_finite() -> None:
    spec = MatmulSpec(16, 64, "u4", 32, **FOLDED)
    scales = torch.ones(16, 2)
    scales[2, 1] = torch.inf
    with pytest.raises(PackError, match=r"scales\[2, 1\] = inf must be finite"):
        pack(spec, torch.zeros(16, 64, dtype=torch.uint8), scales)
