"""Activations of 8 bits: their definition, the kernel that makes them, and matmuls of them on every target.

Sums are compared to the last bit where all numbers are integers times powers of two that f32 holds, and in f32 within
the rounding of its additions elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.dialect.errors import PackError, SpecError, TargetError
from lowbit.dialect.formats import byte_codes
from lowbit.dialect.formats.byte_codes import COMPUTE, LARGEST, LEAST_PEAK, SUM_COLUMNS, Compute
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.packing import Packing, run_of
from lowbit.dialect.formats.raw_codes import zero_code
from lowbit.passes.kernels.eight_bit import kernel
from lowbit.passes.kernels.eight_bit.schedule import EightBitSchedule
from lowbit.passes.kernels.quantize.family import default_schedule, quantize_spec
from lowbit.passes.kernels.quantize.schedule import QuantizeSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.lowering import byte_numbers
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.target import parse_target
from lowbit.pylib.activation import VALUES, in_column_order, quantize_in_torch, quantize_rows
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.operator_calls import OperatorCalls
from lowbit.pylib.reference import agrees, matmul, multiplied, random_problem, tolerance
from lowbit.pylib.runtime.matmul_runtimes import MatmulRuntimes
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import pack

HOPPER, ADA, AMPERE = "emulator:sm_90a", "emulator:sm_89", "emulator:sm_80"
FITTING = [(compute, name) for compute in COMPUTE for name in byte_codes.fitting_names(compute)]
Problem = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # x of 8 bits, its scales, codes, scales, zeros


# -- the definition


def rows(*values: float, k: int = 64) -> Tensor:
    """A row of these numbers and then zeros."""
    return torch.tensor([*values, *[0.0] * (k - len(values))]).view(1, k)


@pytest.mark.parametrize("compute", COMPUTE)
@given(st.lists(st.floats(-65504, 65504, width=16), min_size=1, max_size=32))
@settings(max_examples=100, deadline=None)
def test_values_are_the_nearest(compute: Compute, numbers: list[float]) -> None:
    """Rounded to nearest even, with the largest |x| of a row at the largest value."""
    x = rows(*numbers).half()
    values, scales = quantize_rows(x, compute)
    peak = max(float(x.abs().max()), LEAST_PEAK)
    factor = np.float32(1.0 / LARGEST[compute])
    assert scales.item() == np.float32(peak) * factor
    exact = x.float().numpy() * (np.float32(1.0) / scales.numpy())[:, None]
    if compute == "i8":
        expected = np.rint(exact)
    else:
        t = dtype("f8e4m3")
        expected = t.decode(t.encode(np.clip(exact, -448, 448)))
    np.testing.assert_array_equal(values.float().numpy(), expected)
    if x.any():
        assert values.float().abs().max() == LARGEST[compute]


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("act", [torch.float16, torch.bfloat16])
def test_rows_of_zeros_and_of_what_is_no_number(compute: Compute, act: torch.dtype) -> None:
    x = torch.cat([rows(), rows(-0.0), rows(1.0, torch.nan), rows(-torch.inf, 2.0), rows(3.0)]).to(act)
    values, scales = quantize_rows(x, compute)
    assert not values[:2].float().any() and (scales[:2] > 0).all()
    y = values.float() * scales[:, None]
    assert y[2:4].isnan().any(1).all() and y[[0, 1, 4]].isfinite().all()


def test_rows_of_the_least_numbers() -> None:
    """A scale has a reciprocal: bf16 goes down to where f32 ends."""
    x = torch.cat([rows(2.0**-133), rows(2.0**-100), rows(2.0**127)]).bfloat16()
    for compute in COMPUTE:
        values, scales = quantize_rows(x, compute)
        assert (scales.reciprocal() < torch.inf).all()
        assert values.float().abs().amax(1).tolist() == [0.0, LARGEST[compute], LARGEST[compute]]


@pytest.mark.parametrize("compute", COMPUTE)
def test_the_order_of_bytes_is_undone(compute: Compute) -> None:
    values, scales = quantize_rows(torch.randn(2, 3, 96).half(), compute)
    q = lowbit.quantize_activation(values, compute, scales=scales)
    assert torch.equal(in_column_order(q.values).view(torch.int8), values.view(torch.int8))
    assert torch.equal(q.sums, values.float().unflatten(-1, (3, SUM_COLUMNS)).sum(-1))
    assert torch.equal(q.dequantize(), values.float() * scales[..., None])
    assert q.shape == (2, 3, 96)


@pytest.mark.parametrize(("compute", "name"), FITTING)
def test_moves_make_the_bytes(compute: Compute, name: str) -> None:
    """Of every code in every register of a run: the byte is its value, times a power of two, plus the offset."""
    t = dtype(name)
    run = run_of(t.bits)
    stored = np.arange(t.codes)
    for number in range(len(run)):
        words = np.zeros((t.codes, 1 + max(piece.word for pieces in run for piece in pieces)), np.uint32)
        for piece in run[number]:
            field = (stored >> piece.low & (1 << piece.bits) - 1) << piece.shift
            words[:, piece.word] |= (field * 0x10001).astype(np.uint32)
        for which in range(2):
            made = np.zeros(t.codes, np.uint32)
            registers = [number if i == which else 0 for i in range(2)]
            for of, word, shift, mask in byte_codes.moves(t, compute, registers):
                if of == which:
                    moved = words[:, word] >> shift if shift >= 0 else words[:, word] << -shift
                    made |= moved & np.uint32(mask)
            assert (made == (made >> 8 * which & 0xFF) * (0x10001 << 8 * which)).all()
            byte = (made >> 8 * which & 0xFF).astype(np.uint8)
            numbers = byte.astype(float) if compute == "i8" else dtype("f8e4m3").values()[byte]
            values = stored - zero_code(t) if t.kind == "int" else t.values()
            expected = (values + zero_code(t)) * 2.0 ** -byte_codes.byte_exponent(t, compute)
            np.testing.assert_array_equal(numbers, expected)


def test_which_formats_fit() -> None:
    assert byte_codes.fitting_names("i8") == tuple(f"{kind}{bits}" for kind in "ui" for bits in range(1, 9))
    fp8 = byte_codes.fitting_names("f8e4m3")
    assert {"u4", "i4", "f4e2m1", "f8e4m3", "f6e3m2"} < {*fp8} and not {"u5", "i5", "nf4", "f8e5m2", "f6e1m4"} & {*fp8}


# -- the kernel that quantizes


@pytest.mark.parametrize("act", ["f16", "bf16"])
@pytest.mark.parametrize("compute", COMPUTE)
def test_the_kernel_makes_what_the_definition_says(compute: Compute, act: str) -> None:
    for m, k in ((5, 32), (3, 1056), (1, 9216)):
        x = torch.randn(m, k).to(TORCH[act]) * 3
        x[0], x[-1, 7] = 0.0, 300.0
        x[m // 2, -1] = torch.inf
        x[m // 3, 1] = torch.nan
        got, expected = lowbit.quantize_activation(x, compute, target=HOPPER), quantize_in_torch(x, compute)
        assert torch.equal(got.scales.isnan(), expected[1].isnan())
        fine = expected[1].isfinite()
        for a, b in zip(got.tensors, expected, strict=True):
            assert torch.equal(a[fine].view(torch.uint8), b[fine].view(torch.uint8))


def test_the_kernel_is_free_of_races() -> None:
    for threads in (32, 96):
        spec = quantize_spec(64 * 32, "f16", "i8")
        compiled = compile_kernel(request(spec, parse_target(ADA), QuantizeSchedule(threads)))
        x = torch.randn(2, spec.k).half()
        out = torch.zeros(2, spec.k, dtype=torch.int8), torch.zeros(2), torch.zeros(2, spec.k // SUM_COLUMNS)
        named = dict(zip(("x", "values", "scales", "sums"), map(memory, (x, *out)), strict=True))
        Emulator(compiled.ptx).run(compiled.launch, {**named, "m": 2}, racecheck=True)
        for got, expected in zip(out, quantize_in_torch(x, "i8"), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("k", [32, 4096, 8192, 16384, 65536])
def test_every_row_fits_a_block(k: int) -> None:
    schedule = default_schedule(quantize_spec(k, "f16", "i8"))
    pieces = k // SUM_COLUMNS
    assert schedule.threads <= 512 and -(-pieces // schedule.threads) <= 4


# -- matmuls


def memory(t: Tensor) -> np.ndarray:
    return t.view(-1).view(torch.uint8).numpy()


def whole_problem(spec: lowbit.MatmulSpec, m: int, seed: int = 0) -> Problem:
    """Every code, and numbers whose sums f32 holds: small whole x, scales that are powers of two."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.integers(-8, 9, (m, spec.k))).to(VALUES[spec.byte_type])
    x_scales = torch.from_numpy(np.exp2(rng.integers(-2, 3, m))).float()
    values = spec.dtype.values()
    finite = np.flatnonzero(np.isfinite(values))
    # Rows of large and of small numbers, and the same scale for all of a row, where a format has four exponent bits.
    wide = spec.dtype.exponent > 3
    kinds = [finite[np.abs(values[finite]) >= 1], finite[np.abs(values[finite]) < 1]] if wide else [finite, finite]
    drawn = [rng.permuted(np.resize(kind, (spec.n // 2, spec.k)), axis=1) for kind in kinds]
    codes = np.concatenate(drawn)
    codes = values[codes] if spec.dtype.kind == "int" else codes
    exponents = rng.integers(-2, 3, (spec.n, 1 if wide else spec.groups))
    scales = torch.from_numpy(np.exp2(exponents).repeat(spec.groups // exponents.shape[1], 1)).half()
    zeros = None
    if spec.zeros == "int":
        zeros = torch.from_numpy(rng.integers(int(values.min()), int(values.max()) + 1, (spec.n, spec.groups)))
    return x, x_scales, torch.from_numpy(codes.astype(np.int16)), scales, zeros


def exact(spec: lowbit.MatmulSpec, problem: Problem) -> Tensor:
    x, x_scales, *weight = problem
    product = matmul(replace(spec, compute=None), x.double() * x_scales[:, None].double(), *weight)
    return torch.from_numpy(product).float()


def spec_of(compute: Compute, weight: str, number: int) -> lowbit.MatmulSpec:
    """A small spec of a format: group sizes and zeros take turns."""
    bits = dtype(weight).bits
    group = (256 if bits in (3, 5, 6, 7) else 32, None, 256)[number % 3]
    zeros = "int" if weight[0] in "ui" and number % 2 else "none"
    return lowbit.MatmulSpec(40, 512, weight, group, zeros=zeros, compute=compute, out="f32")


@pytest.mark.parametrize(
    ("compute", "weight", "target"), [*((*each, HOPPER) for each in FITTING), *((*each, ADA) for each in FITTING[::3])]
)
def test_every_format_to_the_last_bit(compute: Compute, weight: str, target: str) -> None:
    spec = spec_of(compute, weight, FITTING.index((compute, weight)) + (target == ADA))
    problem = whole_problem(spec, m=5)
    x, x_scales, *weight_tensors = problem
    mm = lowbit.compile(spec, target)
    assert mm.kernel(5).schedule.wgmma is (target == HOPPER)
    assert torch.equal(mm(x, mm.pack(*weight_tensors), x_scale=x_scales), exact(spec, problem))


@pytest.mark.parametrize("target", ["cpu", AMPERE])
@pytest.mark.parametrize("weight", ["u4", "i3", "u8", "f8e4m3", "i4", "f6e2m3"])
def test_other_targets_to_the_last_bit(weight: str, target: str) -> None:
    compute: Compute = "i8" if target == AMPERE or weight == "u8" else "f8e4m3"
    if not byte_codes.fits(dtype(weight), compute):
        compute = "f8e4m3"
    spec = spec_of(compute, weight, 1 if weight[0] != "f" else 0)
    if target == AMPERE and compute == "f8e4m3":
        with pytest.raises(SpecError, match="compute='f8e4m3' needs sm_89 or later, the target is emulator:sm_80"):
            lowbit.compile(spec, target)
        return
    for m in (1, 5, 20):
        problem = whole_problem(spec, m)
        x, x_scales, *weight_tensors = problem
        mm = lowbit.compile(spec, target)
        assert torch.equal(mm(x, mm.pack(*weight_tensors), x_scale=x_scales), exact(spec, problem))


RANDOM = [
    lowbit.MatmulSpec(48, 512, "u4", 128, zeros="int", compute="f8e4m3", bias=True),
    lowbit.MatmulSpec(40, 384, "i4", compute="f8e4m3", act="bf16", out="f32"),
    lowbit.MatmulSpec(33, 512, "u8", 64, zeros="int", compute="i8", out="f32", scale="f32"),
    lowbit.MatmulSpec(16, 1024, "i2", None, compute="i8", bias=True, out="bf16"),
    lowbit.MatmulSpec(16, 256, "f4e2m1", 32, scale="e8m0", compute="f8e4m3", act="bf16"),
]


@pytest.mark.parametrize("target", ["cpu", HOPPER, ADA])
@pytest.mark.parametrize("spec", RANDOM, ids=str)
def test_numbers(spec: lowbit.MatmulSpec, target: str) -> None:
    """x as models have it, within the rounding of f32's additions: the emulator adds up f8e4m3 exactly."""
    mm = lowbit.compile(spec, target)
    for m in (1, 140) if target == "cpu" else (1, 9):
        x, *weight = random_problem(spec, m, seed=m)
        x[0, :3] = 0
        x[-1] = 0
        w, plain = mm.pack(*weight), replace(spec, compute=None)
        y = mm(x, w)
        assert y.shape == (m, spec.n) and y.dtype is TORCH[spec.out_dtype]
        seen = multiplied(spec, x)
        assert agrees(y, matmul(plain, seen, *weight), tolerance(plain, seen, *weight)).all()
        assert agrees(y, matmul(spec, x, *weight), tolerance(spec, x, *weight)).all()


@pytest.mark.parametrize("target", ["cpu", HOPPER])
def test_rows_that_are_no_numbers_stay_alone(target: str) -> None:
    spec = RANDOM[0]
    mm = lowbit.compile(spec, target)
    x, *weight = random_problem(spec, 4)
    x[1, 3], x[2, 5] = torch.nan, -torch.inf
    y = mm(x, mm.pack(*weight))
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


SCHEDULES = [
    EightBitSchedule(8, 1, 4, 2, 128, 2, wgmma=True, overlap_groups=True),
    EightBitSchedule(16, 2, 4, 1, 128, 3, wgmma=True),
    EightBitSchedule(32, 1, 4, 1, 128, 2, split_k=2, cluster=2, wgmma=True, refill="per_warp"),
    EightBitSchedule(128, 1, 4, 1, 128, 2, wgmma=True, refill="after_first_mma"),
    EightBitSchedule(8, 2, 2, 2, 64, 2),
    EightBitSchedule(16, 1, 1, 2, 256, 2, split_k=2),
]


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.tokens}-{s.row_blocks}x{s.warps_n}x{s.warps_k}")
def test_schedules_to_the_last_bit(schedule: EightBitSchedule, compute: Compute) -> None:
    """Also in random order of blocks, under the race check."""
    for group, zeros in ((64, "int"), (None, "none")):
        if group is None and schedule.overlap_groups:
            continue
        spec = lowbit.MatmulSpec(72, 704, "i4", group, zeros=zeros, compute=compute, out="f32")
        problem = whole_problem(spec, m=7)
        assert torch.equal(run(spec, schedule, problem), exact(spec, problem))


def run(spec: lowbit.MatmulSpec, schedule: EightBitSchedule, problem: Problem) -> Tensor:
    """y of one launch."""
    compiled = compile_kernel(request(spec, parse_target(HOPPER), schedule))
    x, x_scales, *weight = problem
    q = lowbit.quantize_activation(x, spec.byte_type, scales=x_scales)
    y = torch.full((len(x), spec.n), torch.nan)
    tensors = {**pack(spec, *weight), "x": q.values, "x_scales": q.scales, "x_sums": q.sums, "y": y}
    tensors["workspace"] = torch.zeros(compiled.launch.workspace_bytes, dtype=torch.uint8)
    blocks = list(np.ndindex(*compiled.launch.blocks({}, 1)))
    random.Random(0).shuffle(blocks)
    arguments = {name: memory(t) for name, t in tensors.items()}
    Emulator(compiled.ptx).run(compiled.launch, {**arguments, "m": len(x)}, racecheck=True, blocks=blocks)
    return y


def test_sums_of_fp8_are_promoted() -> None:
    """A product is of at most 128 columns, with one scale per row, too: tensor cores keep 13 bits of a sum."""
    spec = lowbit.MatmulSpec(64, 512, "u4", compute="f8e4m3")
    ptx = compile_kernel(request(spec, parse_target(HOPPER), EightBitSchedule(8, 1, 4, 1, 256, 2, wgmma=True))).ptx
    round_of_steps = ptx.count("k32.f32.e4m3.e4m3"), ptx.count("setp.ne.b32 add")
    assert round_of_steps == (8, 2)  # of eight instructions in 256 columns two begin from zero


# -- that these tests can fail


def no_sums(right: Any) -> Any:
    return lambda kernel, *_: kernel.p.constant(0.0, "f32", kernel.sum_layout)


def others(right: Any) -> Any:
    """Every register has the codes of the one beside it: rows g and g + 8 exchanged."""

    def places(t: Any, layout: Any) -> Any:
        found = right(t, layout)
        return [found[i ^ 1] for i in range(len(found))]

    return places


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "sums lost": (kernel._EightBitKernel, "_sums_of_x", no_sums),
    "columns exchanged": (byte_numbers, "moves", lambda right: lambda t, c, numbers: right(t, c, numbers[::-1])),
    "power of two": (kernel, "byte_exponent", lambda right: lambda t, c: right(t, c) + 1),
    "offset": (kernel, "zero_code", lambda right: lambda t: right(t) + 1),
    "rows exchanged": (byte_numbers, "places_of", others),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_mutations_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute: Compute = "f8e4m3" if what == "power of two" else "i8"
    spec = lowbit.MatmulSpec(64, 256, "i4", 64, compute=compute, out="f32")
    problem, schedule = whole_problem(spec, 7), EightBitSchedule(8, 1, 4, 1, 128, 2, wgmma=True)
    assert torch.equal(run(spec, schedule, problem), exact(spec, problem))
    owner, name, wrap = MUTATIONS[what]
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    assert not torch.equal(run(spec, schedule, problem), exact(spec, problem))


# -- calls


@pytest.fixture(params=["cpu", HOPPER])
def target(request: pytest.FixtureRequest) -> str:
    torch._dynamo.reset()
    return request.param


SPEC = lowbit.MatmulSpec(48, 256, "u4", 64, zeros="int", compute="i8")


def made(spec: lowbit.MatmulSpec, target: str, m: int = 5) -> tuple[Tensor, lowbit.Matmul, lowbit.PackedWeight]:
    x, *weight = random_problem(spec, m)
    mm = lowbit.compile(spec, target)
    return x, mm, mm.pack(*weight)


def test_one_activation_for_several_matmuls(target: str) -> None:
    x, first, w = made(SPEC, target)
    _, second, v = made(lowbit.MatmulSpec(16, 256, "u8", compute="i8"), target)
    q = lowbit.quantize_activation(x, "i8", target=target)
    assert torch.equal(first(q, w), first(x, w)) and torch.equal(second(q, v), second(x, v))


def test_shapes(target: str) -> None:
    x, mm, w = made(SPEC, target, m=135)
    y = mm(x, w)
    assert torch.equal(mm(x.view(3, 45, 256), w), y.view(3, 45, 48))
    assert torch.equal(mm(x.t().contiguous().t()[:4], w), y[:4])
    assert torch.equal(mm(x[7], w), y[7]) and mm(x[:0], w).shape == (0, 48)
    assert mm(x.view(3, 45, 256)[:, :0], w).shape == (3, 0, 48)
    values, scales = quantize_rows(x.view(3, 45, 256)[:, 5:7], "i8")
    assert torch.equal(mm(values, w, x_scale=scales), y.view(3, 45, 48)[:, 5:7])


def test_under_compile_and_with_a_gradient(target: str) -> None:
    """The gradient goes straight through the quantization: it is that of the dequantized weight."""
    x, mm, w = made(SPEC, target)

    def layer(x: Tensor) -> Tensor:
        q = lowbit.quantize_activation(x, "i8", target=target)
        return mm(q, w) + mm(x, w)

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    needs = x.clone().requires_grad_()
    dy = torch.randn(5, 48).half()
    mm(needs, w).backward(dy)
    assert torch.equal(needs.grad, dy @ mm.dequantize(w))
    arguments = (*lowbit.quantize_activation(x, "i8", target=target).tensors, list(w.tensors), mm.description)
    torch.library.opcheck(torch.ops.lowbit.matmul.quantized, arguments)
    torch.library.opcheck(torch.ops.lowbit.quantize_activation.default, (x, "i8", target))


def test_the_operator_refuses_parts_that_do_not_fit(target: str) -> None:
    """A saved graph calls the operator, with tensors that nothing else has looked at."""
    x, mm, w = made(SPEC, target)
    q = lowbit.quantize_activation(x, "i8", target=target)
    calls = OperatorCalls(SPEC, MatmulRuntimes(SPEC, mm.target, None))
    for _ in range(2):  # the second time the weight is known
        assert torch.equal(calls.quantized_matmul(q.tensors, w.tensors), mm(x, w))
    with pytest.raises(TargetError, match=r"x is on meta, but the weight is on cpu; use w.to\('meta'\)"):
        calls.quantized_matmul((q.values.to("meta"), q.scales, q.sums), w.tensors)
    with pytest.raises(SpecError, match="not of the same rows"):
        calls.quantized_matmul((q.values, q.scales[:2], q.sums), w.tensors)
    with pytest.raises(PackError, match="takes 3 tensors, codes, scales, zeros, not 2"):
        calls.quantized_matmul(q.tensors, w.tensors[:2])


def test_a_spec_keeps_its_type() -> None:
    spec = lowbit.MatmulSpec(48, 256, "u4", compute=torch.float8_e4m3fn)
    assert spec.compute == "f8e4m3" and lowbit.MatmulSpec.from_dict(spec.to_dict()) == spec
    assert lowbit.MatmulSpec(48, 256, "u4", compute="int8").compute == "i8"
    assert "compute" not in lowbit.MatmulSpec(48, 256, "u4").to_dict()


def test_more_rows_take_launches_of_the_widest_tile() -> None:
    """Where no kernel serves any number of rows."""
    choices = lowbit.compile(lowbit.MatmulSpec(256, 1024, "u8", 128, zeros="int", compute="i8"), ADA).choices
    assert [rows.token_tiles for rows in choices.rows] == [(8,), (16,), (32,), (64,), (64,)]


WRONG_SPECS: list[tuple[str, dict[str, Any]]] = [
    ("compute='f8e4m3' multiplies u1, .*f8e4m3, not 'u5'; use one of them", {"weight": "u5", "compute": "f8e4m3"}),
    ("compute='i8' multiplies u1, .*i8, not 'f4e2m1'", {"weight": "f4e2m1", "zeros": "none"}),
    ("compute='i8' multiplies .*, not 'nf4'", {"weight": "nf4", "zeros": "none"}),
    ("compute='i8' has no zeros='float'; use 'int' or 'none'", {"zeros": "float"}),
    ("compute='i8' needs k=240 to be a multiple of 32", {"k": 240, "group_size": None}),
    ("compute='i8' needs k=65568 to be a multiple of 32 up to 65536", {"k": 65568, "group_size": None}),
    ("needs group_size=16 to be a multiple of 32 that divides 64 or is a multiple of it", {"group_size": 16}),
    ("needs group_size=96 to be", {"k": 288, "group_size": 96}),
    ("compute='e5m2' must be one of 'f8e4m3', 'i8'", {"compute": "e5m2"}),
    ("compute='f16' must be one of 'f8e4m3', 'i8'", {"compute": torch.float16}),
]


@pytest.mark.parametrize(("message", "change"), WRONG_SPECS, ids=lambda v: str(v)[:40])
def test_wrong_specs(message: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SPEC, **change)


def test_wrong_calls(target: str) -> None:
    x, mm, w = made(SPEC, target)
    values, scales = quantize_rows(x, "i8")
    q = lowbit.quantize_activation(x, "i8")
    cut = replace(q, scales=q.scales[:2]), replace(q, sums=q.sums[:, :4])
    calls: list[tuple[type[lowbit.LowbitError], str, Any]] = [
        (SpecError, r"x is torch.int8 and needs its scales, one per row: mm\(x, w, x_scale=", lambda: mm(values, w)),
        (SpecError, r"needs its scales, .* must be f32 \[5\]", lambda: lowbit.quantize_activation(values, "i8")),
        (SpecError, r"scales of x must be torch.float32 \[5\]", lambda: mm(values, w, x_scale=scales[:2])),
        (SpecError, r"must be torch.float32 \[5\].*not torch.float16", lambda: mm(values, w, x_scale=scales.half())),
        (SpecError, "must be torch.float32.*not float", lambda: mm(values, w, x_scale=1.0)),
        (SpecError, "takes values in torch.int8", lambda: mm(values.to(torch.float8_e4m3fn), w, x_scale=scales)),
        (SpecError, "has its scales; drop x_scale=", lambda: mm(q, w, x_scale=scales)),
        (SpecError, "quantized to 'f8e4m3', but", lambda: mm(lowbit.quantize_activation(x, "f8e4m3"), w)),
        (SpecError, r"x must be \[..., k=256\]", lambda: mm(lowbit.quantize_activation(x[:, :64], "i8"), w)),
        (SpecError, r"values \[5, 256\], scales \[2\] and .* not of the same", lambda: mm(cut[0], w)),
        (SpecError, r"and sums \[5, 4\], .* not of the same", lambda: mm(cut[1], w)),
        (SpecError, "multiple of 32 up to 65536, not", lambda: lowbit.quantize_activation(x[:, :40], "i8")),
        (SpecError, "compute='i4' must be one of", lambda: lowbit.quantize_activation(x, "i4")),
        (SpecError, "x is torch.float32; it must be", lambda: lowbit.quantize_activation(x.float(), "i8")),
        (SpecError, "drop them, or give values", lambda: lowbit.quantize_activation(x, "i8", scales=scales)),
        (SpecError, "no gradient", lambda: lowbit.quantize_activation(x.clone().requires_grad_(), "i8")),
        (SpecError, "x must be a torch tensor", lambda: lowbit.quantize_activation(cast(Any, [1.0]), "i8")),
        (TargetError, "unknown target", lambda: lowbit.quantize_activation(x, "i8", target="sm_1")),
        (PackError, "packed for", lambda: mm(q, made(replace(SPEC, n=16), target)[2])),
    ]
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    plain = lowbit.compile(replace(SPEC, compute=None), target)
    with pytest.raises(SpecError, match=r"x has 8 bits, but .* multiplies in f16; use a spec with compute="):
        plain(q, w)
    assert torch.equal(mm(x, w), mm(values, w, x_scale=scales))


def test_a_schedule_of_another_family() -> None:
    for schedule in (lowbit.Schedule(8), EightBitSchedule(8)):
        spec = SPEC if type(schedule) is lowbit.Schedule else replace(SPEC, compute=None)
        with pytest.raises(SpecError, match=r"needs an EightBitSchedule|needs compute='f8e4m3' or 'i8'"):
            request(spec, parse_target(HOPPER), schedule)
    with pytest.raises(SpecError, match="eight_bit needs preload_weights=False"):
        EightBitSchedule(8, num_stages=1, preload_weights=True)
    with pytest.raises(SpecError, match="threads=33 must be a multiple of 32"):
        request(quantize_spec(64, "f16", "i8"), parse_target(HOPPER), QuantizeSchedule(33))


def test_the_order_of_columns_is_that_of_the_packing() -> None:
    """Four bytes of a lane are the codes that it owns in a row of a block."""
    columns = Packing.fragment_order()[:, [0, 4, 1, 5]] % 16
    for lane in range(32):
        assert [byte_codes.column_of(4 * (lane % 4) + j) for j in range(4)] == columns[lane].tolist()
