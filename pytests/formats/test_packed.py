"""Packing: exact round trips, every bit where `Packing` says it is, and errors that name the culprit."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.dialect.errors import PackError
from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.formats.packing import run_of
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.reference import random_problem
from lowbit.pylib.weights import at_once
from lowbit.pylib.weights.packed import PackedWeight, pack

INTEGERS = [f"{sign}{bits}" for sign in "ui" for bits in range(1, 9)]


def problem(spec: MatmulSpec, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return random_problem(spec, 1, seed)[1:]


def assert_round_trip(spec: MatmulSpec, seed: int = 0) -> None:
    codes, scales, zeros, bias = problem(spec, seed)
    packed = pack(spec, codes, scales, zeros, bias)
    assert torch.equal(packed.unpack(), codes) and packed.unpack().dtype == codes.dtype
    assert same_bits(packed.unpack_scales(), scales)
    if zeros is None:
        assert packed.unpack_zeros() is None and packed.zeros is None
    else:
        assert (packed.unpack_zeros() == zeros).all()
    assert (packed.bias is None) if bias is None else torch.equal(packed.bias, bias)
    assert packed.nbytes == spec.bytes


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("weight", all_names())
def test_round_trip_of_every_format(weight: str) -> None:
    assert_round_trip(MatmulSpec(40, 512, weight, 64, zeros="float", bias=True))


@pytest.mark.parametrize("scale", ["f16", "bf16", "f32", "e8m0", "e4m3"])
@pytest.mark.parametrize("zeros", ["none", "int", "float"])
@pytest.mark.parametrize("act, out", [("f16", "f32"), ("bf16", None)])
def test_round_trip_of_scales_zeros_and_bias(scale: str, zeros: str, act: str, out: str | None) -> None:
    spec: Any = MatmulSpec
    assert_round_trip(spec(33, 128, "i5", 32, zeros=zeros, scale=scale, act=act, out=out, bias=True))


@st.composite
def specs(draw: st.DrawFn) -> MatmulSpec:
    group = draw(st.none() | st.sampled_from((16, 17, 32, 48, 64, 100, 128, 256, 300)))
    k = draw(st.integers(16, 700)) if group is None else group * draw(st.integers(1, 5))
    zeros: Any = draw(st.sampled_from(("none", "int", "float")))
    scale: Any = draw(st.sampled_from(("f16", "f32", "e8m0", "e4m3")))
    return MatmulSpec(draw(st.integers(1, 50)), k, draw(st.sampled_from(INTEGERS)), group, zeros, scale)


@given(specs(), st.integers(0, 2**31))
def test_round_trip_of_every_shape(spec: MatmulSpec, seed: int) -> None:
    assert_round_trip(spec, seed)


def fragment(lane: int, i: int) -> tuple[int, int]:
    """Row and column of a_i of lane in the A fragment: the formula of PTX ISA 9.7.14.5.8, mma.m16n8k16."""
    group_id, thread_in_group = lane >> 2, lane % 4
    row = group_id if i < 2 or 4 <= i < 6 else group_id + 8
    column = thread_in_group * 2 + (i & 1)
    return row, column if i < 4 else column + 8


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("group", [None, 48])
def test_every_bit_lies_where_the_packing_says(bits: int, group: int | None) -> None:
    spec = MatmulSpec(21, 288, f"u{bits}", group)
    p = spec.packing
    codes, scales, _, _ = problem(spec)
    words = pack(spec, codes, scales).codes.numpy().view(np.uint32)
    found = np.full((p.row_blocks * 16, p.padded_k), -1)
    for row_block, chunk, block in np.ndindex(p.row_blocks, p.chunks, p.chunk // 16):
        for lane in range(32):
            for i in range(8):
                code = 0
                first, number = p.place(block, i // 2)
                for piece in run_of(bits)[number]:
                    unit, index = divmod(first + piece.word, 4)
                    word = int(words[row_block, chunk, unit, lane, index])
                    code |= (word >> (piece.shift + 16 * (i % 2)) & (1 << piece.bits) - 1) << piece.low
                row, column = fragment(lane, i)
                found[row_block * 16 + row, chunk * p.chunk + block * 16 + column] = code
    expected = np.zeros_like(found)  # padding is 0
    held = p.k_source >= 0
    expected[: spec.n, held] = codes.numpy()[:, p.k_source[held]]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("weight", ["i3", "i8", "i1"])
def test_signed_codes_are_offset_binary(weight: str) -> None:
    signed, unsigned = MatmulSpec(16, 256, weight), MatmulSpec(16, 256, f"u{weight[1]}")
    codes, scales, _, _ = problem(signed)
    shifted = codes.int() + 2 ** (signed.dtype.bits - 1)
    assert torch.equal(pack(signed, codes, scales).codes, pack(unsigned, shifted, scales).codes)


def test_padding_is_zero() -> None:
    spec = MatmulSpec(17, 50, "i4", 25, zeros="int")
    packed = pack(spec, torch.full((17, 50), 7), torch.ones(17, 2), torch.full((17, 2), 7))
    set_bits = np.unpackbits(packed.codes.numpy().view(np.uint8)).sum()
    assert set_bits == 17 * 50 * 4  # 7 is stored as 15
    assert packed.scales.count_nonzero() == packed.zeros.count_nonzero() == 17 * 2
    assert (packed.zeros[packed.zeros > 0] == 15).all()


def test_scales_lie_by_row_block_and_group() -> None:
    spec = MatmulSpec(37, 256, "u4", 64)
    scales = torch.arange(37 * 4.0).reshape(37, 4)
    packed = pack(spec, torch.zeros(37, 256, dtype=torch.uint8), scales).scales
    assert packed.shape == (3, 4, 16)
    for row, group in np.ndindex(37, 4):
        assert packed[row // 16, group, row % 16] == scales[row, group]


def test_one_scale_per_row_may_be_a_vector() -> None:
    spec = MatmulSpec(20, 64, "u4", zeros="float")
    codes, scales, zeros, _ = problem(spec)
    a, b = pack(spec, codes, scales, zeros), pack(spec, codes, scales[:, 0], zeros[:, 0])
    assert torch.equal(a.scales, b.scales) and torch.equal(a.zeros, b.zeros)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
def test_arrays_of_any_integer_type(dtype: type) -> None:
    spec = MatmulSpec(20, 64, "u4", 32)
    codes, scales, _, _ = problem(spec)
    array = codes.numpy().astype(dtype)
    array.setflags(write=False)
    assert torch.equal(pack(spec, array, scales.numpy()).unpack(), codes)


def test_any_strides() -> None:
    spec = MatmulSpec(48, 96, "u3", 32, zeros="float", bias=True)
    codes, scales, zeros, bias = problem(spec)
    strided = [t.T.contiguous().T for t in (codes, scales, zeros)]
    packed = pack(spec, *strided, torch.stack([bias, bias], 1)[:, 0])
    assert torch.equal(packed.codes, pack(spec, codes, scales, zeros, bias).codes)
    assert torch.equal(packed.unpack_scales(), scales) and torch.equal(packed.bias, bias)


@pytest.mark.parametrize("n", [1, 40, 64])
def test_slices_do_not_change_the_result(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MatmulSpec(n, 100, "u5", 50)
    codes, scales, _, _ = problem(spec)
    whole = pack(spec, codes, scales)
    monkeypatch.setattr(at_once, "ON_CPU", 1)
    assert torch.equal(pack(spec, codes, scales).codes, whole.codes)
    assert torch.equal(whole.unpack(), codes)


def test_the_weight_is_no_view_of_what_was_given() -> None:
    spec = MatmulSpec(16, 64, "u8", bias=True)
    codes, scales, _, bias = problem(spec)
    packed = pack(spec, codes, scales, None, bias)
    kept = bias.clone()
    for t in (codes, scales, bias):
        t.zero_()
    assert torch.equal(packed.bias, kept) and packed.unpack().any() and packed.scales.any()


def test_scales_are_rounded_to_the_specs_type() -> None:
    spec = MatmulSpec(1, 16, "u4", scale="e4m3")
    for given_scale, kept in ((448.0, 448), (464.0, 448), (1.0625, 1), (1.1875, 1.25), (2.0**-9, 2**-9)):
        packed = pack(spec, torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([given_scale]))
        assert packed.unpack_scales().float().item() == kept


@pytest.mark.parametrize("power", [-127, -126, -1, 0, 127])
def test_e8m0_scales(power: int) -> None:
    spec = MatmulSpec(1, 16, "u4", scale="e8m0")
    scale = torch.tensor([2.0**power], dtype=torch.float64)
    packed = pack(spec, torch.zeros(1, 16, dtype=torch.uint8), scale)
    assert packed.unpack_scales().view(torch.uint8).item() == power + 127
    assert same_bits(
        pack(spec, torch.zeros(1, 16, dtype=torch.uint8), packed.unpack_scales()).scales, packed.scales
    )


@pytest.mark.parametrize("weight, least", [("u2", 0), ("i2", -2), ("i8", -128), ("u8", 0)])
def test_integer_zeros_have_256_values(weight: str, least: int) -> None:
    spec = MatmulSpec(2, 16, weight, zeros="int")
    codes = torch.zeros(2, 16, dtype=torch.int8)
    zeros = torch.tensor([[least], [least + 255]])
    packed = pack(spec, codes, torch.ones(2, 1), zeros)
    assert torch.equal(packed.unpack_zeros(), zeros.int())
    assert packed.zeros.flatten()[:2].tolist() == [0, 255]


def test_integer_zeros_that_bf16_holds() -> None:
    """Less than 8 bits: up to 128 above the least value, and no further; a u4 zero of GPTQ may be 16."""
    spec = MatmulSpec(1, 16, "i4", zeros="int", act="bf16")
    codes, scales = torch.zeros(1, 16, dtype=torch.int8), torch.ones(1, 1)
    assert pack(spec, codes, scales, torch.tensor([[120]])).zeros.flatten()[0] == 128
    with pytest.raises(PackError, match=re.escape("must be in -8..120; or use zeros='float'")):
        pack(spec, codes, scales, torch.tensor([[121]]))
    wide = replace(spec, weight="i8")
    assert pack(wide, codes, scales, torch.tensor([[127]])).zeros.flatten()[0] == 255


def test_state_dict_goes_through_a_file() -> None:
    spec = MatmulSpec(40, 96, "lut3", 32, "float", "e8m0", bias=True, table=(0.1, 2, 3, 4, 5, 6, 7, 1 / 3))
    packed = pack(spec, *problem(spec))
    file = io.BytesIO()
    torch.save(packed.state_dict(), file)
    file.seek(0)
    loaded = PackedWeight.from_state_dict(torch.load(file, weights_only=True))
    assert loaded.spec is packed.spec
    assert loaded.state_dict().keys() == {"codes", "scales", "zeros", "bias", "spec"}
    assert all(same_bits(t, loaded.state_dict()[name]) for name, t in packed.state_dict().items())


def test_state_dict_of_unaligned_tensors() -> None:
    spec = MatmulSpec(16, 64, "u4")
    state = pack(spec, *problem(spec)).state_dict()
    memory = torch.zeros(state["codes"].numel() + 1, dtype=torch.int32)
    memory[1:] = state["codes"].flatten()
    shifted = memory[1:].view(state["codes"].shape)
    assert shifted.data_ptr() % 16
    assert torch.equal(PackedWeight.from_state_dict({**state, "codes": shifted}).codes, state["codes"])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": "nf4"}, "the weight was packed with weight='u4' (not 'nf4'); load it with that spec"),
        ({"group_size": 32}, "group_size=64 (not 32)"),
        ({"zeros": "int"}, "zeros='none' (not 'int')"),
        ({"scale": "bf16"}, "scale='f16' (not 'bf16')"),
        ({"n": 15}, "n=16 (not 15)"),
    ],
)
def test_loading_as_another_spec(changes: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"n": 16, "k": 64, "weight": "u4", "group_size": 64}
    spec = MatmulSpec(**base)
    state = pack(spec, *problem(spec)).state_dict()
    with pytest.raises(PackError) as error:
        PackedWeight.from_state_dict(state, MatmulSpec(**{**base, **changes}))
    assert message in str(error.value)


def test_loading_what_is_no_weight() -> None:
    spec = MatmulSpec(16, 64, "u4", bias=True)
    state = pack(spec, *problem(spec)).state_dict()
    for wrong, message in (
        ({k: v for k, v in state.items() if k != "spec"}, "must be what state_dict() gave, with 'spec'"),
        ({k: v for k, v in state.items() if k != "scales"}, "codes, scales, bias and spec; got bias, codes, spec"),
        ({k: v for k, v in state.items() if k != "bias"}, "must be codes, scales, bias and spec"),
        ({**state, "more": state["codes"]}, "must be codes, scales, bias and spec"),
        (
            {**state, "codes": state["codes"][:, :, :, :16]},
            "packed codes must be torch.int32 (1, 1, 1, 32, 4)",
        ),
        ({**state, "scales": state["scales"].float()}, "packed scales must be torch.float16"),
        ({**state, "bias": state["bias"].bfloat16()}, "packed bias must be torch.float16"),
    ):
        with pytest.raises(PackError) as error:
            PackedWeight.from_state_dict(wrong)
        assert message in str(error.value)


def test_device_and_repr() -> None:
    spec = MatmulSpec(16, 64, "u4", 32)
    packed = pack(spec, *problem(spec))
    assert packed.device == torch.device("cpu") and packed.to("cpu") is packed
    assert repr(packed) == "PackedWeight(u4[16, 64] f16 scale per 32: f16 -> f16; 0.0 MB on cpu)"


@pytest.mark.gpu
def test_packing_on_the_gpu_gives_the_same_bits() -> None:
    for weight in ("u4", "i7", "f6e3m2", "u1"):
        for scale, group in (("f16", 100), ("e8m0", 32), ("e4m3", 16)):
            spec: Any = MatmulSpec
            spec = spec(70, 3200, weight, group, zeros="float", scale=scale, bias=True)
            given_tensors = problem(spec)
            here, there = pack(spec, *given_tensors), pack(spec, *(t.cuda() for t in given_tensors))
            assert there.device.type == "cuda"
            assert all(
                same_bits(t, there.to("cpu").state_dict()[name]) for name, t in here.state_dict().items()
            )
            assert torch.equal(there.unpack().cpu(), given_tensors[0])


def changed(t: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    t = t.clone()
    t[at] = value
    return t


BASE: dict[str, Any] = {"n": 20, "k": 64, "weight": "u4", "group_size": 32, "zeros": "int", "bias": True}
NAN, INF = float("nan"), float("inf")
CODES, SCALES = torch.ones(20, 64, dtype=torch.uint8), torch.ones(20, 2)
ZEROS, BIAS = torch.ones(20, 2, dtype=torch.int32), torch.ones(20)


@pytest.mark.parametrize(
    "changes, arguments, message",
    [
        ({}, {"codes": CODES.T}, "codes must be [n, k] = [20, 64], not [64, 20]; transpose it"),
        ({}, {"codes": CODES[:-1]}, "codes must be [n, k] = [20, 64], not [19, 64]"),
        ({}, {"codes": CODES.float()}, "codes must be integers, not torch.float32"),
        ({}, {"codes": CODES.bool()}, "codes must be integers, not torch.bool"),
        ({}, {"codes": [[1]]}, "codes must be a torch tensor or a NumPy array, not list"),
        ({}, {"codes": changed(CODES, (17, 3), 16)}, "codes[17, 3] = 16 must be in 0..15"),
        ({}, {"codes": changed(CODES.long(), (0, 63), -1)}, "codes[0, 63] = -1 must be in 0..15"),
        ({}, {"codes": changed(CODES.long(), (2, 5), 1234567)}, "codes[2, 5] = 1234567 must be in 0..15"),
        ({"weight": "i4"}, {"codes": CODES + 7}, "codes[0, 0] = 8 must be in -8..7"),
        ({"weight": "i1"}, {}, "codes[0, 0] = 1 must be in -1..0"),
        ({}, {"scales": SCALES.T}, "scales must be [n, groups] = [20, 2], not [2, 20]; transpose it"),
        ({}, {"scales": SCALES[:, 0]}, "scales must be [n, groups] = [20, 2], not [20]"),
        ({}, {"scales": None}, "needs scales; pass scales="),
        ({}, {"scales": SCALES.int()}, "scales must be floats, not torch.int32; use .float()"),
        ({"scale": "e8m0"}, {"scales": SCALES.byte()}, "view the exponent bytes as torch.float8_e8m0fnu"),
        ({}, {"scales": changed(SCALES, (3, 1), NAN)}, "scales[3, 1] = nan must be finite"),
        ({}, {"scales": changed(SCALES, (3, 1), -INF)}, "scales[3, 1] = -inf must be finite"),
        ({}, {"scales": changed(SCALES, (19, 0), 65520.0)}, "scales[19, 0] = 65520 overflows f16"),
        ({"scale": "e4m3"}, {"scales": changed(SCALES, (1, 1), -465)}, "scales[1, 1] = -465 overflows"),
        ({"scale": "f32"}, {"scales": SCALES.double() * 1e39}, "scales[0, 0] = 1e+39 overflows f32"),
        ({"scale": "e8m0"}, {"scales": changed(SCALES, (0, 1), 3)}, "scales[0, 1] = 3 must be a power"),
        ({"scale": "e8m0"}, {"scales": changed(SCALES, (0, 1), 0)}, "scales[0, 1] = 0 must be a power"),
        ({"scale": "e8m0"}, {"scales": changed(SCALES, (0, 1), -2)}, "scales[0, 1] = -2 must be a power"),
        ({"scale": "e8m0"}, {"scales": SCALES.double() * 2.0**128}, "must be a power of two from 2^-127"),
        ({}, {"zeros": None}, "needs zeros; pass zeros="),
        ({"zeros": "none"}, {}, "has no zeros; drop zeros or set zeros= in the spec"),
        ({}, {"zeros": ZEROS.half()}, "zeros must be integers, not torch.float16"),
        ({}, {"zeros": changed(ZEROS, (4, 0), 256)}, "zeros[4, 0] = 256 must be in 0..255; or use"),
        ({"weight": "i4"}, {"zeros": changed(ZEROS, (4, 0), -9)}, "zeros[4, 0] = -9 must be in -8..247"),
        ({"zeros": "float"}, {}, "zeros must be floats, not torch.int32"),
        ({"zeros": "float"}, {"zeros": ZEROS * NAN}, "zeros[0, 0] = nan must be finite"),
        ({}, {"zeros": ZEROS[:, :1]}, "zeros must be [n, groups] = [20, 2], not [20, 1]"),
        ({}, {"bias": None}, "needs bias; pass bias="),
        ({"bias": False}, {}, "has no bias; drop bias or set bias= in the spec"),
        ({}, {"bias": BIAS[:-1]}, "bias must be [n] = [20], not [19]"),
        ({}, {"bias": changed(BIAS, (7,), 1e6)}, "bias[7] = 1e+06 overflows f16"),
        ({}, {"bias": BIAS.long()}, "bias must be floats, not torch.int64"),
        ({}, {"scales": SCALES.to("meta")}, "scales is on meta, but codes are on cpu; move one of them"),
        ({}, {"bias": BIAS.to("meta")}, "bias is on meta, but codes are on cpu"),
    ],
)  # fmt: skip
def test_errors_name_the_culprit(changes: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    given_arguments = {"codes": CODES, "scales": SCALES, "zeros": ZEROS, "bias": BIAS, **arguments}
    with pytest.raises(PackError) as error:
        pack(MatmulSpec(**{**BASE, **changes}), **given_arguments)
    assert message in str(error.value)


def test_the_first_culprit_is_named_with_its_row_in_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_once, "ON_CPU", 64)
    codes = changed(changed(CODES, (18, 0), 99), (19, 0), 77)
    with pytest.raises(PackError, match=r"codes\[18, 0\] = 99"):
        pack(MatmulSpec(20, 64, "u4"), codes, torch.ones(20))
