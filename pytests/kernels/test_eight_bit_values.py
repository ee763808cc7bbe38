"""Activations of 8 bits: their definition, the bytes that codes become, and the kernel that makes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eight_bit_problems import ADA, FITTING, HOPPER, memory
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lowbit
from lowbit.dialect.formats import byte_codes
from lowbit.dialect.formats.byte_codes import COMPUTE, LARGEST, LEAST_PEAK, SUM_COLUMNS, Compute
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.formats.packing import Packing, run_of
from lowbit.dialect.formats.raw_codes import zero_code
from lowbit.passes.kernels.quantize.family import default_schedule, quantize_spec
from lowbit.passes.kernels.quantize.schedule import QuantizeSchedule
from lowbit.passes.kernels.registry import request
from lowbit.passes.pipeline import compile_kernel
from lowbit.passes.targets import parse_target
from lowbit.pylib.emulator import Emulator
from lowbit.pylib.runtime.activation import in_column_order, quantize_in_torch, quantize_rows
from lowbit.pylib.torch_types import TORCH

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
    """Of every code in every register of a run: the byte is its value, times a power of two, plus the offset of f8e4m3,
    or, of i8, with the highest bit of signed codes turned."""
    t = dtype(name)
    signed = byte_codes.has_signs(t, compute, "none")
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
            for of, word, shift, mask in byte_codes.moves(t, compute, registers, signed):
                if of == which:
                    moved = words[:, word] >> shift if shift >= 0 else words[:, word] << -shift
                    made |= moved & np.uint32(mask)
            assert (made == (made >> 8 * which & 0xFF) * (0x10001 << 8 * which)).all()
            byte = (made >> 8 * which & 0xFF).astype(np.uint8) ^ np.uint8(0x80 * signed)
            of_i8 = byte.view(np.int8) if signed else byte
            numbers = of_i8.astype(float) if compute == "i8" else dtype("f8e4m3").values()[byte]
            values = stored - zero_code(t) if t.kind == "int" else t.values()
            expected = (values + (0.0 if signed else zero_code(t))) * 2.0 ** -byte_codes.byte_exponent(t, compute)
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


def test_the_order_of_columns_is_that_of_the_packing() -> None:
    """Four bytes of a lane are the codes that it owns in a row of a block."""
    columns = Packing.fragment_order()[:, [0, 4, 1, 5]] % 16
    for lane in range(32):
        assert [byte_codes.column_of(4 * (lane % 4) + j) for j in range(4)] == columns[lane].tolist()
