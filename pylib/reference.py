"""What a matmul must give: the definition in float64, and a derived bound on how far a kernel may be off.

    x, codes, scales, zeros, bias = random_problem(spec, m=4, seed=0)
    y = mm(x, pack(spec, codes, scales, zeros, bias))
    assert agrees(y, matmul(spec, x, codes, ...), tolerance(spec, x, codes, ...)).all()

With `MatmulSpec.compute`, x is what it is quantized to (`multiplied`): the result is that of x8 times its scales.
Arguments are torch tensors or NumPy arrays in the form that `pylib.packed.pack` takes them, already rounded
to the spec's types. n is that of `codes`, so a few rows of a large weight can be checked by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel, integers_of
from lowbit.dialect.formats.byte_codes import LARGEST, SUM_COLUMNS
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import Role, TensorSlot
from lowbit.pylib.activation import quantize_rows
from lowbit.pylib.folding import with_row_scales, with_table_in_f16
from lowbit.pylib.outliers import draw, read_csr
from lowbit.pylib.torch_types import TORCH

Array = Tensor | np.ndarray
F64 = NDArray[np.float64]

# Rounding: relative error (2^-precision: half an ulp) and half the least subnormal.
ROUNDING = {"f16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134), "f32": (2.0**-24, 2.0**-150)}
ADDITION = 2.0**-23  # relative error of an f32 addition in the tensor core, which truncates
OUTLIERS = 0.02  # density of random ones
FP8_ADDITION = 4 * 33 * 2.0**-13  # four mma of f8e4m3 make a sum, and each of 33 terms loses 2^-13 of the largest
OTHER_ADDITIONS = 64  # splits, warps of a block, bias; and the roundings of the multiplications by scales
LEAST_SCALE = {"f16": 2.0**-14, "e4m3": 2.0**-6}  # normal numbers; the other types' are out of reach


def dequantize(
    spec: MatmulSpec, codes: Array, scales: Array, zeros: Array | None = None, **others: Array
) -> F64:
    """W[n, k] = scale * (decode(code) - zero) + offset + outlier, exact but for float64's rounding; NaN and inf as in
    IEEE.

    others: more tensors of the spec by name, of which scales multiply, too; scales of rows multiply offsets as well

    Columns are in the order of x.
    """
    scale, zero = _scale(spec, scales, others), _zero(spec, zeros, others)
    with np.errstate(invalid="ignore"):
        w = scale * (_decode(spec, codes) - zero) + _offset(spec, others) + _outliers(others, len(codes), spec.k)
    return w[:, np.argsort(_f64(others["permutation"]))] if spec.permuted else w


def multiplied(spec: MatmulSpec, x: Array) -> F64:
    """x [m, k] as it is multiplied: with `MatmulSpec.compute`, its values of 8 bits times their scales."""
    if spec.compute is None:
        return _f64(x)
    values, scales = quantize_rows(torch.as_tensor(x), spec.compute)
    with np.errstate(invalid="ignore"):
        return _f64(values) * _f64(scales)[:, None]


def matmul(
    spec: MatmulSpec,
    x: Array,
    codes: Array,
    scales: Array,
    zeros: Array | None = None,
    bias: Array | None = None,
    **others: Array,
) -> F64:
    """y[m, n] = x[m, k] @ W[n, k].T + bias[n] in float64."""
    with np.errstate(invalid="ignore"):
        product = multiplied(spec, x) @ dequantize(spec, codes, scales, zeros, **others).T
        return product if bias is None else product + _f64(bias)


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
    folded: bool = False,
    **others: Array,
) -> F64:
    """The largest |y - matmul(...)| [m, n] of a correct kernel; non-finite weights contribute nothing.

    A kernel accumulates x * (value + offset) of a group in f32, where the offset is what an integer's bits
    carry with them: 2^b, the hidden bit above them, and 2^(b-1) of offset binary. Then it takes
    (offset + zero) * sum(x) away and multiplies by the scale. With u the unit roundoff of a type, and every
    addition wrong by 2^-23 of the magnitudes that have gone in, the error is at most

        2^-23 * additions * sum_k |x| s (|value| + 2 offset + |zero|)     additions = g + k/g + some
        + sum_k |x| s |value| u      of values that the operand's type cannot hold
        + 2^-23 * additions * sum_k |x| |o|      with offsets o
        + u |y| + half a subnormal   of the output

    Products with outliers are exact, and are sums of f32 as well: each counts as another addition, and their
    magnitudes as terms.
    Tensor cores cut each term of a sum of f8e4m3 products where 13 bits below the largest end: `FP8_ADDITION`.

    dequantized: bound a kernel that rounds whole weights to the operand's type (as the dequantize kernel does)
    and then accumulates all of k.

    rounded_zeros: bound a kernel that rounds float zeros z to the operand's type, and each value - z again
    (`KernelPlan.rounds_zeros`). What that changes is known: with v the weight so rounded, |sum_k x s (v - (value -
    z))|. With dequantized, s * z is rounded, too: u s |z|.

    folded: bound a kernel that rounds weights as `MatmulSpec.fold_scales` allows it, and adds up all columns in the
    tensor core: `_folding_error`.
    """
    y = matmul(spec, x, codes, scales, zeros, bias, **others)
    scale, zero, offset = _scale(spec, scales, others), _zero(spec, zeros, others), _offset(spec, others)
    sparse = np.abs(_outliers(others, len(codes), spec.k))
    if spec.permuted:
        x = _f64(x)[:, _f64(others["permutation"]).astype(int)]
    error = _accumulated(spec, x, codes, scale, zero, sparse, dequantized, rounded_zeros)
    if offset.any():
        error += _offset_error(spec, x, offset, dequantized)
    if dequantized:
        error += _least_error(spec, x, others)
    if folded:
        given = {"codes": codes, "scales": scales, **({} if zeros is None else {"zeros": zeros}), **others}
        error += _folding_error(spec, multiplied(spec, x), given)
    y = np.where(np.isfinite(y), np.abs(y), 0.0)
    unit, least = ROUNDING[spec.out_dtype]
    return error + unit * (y + error) + least


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
    """The part of `tolerance` that is there before y is rounded."""
    t = spec.dtype
    magnitude, size = np.abs(_decode(spec, codes)), np.abs(scale)
    magnitude = np.where(np.isfinite(magnitude), magnitude, 0.0)
    unit, _ = ROUNDING[spec.act]
    rounding = _operand_error(spec)[_index(spec, codes)]
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
        error += np.abs(_f64(x) @ (scale * _zero_error(spec, codes, zero)).T)
    return error


def _offset_error(spec: MatmulSpec, x: Array, offset: F64, dequantized: bool) -> F64:
    """The part of `tolerance` that offsets [n, k] bring."""
    additions = OTHER_ADDITIONS + spec.k if dequantized else OTHER_ADDITIONS + (spec.group_size or spec.k) + spec.groups
    times = 2 if spec.bilevel else 1  # they are rounded before they are added
    unit = ADDITION * additions + dequantized * times * ROUNDING[spec.act][0]
    return unit * (np.abs(_f64(x)) @ np.abs(offset).T)


def folded_weight(spec: MatmulSpec, given: Mapping[str, Array]) -> F64:
    """W [n, k] of tensors as `pack` takes them, as `MatmulSpec.fold_scales` allows kernels to round it: divided by the
    scale of its row, rounded to f16 and then to f8e4m3, and multiplied again."""
    if not spec.folds:
        return dequantize(spec, **given)
    w = dequantize(with_table_in_f16(spec), **given)
    tensors = {name: torch.as_tensor(t) for name, t in given.items()}
    rows = _f64(with_row_scales(spec, tensors)["row_scales"])[:, None]
    near = torch.from_numpy(w / rows).half().float()
    return _f64(near.clamp(-LARGEST["f8e4m3"], LARGEST["f8e4m3"]).to(TORCH["e4m3"])) * rows


def _folding_error(spec: MatmulSpec, x: F64, given: Mapping[str, Array]) -> F64:
    """The part of `tolerance` that folded scales bring: |sum_k x (w' - w)| with w' the weight that is multiplied, and
    what the tensor core loses where it adds up all columns.

    Each of the 33 terms of an addition is cut 13 bits below the largest, a product or the sum so far.
    """
    weights = dequantize(spec, **given), folded_weight(spec, given)
    exact, near = (np.nan_to_num(w, posinf=0.0, neginf=0.0) for w in weights)
    x = np.nan_to_num(x)
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
    rows = np.abs(_row_scale(spec, others)).clip(min=1.0)[:, 0]
    return ROUNDING[spec.act][1] * np.abs(_f64(x)).sum(axis=1, keepdims=True) * rows


def agrees(y: Array, expected: F64, tolerance: F64) -> NDArray[np.bool_]:
    """Where y is within the tolerance of what is expected; NaN and inf must be met exactly. bool [m, n]."""
    given = _f64(y)
    with np.errstate(invalid="ignore"):
        near = np.abs(given - expected) <= tolerance
    return near | (given == expected) | (np.isnan(given) & np.isnan(expected))


def random_problem(
    spec: MatmulSpec, m: int, seed: int = 0, *, finite: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(x, codes, scales, zeros, bias) of `random_inputs`."""
    x, tensors = random_inputs(spec, m, seed, finite=finite)
    return x, tensors["codes"], tensors["scales"], tensors.get("zeros"), tensors.get("bias")


def random_inputs(
    spec: MatmulSpec, m: int, seed: int = 0, *, finite: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """x [m, k] ~ N(0, 1), and all tensors of a spec by name as `pack` takes them.

    Scales differ from group to group and bring y to O(1) where their type has such small numbers. Integers and tables:
    all codes equally often. Floats: N(0, 1) quantized, over the format's whole range where that is small. finite=False
    adds a few NaN and inf codes where the format has them.
    """
    rng = np.random.default_rng(seed)
    tensors = _draw_tensors(spec, rng, finite)
    return torch.from_numpy(rng.standard_normal((m, spec.k))).to(TORCH[spec.act]), tensors


def _draw_tensors(spec: MatmulSpec, rng: np.random.Generator, finite: bool) -> dict[str, Tensor]:
    codes = _draw_codes(spec, rng, finite)
    values = _decode(spec, codes)
    drawn: dict[str, Tensor] = {}
    for slot in _slots(spec, "codes"):
        drawn[slot.name] = torch.from_numpy(codes)
    if spec.bilevel:
        drawn |= _draw_two_levels(spec, rng, spec.bilevel)
    for slot in _slots(spec, "zero", coded=False):
        drawn[slot.name] = _draw_zeros(spec, rng, slot, values)
    zeros = drawn.get("zeros")
    typical = _typical_scale(spec, values - _zero(spec, zeros, drawn))
    for slot in _slots(spec, "offset", coded=False):
        drawn[slot.name] = torch.from_numpy(rng.normal(0.0, typical, slot.given)).to(TORCH[slot.storage])
    for slot in _slots(spec, "scale", coded=False):
        drawn[slot.name] = _draw_scales(rng, slot, typical)
        typical = 1.0  # of scales beyond the first
    for slot in _slots(spec, "outliers"):
        drawn[slot.name] = draw(spec.n, spec.k, OUTLIERS, torch.Generator().manual_seed(int(rng.integers(1 << 31))))
    for slot in (*_slots(spec, "super_scale"), *_slots(spec, "super_offset")):
        level = 1.0 if slot.name.startswith("zero") else typical
        drawn[slot.name] = (drawn[slot.name] * level).to(TORCH[slot.storage])
    for slot in _slots(spec, "permutation"):
        drawn[slot.name] = torch.from_numpy(rng.permutation(spec.k))
    for slot in _slots(spec, "bias"):
        drawn[slot.name] = torch.from_numpy(rng.standard_normal(slot.given)).to(TORCH[slot.storage])
    return drawn


def _slots(spec: MatmulSpec, role: Role, coded: bool = True) -> list[TensorSlot]:
    """The slots of a role; coded=False leaves those out whose numbers are codes."""
    return [slot for slot in spec.given_tensors if slot.role == role and (coded or not slot.code)]


def _draw_two_levels(spec: MatmulSpec, rng: np.random.Generator, bilevel: Bilevel) -> dict[str, Tensor]:
    """Numbers that are codes, all codes equally often, and their second level: scales that bring them to O(1)."""
    drawn: dict[str, Tensor] = {}
    for slot in spec.given_tensors:
        if slot.code and slot.storage == "u8":
            t = integers_of(slot.code)
            values = t.values()[rng.integers(0, t.codes, slot.given)]
            drawn[slot.name] = torch.from_numpy(values).int()
        elif slot.code:
            drawn[slot.name] = torch.from_numpy(rng.normal(size=slot.given)).to(TORCH["e4m3"])
        elif slot.role == "super_zero":
            drawn[slot.name] = torch.from_numpy(rng.normal(3.0, 1.0, slot.given)).to(TORCH[slot.storage])
        elif slot.role == "super_scale":
            size = dtype(spec.scale, bilevel.table).max if spec.scale != "e4m3" else 1.0
            drawn[slot.name] = torch.from_numpy(np.exp2(rng.uniform(-1, 1, slot.given)) / size)
        elif slot.role == "super_offset":
            drawn[slot.name] = torch.from_numpy(rng.uniform(3.0, 5.0, slot.given))  # sums are of the size of O
    return drawn


def _draw_codes(spec: MatmulSpec, rng: np.random.Generator, finite: bool) -> np.ndarray:
    t, shape = spec.dtype, (spec.n, spec.k)
    if t.kind == "float":
        # Five exponent bits and more reach beyond f16's range or precision: keep to the middle.
        codes = t.encode(rng.standard_normal(shape) * (t.max / 4 if t.exponent < 5 else 1.0))
    else:
        codes = rng.integers(0, t.codes, shape, dtype=np.uint8)
    if not finite and t.has_nan:
        special = np.flatnonzero(~np.isfinite(t.values()))
        codes = np.where(rng.random(shape) < 1 / (8 * spec.k), rng.choice(special, shape), codes).astype(np.uint8)
    return t.decode(codes).astype(np.int8) if t.kind == "int" else codes


def _draw_zeros(spec: MatmulSpec, rng: np.random.Generator, slot: TensorSlot, values: F64) -> Tensor:
    """Zeros within the range of the decoded values."""
    if slot.storage == "u8":
        known = spec.dtype.values()
        return torch.from_numpy(rng.integers(int(known.min()), int(known.max()) + 1, slot.given))
    spread = values[np.isfinite(values)]
    return torch.from_numpy(rng.normal(spread.mean(), spread.std() / 2, slot.given)).to(TORCH[slot.storage])


def _typical_scale(spec: MatmulSpec, weights: F64) -> float:
    """The scale that brings y to O(1)."""
    rms = np.sqrt(np.mean(np.square(weights[np.isfinite(weights)]))) or 1.0
    return max(1.0 / (rms * np.sqrt(spec.k)), 2 * LEAST_SCALE.get(spec.scale, 0.0))


def _draw_scales(rng: np.random.Generator, slot: TensorSlot, typical: float) -> Tensor:
    drawn = typical * np.exp2(rng.uniform(-1, 1, slot.given))
    if slot.storage == "e8m0":
        drawn = np.exp2(np.round(np.log2(drawn)))
    return torch.from_numpy(drawn).float().to(TORCH[slot.storage])


def _operand_error(spec: MatmulSpec) -> F64:
    """Returns how far the value of every code may be off after rounding to the operand's type: [2**bits]."""
    values = spec.dtype.values()
    unit, least = ROUNDING[spec.act]
    exact = _rounded(spec, values) == values
    return np.where(exact | ~np.isfinite(values), 0.0, unit * np.abs(values) + least)


def _zero_error(spec: MatmulSpec, codes: Array, zero: F64) -> F64:
    """Returns how far value - zero is off where the operand's type rounds both and their difference: [n, k]."""
    values = _decode(spec, codes)
    with np.errstate(invalid="ignore"):
        error = _rounded(spec, _rounded(spec, values) - _rounded(spec, zero)) - (values - zero)
    return np.where(np.isfinite(error), error, 0.0)


def _rounded(spec: MatmulSpec, values: F64) -> F64:
    """Returns values rounded to the operand's type."""
    return _f64(torch.from_numpy(values.copy()).to(TORCH[spec.act]))


def _decode(spec: MatmulSpec, codes: Array) -> F64:
    return spec.dtype.values()[_index(spec, codes)]


def _index(spec: MatmulSpec, codes: Array) -> NDArray[np.int64]:
    """Codes as 0 .. 2^b-1: signed values in two's complement."""
    return np.asarray(codes.cpu() if isinstance(codes, Tensor) else codes).astype(np.int64) & (
        spec.dtype.codes - 1
    )


def _scale(spec: MatmulSpec, scales: Array, others: Mapping[str, Array]) -> F64:
    """The product of all scales: [n, k]."""
    result = _spread(spec, _second_level(spec, "scale", scales, others))
    for slot in spec.given_tensors:
        if slot.role == "scale" and slot.name in others:
            result = result * _spread(spec, others[slot.name])
    return result


def _zero(spec: MatmulSpec, zeros: Array | None, others: Mapping[str, Array]) -> F64:
    """The zeros: [n, k], or one 0."""
    if zeros is None or spec.zeros == "int":
        return _spread(spec, zeros)
    return _spread(spec, _second_level(spec, "zero", zeros, others))


def _second_level(spec: MatmulSpec, role: Role, given: Array, others: Mapping[str, Array]) -> Array:
    """Numbers [n, groups] of what is given, which with two levels are codes."""
    bilevel, values = spec.bilevel, _f64(given)
    if bilevel is None:
        return given

    def of_groups(name: str) -> F64:
        rows = np.repeat(_f64(others[f"{role}_{name}"]), bilevel.rows, axis=0)
        return np.repeat(rows, bilevel.groups, axis=1)[: len(values)]

    if bilevel.table:
        values = np.array(bilevel.table)[values.astype(int)]
    scaled = of_groups("scales") * (values - (of_groups("zeros") if bilevel.zeros else 0.0))
    return scaled + (of_groups("offsets") if bilevel.offsets else 0.0)


def _row_scale(spec: MatmulSpec, others: Mapping[str, Array]) -> F64:
    """The product of all scales of rows: [n, 1], or one 1."""
    result = np.ones((1, 1))
    for slot in spec.given_tensors:
        if slot.role == "scale" and slot.index != "group" and slot.name in others:
            result = result * _f64(others[slot.name]).reshape(-1, 1)
    return result


def _offset(spec: MatmulSpec, others: Mapping[str, Array]) -> F64:
    """The sum of all offsets, scaled by row: [n, k], or one 0."""
    result = np.zeros((1, 1))
    for slot in spec.given_tensors:
        if slot.role == "offset" and slot.name in others:
            result = result + _spread(spec, _second_level(spec, "offset", others[slot.name], others))
    return result * _row_scale(spec, others)


def _outliers(others: Mapping[str, Array], n: int, k: int) -> F64:
    """Returns the matrix that is added to the weight: [n, k], or one 0 without outliers."""
    given = others.get("outliers")
    return np.zeros((1, 1)) if given is None else _f64(read_csr(given, n, k).to_dense())


def _spread(spec: MatmulSpec, table: Array | None) -> F64:
    """A number per group, [n, groups], or per row, [n], for every column: [n, k]. Of nothing, 0."""
    if table is None:
        return np.zeros((1, 1))
    values = _f64(table)
    values = values.reshape(values.shape[0], -1)
    return np.repeat(values, spec.k // values.shape[1], axis=1)


def _f64(a: Array) -> F64:
    """Returns a as float64; torch has types that NumPy has not, and float8 converts by way of float32."""
    if isinstance(a, Tensor):
        a = a.detach().cpu()
        a = (a.float() if a.is_floating_point() and a.element_size() < 4 else a).double().numpy()
    return np.asarray(a, dtype=np.float64)
