"""The reference against exact fractions, and its error bound against right kernels and wrong ones."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from lowbit.dialect.formats.dtypes import all_names
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.reference import agrees, dequantize, matmul, random_problem, tolerance
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.packed import pack

F32 = np.float32
WEIGHTS = ("u1", "u4", "u8", "i2", "i8", "f4e2m1", "f8e4m3", "f8e5m2", "f8e7m0", "nf4", "fp4_bnb")


def f64(t: torch.Tensor) -> np.ndarray:
    return t.float().double().numpy() if t.is_floating_point() else t.numpy().astype(np.float64)


def emulate(
    spec: MatmulSpec,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A kernel as the compiler makes them: mma of 16 columns with truncating f32 sums, integers under a
    hidden bit and in offset binary, and the group's correction and scale applied late."""
    values = spec.dtype.values()
    offset = 0.0
    if spec.dtype.kind in ("uint", "int"):
        offset = spec.dtype.codes * (1.5 if spec.dtype.kind == "int" else 1.0)
    operand = f64(torch.from_numpy(values + offset).to(TORCH[spec.act]))
    if offset:
        np.testing.assert_array_equal(operand, values + offset)
    w, activation = operand[codes.numpy().astype(int) & (spec.dtype.codes - 1)], f64(x)
    g = spec.group_size or spec.k
    y = np.zeros((x.shape[0], spec.n), F32)
    for group in range(spec.groups):
        acc, total = np.zeros_like(y), np.zeros((x.shape[0], 1), F32)
        for start in range(group * g, (group + 1) * g, 16):
            block = slice(start, min(start + 16, (group + 1) * g))
            acc = truncated(acc + activation[:, block] @ w[:, block].T)
            total = truncated(total + activation[:, block].sum(axis=1, keepdims=True))
        zero = F32(offset) if zeros is None else (f64(zeros[:, group]) + offset).astype(F32)
        y = y + f64(scales[:, group]).astype(F32) * (acc - zero * total)
    if bias is not None:
        y = y + f64(bias).astype(F32)
    return torch.from_numpy(y).to(TORCH[spec.out_dtype])


def truncated(x: np.ndarray) -> np.ndarray:
    """float64 to float32, towards zero."""
    nearest = x.astype(F32)
    return np.where(np.abs(nearest.astype(np.float64)) > np.abs(x), np.nextafter(nearest, F32(0)), nearest)


def cases() -> list[MatmulSpec]:
    """Every format, with options in turn."""
    scales, acts, outs = ("f16", "e8m0", "f32", "e4m3", "bf16"), ("f16", "bf16"), (None, "f32")
    result: list[Any] = []
    for i, weight in enumerate(all_names()):
        # bf16 holds 8 bits: no room for an 8-bit integer under a hidden bit.
        act = "f16" if weight in ("u8", "i8", "u7", "i7") else acts[i % 2]
        spec: Any = MatmulSpec
        group, zeros = (64, None, 16, 48)[i % 4], ("float", "none", "int")[i % 3]
        zeros = "none" if zeros == "int" and weight[0] not in "ui" else zeros
        result.append(spec(24, 384, weight, group, zeros, scales[i % 5], act, outs[i // 2 % 2], i % 7 != 0))
    return result


@pytest.mark.parametrize("spec", cases(), ids=str)
def test_a_right_kernel_is_within_the_bound_and_wrong_ones_are_not(spec: MatmulSpec) -> None:
    x, codes, scales, zeros, bias = random_problem(spec, m=24, seed=1)
    expected = matmul(spec, x, codes, scales, zeros, bias)
    bound = tolerance(spec, x, codes, scales, zeros, bias)
    y = emulate(spec, x, codes, scales, zeros, bias)
    assert agrees(y, expected, bound).all()

    def accepted(wrong: np.ndarray) -> float:
        return float(agrees(wrong, expected, bound).mean())

    assert accepted(np.zeros_like(expected)) < 0.2
    assert accepted(expected.T) < 0.2
    assert accepted(matmul(spec, x, codes, torch.ones_like(scales.float()), zeros, bias)) < 0.2  # no scale
    assert accepted(matmul(spec, x.roll(1, 1), codes, scales, zeros, bias)) < 0.2  # a column further
    assert accepted(matmul(spec, x, codes.roll(1, 0), scales, zeros, bias)) < 0.2  # a row further
    if spec.groups > 1:
        assert (
            accepted(matmul(spec, x, codes, scales.view(torch.uint8).flip(1).view(scales.dtype), zeros, bias))
            < 0.3
        )
    if zeros is not None:
        assert accepted(matmul(spec, x, codes, scales, None, bias)) < 0.3
    if bias is not None:
        assert accepted(matmul(spec, x, codes, scales, zeros, None)) < 0.3


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("act", ["f16", "bf16"])
def test_the_bound_of_dequantized_weights(weight: str, act: str) -> None:
    spec: Any = MatmulSpec
    spec = spec(24, 512, weight, 64, "float", "f32", act)
    x, codes, scales, zeros, _ = random_problem(spec, m=24)
    weights = torch.from_numpy(dequantize(spec, codes, scales, zeros)).to(TORCH[act])
    y = torch.from_numpy(f64(x) @ f64(weights).T).to(TORCH[act])
    expected = matmul(spec, x, codes, scales, zeros)
    bound = tolerance(spec, x, codes, scales, zeros, dequantized=True)
    assert agrees(y, expected, bound).all()
    assert agrees(np.zeros_like(expected), expected, bound).mean() < 0.3


def test_the_bound_is_tight() -> None:
    """A 4-bit matmul of common size: a percent of the result, and one zero that is off by one shows."""
    spec = MatmulSpec(32, 4096, "u4", 128, "int")
    x, codes, scales, zeros, _ = random_problem(spec, m=16)
    assert zeros is not None
    expected = matmul(spec, x, codes, scales, zeros)
    bound = tolerance(spec, x, codes, scales, zeros)
    assert np.median(bound) < 0.01 * np.sqrt(np.mean(expected**2))
    wrong = zeros.clone()
    wrong[:, 7] += 1
    assert not agrees(matmul(spec, x, codes, scales, wrong), expected, bound).all(axis=0).any()


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("group", [None, 16])
def test_matmul_by_definition(weight: str, group: int | None) -> None:
    zero_kind: Any = "int" if weight[0] in "ui" else "float"
    spec = MatmulSpec(3, 32, weight, group, zero_kind, "f32", bias=True)
    x, codes, scales, zeros, bias = random_problem(spec, m=2)
    assert zeros is not None and bias is not None
    y, w = matmul(spec, x, codes, scales, zeros, bias), dequantize(spec, codes, scales, zeros)
    g = group or 32
    for row in range(3):
        exact: list[Fraction] = []
        for column in range(32):
            value = spec.dtype.values()[int(codes[row, column]) % spec.dtype.codes]
            difference = Fraction(float(value)) - Fraction(zeros[row, column // g].item())
            exact.append(Fraction(scales[row, column // g].item()) * difference)
            assert w[row, column] == pytest.approx(float(exact[-1]), rel=1e-15)
        for token in range(2):
            total = sum(
                (Fraction(x[token, i].item()) * exact[i] for i in range(32)), Fraction(bias[row].item())
            )
            size = sum(abs(x[token, i].item() * float(exact[i])) for i in range(32)) + abs(bias[row].item())
            assert abs(y[token, row] - float(total)) <= 1e-14 * size


def test_arrays_do_as_well_as_tensors_and_few_rows_as_many() -> None:
    spec = MatmulSpec(16, 64, "i4", 32, "float", "f32", bias=True)
    tensors = random_problem(spec, m=3)
    arrays = [t.numpy() for t in tensors if t is not None]
    for function in (matmul, tolerance):
        whole = function(spec, *tensors)
        np.testing.assert_array_equal(function(spec, *arrays), whole)
        x, *weight = tensors
        np.testing.assert_allclose(
            function(spec, x, *(t[4:9] for t in weight if t is not None)), whole[:, 4:9]
        )


@pytest.mark.parametrize("weight", ["f8e4m3", "f8e5m2"])
def test_nan_and_inf_codes(weight: str) -> None:
    spec = MatmulSpec(4, 16, weight)
    values = spec.dtype.values()
    codes = torch.full((4, 16), int(spec.dtype.encode(1.0)), dtype=torch.uint8)
    codes[0, 3] = int(np.flatnonzero(np.isnan(values))[0])
    if spec.dtype.has_inf:
        codes[1, 3], codes[2, 3] = (int(np.flatnonzero(values == v)[0]) for v in (np.inf, -np.inf))
    x, scales = torch.ones(1, 16, dtype=torch.float16), torch.ones(4, 1, dtype=torch.float16)
    y, bound = matmul(spec, x, codes, scales), tolerance(spec, x, codes, scales)
    expected = [np.nan, np.inf, -np.inf, 16] if spec.dtype.has_inf else [np.nan, 16, 16, 16]
    np.testing.assert_array_equal(y[0], expected)
    assert np.isfinite(bound).all() and agrees(np.array([expected]), y, bound).all()
    assert agrees(np.array([[0, np.nan, np.inf, 16]]), y, bound).tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("weight", all_names())
@pytest.mark.parametrize("scale", ["f16", "e8m0", "e4m3"])
@pytest.mark.parametrize("zeros", ["none", "float"])
def test_random_problems_suit_every_format(weight: str, scale: str, zeros: str) -> None:
    spec: Any = MatmulSpec
    spec = spec(32, 1024, weight, 32, zeros, scale, bias=True)
    problem = random_problem(spec, m=5, seed=3)
    x, codes, scales, zero_points, bias = problem
    packed = pack(spec, *problem[1:])
    assert (x.shape, x.dtype, scales.dtype) == ((5, 1024), torch.float16, TORCH[scale])
    assert torch.equal(packed.unpack(), codes)
    y = matmul(spec, x, codes, scales, zero_points, bias)
    assert np.isfinite(y).all() and np.abs(y).max() < 60000
    assert 0.1 < np.sqrt(np.mean(y**2)) < (20 if scale != "e4m3" else 2000)
    assert np.unique(f64(scales)).size > 1
    if spec.dtype.bits <= 4:
        assert np.unique(codes).size >= spec.dtype.codes - 1  # a minus zero may be missing
    again = random_problem(spec, m=5, seed=3)
    assert all(
        a is b or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(problem, again)
    )
    assert not torch.equal(random_problem(spec, m=5, seed=4)[1], codes)


def test_random_special_codes_are_asked_for() -> None:
    spec = MatmulSpec(64, 512, "f8e5m2")
    for finite in (True, False):
        x, *weight = random_problem(spec, 2, finite=finite)
        assert np.isfinite(dequantize(spec, *weight[:3])).all() == finite
        assert np.isfinite(matmul(spec, x, *weight)).any()


def test_tolerance_of_rounded_zeros_knows_the_sign_of_scales() -> None:
    """Groups of a row whose scales have different signs: what rounding changes partly cancels, or does not."""
    spec = MatmulSpec(2, 64, "u4", 32, "float", "f32", act="bf16", out="f32")
    x, codes, _, _, _ = random_problem(spec, 8)
    zeros = torch.tensor([[3.01, -1.003], [-1.003, 3.01]])
    scales = torch.tensor([[0.5, -0.25], [0.25, -0.5]])
    wide = zeros.bfloat16().double().repeat_interleave(32, 1).numpy()
    rounded = torch.from_numpy(spec.dtype.values()[codes.numpy()] - wide).bfloat16().double().numpy()
    y = x.double().numpy() @ (scales.double().repeat_interleave(32, 1).numpy() * rounded).T
    bound = tolerance(spec, x, codes, scales, zeros, rounded_zeros=True)
    assert agrees(y, matmul(spec, x, codes, scales, zeros), bound).all()
