"""How far a correct kernel may be off the definition: a bound that follows from the types in which it computes.

A kernel accumulates x * (value + offset) of a group in f32, where the offset is what an integer's bits carry with them:
2^b, the hidden bit above them, and 2^(b-1) of offset binary. Then it takes (offset + zero) * sum(x) away and multiplies
by the scale. With u the unit roundoff of a type, and every addition wrong by 2^-23 of the magnitudes that have gone in,
the error is at most

    2^-23 * additions * sum_k |x| s (|value| + 2 offset + |zero|)     additions = g + k/g + some
    + sum_k |x| s |value| u                                           values that the operand's type cannot hold
    + 2^-23 * additions * sum_k |x| |o|                               offsets o
    + u |y| + half a subnormal                                        the output

Products with outliers are exact, and are sums of f32 as well: each counts as another addition, and their magnitudes as
terms. Tensor cores cut each term of a sum of f8e4m3 products where 13 bits below the largest end: `FP8_ADDITION`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from lowbit.dialect.epilogue import ACTIVATIONS, RESIDUAL
from lowbit.dialect.formats.byte_codes import SUM_COLUMNS
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.reference.definition import (
    F64,
    Array,
    activated,
    clamped,
    decode,
    dequantize,
    f64,
    halves,
    index_of,
    matmul,
    multiplied,
    of_experts,
    offset_of,
    outliers_of,
    row_scale_of,
    scale_of,
    zero_of,
)
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.folding import rounded, with_row_scales, with_table_in_f16

# Rounding: relative error (2^-precision: half an ulp) and half the least subnormal.
ROUNDING = {"f16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134), "f32": (2.0**-24, 2.0**-150)}
ADDITION = 2.0**-23  # relative error of an f32 addition in the tensor core, which truncates
FP8_ADDITION = 4 * 33 * 2.0**-13  # four mma of f8e4m3 make a sum, and each of 33 terms loses 2^-13 of the largest
OTHER_ADDITIONS = 64  # splits, warps of a block, bias; and the roundings of the multiplications by scales


def tolerance(
    spec: MatmulSpec,
    x: Array,
    codes: Array,
    scales: Array,
    zeros: Array | None = None,
    bias: Array | None = None,
    *,
    dequantized: bool = False,
    rounded_zeros: bool = False,
    rounded_outliers: bool = False,
    folded: bool = False,
    **others: Array,
) -> F64:
    """Returns the largest |y - matmul(...)| of a correct kernel, in the shape of y. Non-finite weights contribute
    nothing.

    dequantized     the kernel rounds whole weights to the operand's type (as the dequantize kernel does) and then
                    accumulates all of k
    rounded_zeros   the kernel rounds float zeros z to the operand's type, and each value - z again
                    (`Scaling.rounds_zeros`). The change is known: with v the weight so rounded,
                    |sum_k x s (v - (value - z))|. With dequantized, s * z is rounded, too: u s |z|
    rounded_outliers  the kernel rounds outliers, and what they add up to with zeros or offsets, to the operand's type
                    before it adds them to weights: `_outlier_error`
    folded          the kernel rounds weights as `MatmulSpec.fold_scales` allows it, and adds up all columns in the
                    tensor core: `_folding_error`
    """
    if spec.experts > 1:
        given = {"codes": codes, "scales": scales, "zeros": zeros, "bias": bias, **others}
        rounding = {"rounded_zeros": rounded_zeros, "rounded_outliers": rounded_outliers, "folded": folded}
        return of_experts(tolerance, spec, x, given, dequantized=dequantized, **rounding)
    spec, residual = spec.for_rows(len(x)), others.pop(RESIDUAL, None)
    y = matmul(spec.without_epilogue, x, codes, scales, zeros, bias, **others)
    scale, zero, offset = scale_of(spec, scales, others), zero_of(spec, zeros, others), offset_of(spec, others)
    sparse = np.abs(outliers_of(others, len(codes), spec.k))
    if spec.permuted:
        x = f64(x)[:, f64(others["permutation"]).astype(int)]
    error = _accumulated(spec, x, codes, scale, zero, sparse, dequantized, rounded_zeros)
    if rounded_outliers and spec.outliers:
        error += _outlier_error(spec, x, sparse, scale * zero if spec.zeros == "float" else offset)
    if offset.any():
        error += _offset_error(spec, x, offset, dequantized)
    if dequantized:
        error += _least_error(spec, x, others)
    if folded:
        given = {"codes": codes, "scales": scales, **({} if zeros is None else {"zeros": zeros}), **others}
        error += _folding_error(spec, multiplied(spec, x), given)
    if spec.is_gated:
        y, error = _gated(spec, y, error)
    elif residual is not None:
        error += ADDITION * (np.abs(np.where(np.isfinite(y), y, 0.0)) + np.abs(f64(residual)))
        y = y + f64(residual)
    y = np.where(np.isfinite(y), np.abs(y), 0.0)
    unit, least = ROUNDING[spec.out_dtype]
    return error + unit * (y + error) + least


def _gated(spec: MatmulSpec, sums: F64, error: F64) -> tuple[F64, F64]:
    """Returns act(g) u, and how far it is off where sums are: activations have slopes of at most 1.13, and their
    arithmetic is off by some ulps, with an exponential that is off by as many as its argument is large. Where that is
    infinite in f32, the result is 0."""
    gate, up = (np.where(np.isfinite(half), half, 0.0) for half in clamped(spec, sums))
    of_gate, of_up = halves(error)
    activation = ACTIVATIONS[str(spec.epilogue)]
    with np.errstate(over="ignore"):
        exponent = gate * (activation.linear + activation.cubic * gate * gate)
        slope = np.abs(exponent) / (1 + np.exp(exponent))
    slope, activated_gate = np.nan_to_num(slope), np.abs(activated(spec, gate))
    ulps = 10 + 5 * slope
    wrong = 1.13 * of_gate + ADDITION * ulps * activated_gate + 2.0**-118
    return activated_gate * up, wrong * (np.abs(up) + of_up) + activated_gate * of_up


def agrees(y: Array, expected: F64, tolerance: F64) -> NDArray[np.bool_]:
    """Tells where y is within the tolerance of `expected`, bool [m, n]. NaN and inf must be met exactly."""
    given = f64(y)
    with np.errstate(invalid="ignore"):
        near = np.abs(given - expected) <= tolerance
    return near | (given == expected) | (np.isnan(given) & np.isnan(expected))


def _accumulated(
    spec: MatmulSpec,
    x: Array,
    codes: Array,
    scale: F64,
    zero: F64,
    sparse: F64,
    dequantized: bool,
    rounded_zeros: bool,
) -> F64:
    """Returns the part of `tolerance` that comes from the sums, before y is rounded."""
    t = spec.dtype
    magnitude, size = np.abs(decode(spec, codes)), np.abs(scale)
    magnitude = np.where(np.isfinite(magnitude), magnitude, 0.0)
    unit, _ = ROUNDING[spec.act]
    rounding = _operand_error(spec)[index_of(spec, codes)]
    offset = {"uint": t.codes, "int": 1.5 * t.codes}.get(t.kind, 0.0)
    terms = magnitude + 2 * offset + np.abs(zero)
    entries = int(np.count_nonzero(sparse, axis=1).max(initial=0))
    additions = OTHER_ADDITIONS + (spec.group_size or spec.k) + spec.groups + entries
    if dequantized:
        terms, additions = magnitude + np.abs(zero), OTHER_ADDITIONS + spec.k
        rounding = rounding + unit * terms
        if spec.bilevel:  # scales are rounded before
            rounding = rounding + unit * terms
        if rounded_zeros and spec.zeros == "float":
            rounding = rounding + unit * np.abs(zero)
    each = ADDITION * additions + (FP8_ADDITION if spec.compute == "f8e4m3" else 0.0)
    magnitudes = np.abs(multiplied(spec, x))
    error = magnitudes @ (size * (each * terms + rounding)).T
    if entries:
        error += magnitudes @ ((ADDITION * additions + (unit if dequantized else 0.0)) * sparse).T
    if rounded_zeros and spec.zeros == "float":
        error += np.abs(f64(x) @ (scale * _zero_error(spec, codes, zero)).T)
    return error


def _offset_error(spec: MatmulSpec, x: Array, offset: F64, dequantized: bool) -> F64:
    """Returns the part of `tolerance` that comes from offsets [n, k]."""
    additions = OTHER_ADDITIONS + spec.k if dequantized else OTHER_ADDITIONS + (spec.group_size or spec.k) + spec.groups
    times = 2 if spec.bilevel else 1  # they are rounded before they are added
    unit = ADDITION * additions + dequantized * times * ROUNDING[spec.act][0]
    return unit * (np.abs(f64(x)) @ np.abs(offset).T)


def _outlier_error(spec: MatmulSpec, x: Array, sparse: F64, added: F64) -> F64:
    """The part of `tolerance` that outliers [n, k] bring that are rounded before weights: to bf16, which f16 numbers
    are not, and once more with the zeros or offsets [n, k] to which they are added."""
    unit, _ = ROUNDING[spec.act]
    sums = sparse + np.abs(added) if spec.zeros in ("float", "offset") else np.zeros_like(sparse)
    wrong = np.where(sparse > 0, (spec.act == "bf16") * sparse + sums, 0.0)
    return unit * (np.abs(f64(x)) @ wrong.T)


def folded_weight(spec: MatmulSpec, given: Mapping[str, Array]) -> F64:
    """W [n, k] of tensors as `pack` takes them, as `MatmulSpec.fold_scales` allows kernels to round it: divided by the
    scale of its row, `rounded`, and multiplied again."""
    if not spec.folds:
        return dequantize(spec, **given)
    tensors = with_row_scales(spec, {name: torch.as_tensor(t) for name, t in given.items()})
    rows = f64(tensors["row_scales"])[:, None]
    if spec.folds_in_f16:
        tensors["scales"] = tensors["scales"].half()
    plain = tensors | {"row_scales": torch.ones(len(rows))}
    return f64(rounded(spec, torch.from_numpy(dequantize(with_table_in_f16(spec), **plain)))) * rows


def _folding_error(spec: MatmulSpec, x: F64, given: Mapping[str, Array]) -> F64:
    """Returns the part of `tolerance` that comes from folded scales: |sum_k x (w' - w)| with w' the weight that is
    multiplied, and the loss of the tensor core where it adds up all columns of f8e4m3.

    Each of the 33 terms of an addition is cut 13 bits below the largest, a product or the sum so far. Sums of i8 are
    exact.
    """
    weights = dequantize(spec, **given), folded_weight(spec, given)
    exact, near = (np.nan_to_num(w, posinf=0.0, neginf=0.0) for w in weights)
    x = np.nan_to_num(x)
    if spec.compute == "i8":
        return np.abs(x @ (near - exact).T)
    sums = np.zeros((len(x), len(near)))
    lost = np.zeros_like(sums)
    for first in range(0, spec.k, SUM_COLUMNS):
        some = slice(first, first + SUM_COLUMNS)
        sums += x[:, some] @ near[:, some].T
        product = np.abs(x[:, some]).max(axis=1)[:, None] * np.abs(near[:, some]).max(axis=1)
        lost += (SUM_COLUMNS + 1) * 2.0**-13 * np.maximum(np.abs(sums), product)
    return np.abs(x @ (near - exact).T) + lost


def _least_error(spec: MatmulSpec, x: Array, others: Mapping[str, Array]) -> F64:
    """Returns the error of rounding to subnormals: half of one for every rounded weight, times the scale of its row."""
    rows = np.abs(row_scale_of(spec, others)).clip(min=1.0)[:, 0]
    return ROUNDING[spec.act][1] * np.abs(f64(x)).sum(axis=1, keepdims=True) * rows


def _operand_error(spec: MatmulSpec) -> F64:
    """Returns how far the value of every code may be off after rounding to the operand's type: [2**bits]."""
    values = spec.dtype.values()
    unit, least = ROUNDING[spec.act]
    exact = _rounded(spec, values) == values
    return np.where(exact | ~np.isfinite(values), 0.0, unit * np.abs(values) + least)


def _zero_error(spec: MatmulSpec, codes: Array, zero: F64) -> F64:
    """Returns how far value - zero is off where the operand's type rounds both and their difference: [n, k]."""
    values = decode(spec, codes)
    with np.errstate(invalid="ignore"):
        error = _rounded(spec, _rounded(spec, values) - _rounded(spec, zero)) - (values - zero)
    return np.where(np.isfinite(error), error, 0.0)


def _rounded(spec: MatmulSpec, values: F64) -> F64:
    """Returns values rounded to the operand's type."""
    return f64(torch.from_numpy(values.copy()).to(TORCH[spec.act]))
