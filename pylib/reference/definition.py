"""The definition of a matmul: weights and results in float64, from tensors as `pack` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowbit.dialect.epilogue import ACTIVATIONS, RESIDUAL
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import Role
from lowbit.pylib.runtime.activation import quantize_rows
from lowbit.pylib.weights.outliers import read_csr

Array = Tensor | np.ndarray
F64 = NDArray[np.float64]


def dequantize(
    spec: MatmulSpec, codes: Array, scales: Array, zeros: Array | None = None, **others: Array
) -> F64:
    """W[n, k] = scale * (decode(code) - zero) + offset + outlier, exact but for float64's rounding; NaN and inf as in
    IEEE.

    others: more tensors of the spec by name, of which scales multiply, too; scales of rows multiply offsets as well

    Columns are in the order of x.
    """
    scale, zero = scale_of(spec, scales, others), zero_of(spec, zeros, others)
    with np.errstate(invalid="ignore"):
        w = scale * (decode(spec, codes) - zero) + offset_of(spec, others) + outliers_of(others, len(codes), spec.k)
    if not spec.permuted:
        return w
    orders = f64(others["permutation"]).reshape(-1, 1, spec.k)  # of each expert
    return np.take_along_axis(w.reshape(len(orders), -1, spec.k), np.argsort(orders), 2).reshape(w.shape)


def multiplied(spec: MatmulSpec, x: Array) -> F64:
    """x [m, k] as it is multiplied: with `MatmulSpec.compute`, its values of 8 bits times their scales."""
    compute = spec.for_rows(len(x)).compute
    if compute is None:
        return f64(x)
    values, scales = quantize_rows(torch.as_tensor(x), compute)
    with np.errstate(invalid="ignore"):
        return f64(values) * f64(scales)[:, None]


def matmul(
    spec: MatmulSpec,
    x: Array,
    codes: Array,
    scales: Array,
    zeros: Array | None = None,
    bias: Array | None = None,
    **others: Array,
) -> F64:
    """y[m, n] = x[m, k] @ W[n, k].T + bias[n] in float64, and what `MatmulSpec.epilogue` makes of it; of several
    experts what each makes of all rows of x, side by side: [m, experts * outputs].

    others: more tensors of the spec by name, and the residual
    """
    if spec.experts > 1:
        of_all = {"codes": codes, "scales": scales, "zeros": zeros, "bias": bias, **others}
        return of_experts(matmul, spec, x, of_all)
    residual = others.pop(RESIDUAL, None)
    with np.errstate(invalid="ignore", over="ignore"):
        product = multiplied(spec, x) @ dequantize(spec, codes, scales, zeros, **others).T
        sums = product if bias is None else product + f64(bias)
        if spec.is_gated:
            gate, up = clamped(spec, sums)
            return activated(spec, gate) * up
        return sums if residual is None else sums + f64(residual)


def of_experts(
    function: Callable[..., F64], spec: MatmulSpec, x: Array, tensors: Mapping[str, Array | None], **rest: Any
) -> F64:
    """Returns the columns [m, outputs] that a function gives for each expert, side by side."""
    one = replace(spec.for_rows(len(x)), n=spec.n // spec.experts, experts=1)
    each = (of_expert(spec, tensors, expert) for expert in range(spec.experts))
    return np.concatenate([function(one, x, **of_one, **rest) for of_one in each], axis=1)


def of_expert(spec: MatmulSpec, tensors: Mapping[str, Array | None], expert: int) -> dict[str, Array]:
    """Returns the tensors of one expert, of those of all as `pack` takes them."""

    def cut(name: str, tensor: Array) -> Array:
        whole = read_csr(tensor, spec.n, spec.k).to_dense() if name == "outliers" else tensor
        part = whole[expert * len(whole) // spec.experts : (expert + 1) * len(whole) // spec.experts]
        return part.to_sparse_csr() if isinstance(part, Tensor) and name == "outliers" else part

    return {name: cut(name, tensor) for name, tensor in tensors.items() if tensor is not None}


def of_slots(every: F64, spec: MatmulSpec, experts: Array) -> F64:
    """Returns what the expert of each slot makes of it, [slots, outputs], of what every expert does, [slots, experts *
    outputs]. experts: [slots]"""
    columns = f64(experts).astype(int)[:, None] * spec.outputs + np.arange(spec.outputs)
    return np.take_along_axis(every, columns, 1)


def halves(sums: F64) -> tuple[F64, F64]:
    """Returns the columns of the gate and those that it multiplies."""
    middle = sums.shape[1] // 2
    return sums[:, :middle], sums[:, middle:]


def clamped(spec: MatmulSpec, sums: F64) -> tuple[F64, F64]:
    """Returns `halves` within the limit of the spec's activation, and the second with its shift."""
    activation, (gate, up) = ACTIVATIONS[str(spec.epilogue)], halves(sums)
    limit = activation.limit
    return np.minimum(gate, limit), np.clip(up, -limit, limit) + activation.shift


def activated(spec: MatmulSpec, gate: F64) -> F64:
    """Returns g / (1 + exp(-g (c + d g^2))) with the numbers of the spec's activation."""
    activation = ACTIVATIONS[str(spec.epilogue)]
    with np.errstate(over="ignore", invalid="ignore"):
        return gate / (1 + np.exp(-gate * (activation.linear + activation.cubic * gate * gate)))


def decode(spec: MatmulSpec, codes: Array) -> F64:
    return spec.dtype.values()[index_of(spec, codes)]


def index_of(spec: MatmulSpec, codes: Array) -> NDArray[np.int64]:
    """Codes as 0 .. 2^b-1: signed values in two's complement."""
    return np.asarray(codes.cpu() if isinstance(codes, Tensor) else codes).astype(np.int64) & (
        spec.dtype.codes - 1
    )


def scale_of(spec: MatmulSpec, scales: Array, others: Mapping[str, Array]) -> F64:
    """Returns the product of all scales: [n, k]."""
    result = _spread(spec, _second_level(spec, "scale", scales, others))
    for slot in spec.given_tensors:
        if slot.role == "scale" and slot.name in others:
            result = result * _spread(spec, others[slot.name])
    return result


def zero_of(spec: MatmulSpec, zeros: Array | None, others: Mapping[str, Array]) -> F64:
    """Returns the zeros [n, k]; [[0]] without any."""
    if zeros is None or spec.zeros == "int":
        return _spread(spec, zeros)
    return _spread(spec, _second_level(spec, "zero", zeros, others))


def _second_level(spec: MatmulSpec, role: Role, given: Array, others: Mapping[str, Array]) -> Array:
    """Numbers [n, groups] of what is given, which with two levels are codes."""
    bilevel, values = spec.bilevel, f64(given)
    if bilevel is None:
        return given

    def of_groups(name: str) -> F64:
        rows = np.repeat(f64(others[f"{role}_{name}"]), bilevel.rows, axis=0)
        return np.repeat(rows, bilevel.groups, axis=1)[: len(values)]

    if bilevel.table:
        values = np.array(bilevel.table)[values.astype(int)]
    scaled = of_groups("scales") * (values - (of_groups("zeros") if bilevel.zeros else 0.0))
    return scaled + (of_groups("offsets") if bilevel.offsets else 0.0)


def row_scale_of(spec: MatmulSpec, others: Mapping[str, Array]) -> F64:
    """Returns the product of all scales of rows [n, 1]; [[1]] without any."""
    result = np.ones((1, 1))
    for slot in spec.given_tensors:
        if slot.role == "scale" and slot.index != "group" and slot.name in others:
            result = result * f64(others[slot.name]).reshape(-1, 1)
    return result


def offset_of(spec: MatmulSpec, others: Mapping[str, Array]) -> F64:
    """Returns the sum of all offsets, scaled by row [n, k]; [[0]] without any."""
    result = np.zeros((1, 1))
    for slot in spec.given_tensors:
        if slot.role == "offset" and slot.name in others:
            result = result + _spread(spec, _second_level(spec, "offset", others[slot.name], others))
    return result * row_scale_of(spec, others)


def outliers_of(others: Mapping[str, Array], n: int, k: int) -> F64:
    """Returns the matrix that is added to the weight: [n, k], or one 0 without outliers."""
    given = others.get("outliers")
    return np.zeros((1, 1)) if given is None else f64(read_csr(given, n, k).to_dense())


def _spread(spec: MatmulSpec, table: Array | None) -> F64:
    """A number per group, [n, groups], or per row, [n], for every column: [n, k]. Of nothing, 0."""
    if table is None:
        return np.zeros((1, 1))
    values = f64(table)
    values = values.reshape(values.shape[0], -1)
    return np.repeat(values, spec.k // values.shape[1], axis=1)


def f64(a: Array) -> F64:
    """Returns a as float64; torch has types that NumPy has not, and float8 converts by way of float32."""
    if isinstance(a, Tensor):
        a = a.detach().cpu()
        a = (a.float() if a.is_floating_point() and a.element_size() < 4 else a).double().numpy()
    return np.asarray(a, dtype=np.float64)
