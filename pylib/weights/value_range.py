"""Tells whether the values of a weight fit the activation's type.

Kernels for many tokens round whole weights s (q - z) or s q + o to the type of x before they multiply: the dequantize
kernel, and wgmma schedules that scale weights. Where such a value overflows, or a whole row is so small that it loses
its digits, they would be wrong, and a weight has a wide range: kernels then scale sums in f32 for any number of tokens,
and the gradient to x is taken with a weight in f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import Index
from lowbit.pylib.operator.tracing import is_observed
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import outliers
from lowbit.pylib.weights.dequantized import decoded, numbers
from lowbit.pylib.weights.tensor_checks import state_of

Limits = tuple[float, float]
"""The largest magnitude and the smallest normal number."""


def has_wide_range(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> bool | None:
    """Tells whether a weight has a wide range; it is looked at once, and again when its tensors have changed.

    Returns None while torch traces or a CUDA graph is recorded, when nothing can be looked at.
    """
    codes, state = tensors["codes"], state_of(tensors.values())
    known, wide = getattr(codes, "_lowbit_wide_range", (None, None))
    if known == state:
        return cast(bool, wide)
    if is_observed() or (codes.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    with torch.no_grad():
        wide = not _fits(spec, tensors)
    codes._lowbit_wide_range = (state, wide)  # type: ignore[attr-defined]
    return wide


def _fits(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> bool:
    """Tells whether no value overflows, and the largest of every row is 0 or a normal number of the act type.

    Kernels round a weight before or after its row is scaled, so it has to fit both ways.
    """
    group, row = _scales(spec, tensors, "group"), _scales(spec, tensors, "padded_row", "row")
    zero, offset = (_added(spec, name, tensors) for name in ("zeros", "offsets"))
    factors = [row.new_ones(1, 1), row] if row.numel() > 1 else [row]
    limits = _limits(spec, tensors)
    return all(_scaled_fit(spec, tensors["codes"], f * group, zero, f * offset, limits) for f in factors)


def _scaled_fit(
    spec: MatmulSpec, codes: Tensor, scale: Tensor, zero: Tensor, offset: Tensor, limits: Limits
) -> bool:
    """Tells the same of s (q - z) + o for these s, z and o."""
    largest, smallest = limits
    values = np.abs(finite_values(spec))
    top = float(values.max())
    size = scale.abs()
    if bool((size * zero.abs()).max() > largest):
        return False
    if spec.zeros == "float":
        return bool(zero.abs().max() + top <= largest) and _codes_fit(spec, codes, scale, zero, offset, limits)
    if spec.zeros == "offset":
        return _codes_fit(spec, codes, scale, zero, offset, limits)
    # Most weights are known by their scales: codes differ from a whole zero by 1 at least.
    step = 1.0 if spec.zeros == "int" else float(values[values > 0].min(initial=top))
    bounded = bool((size * (top + zero.abs())).max() <= largest)
    rows = size.amax(dim=1) * step
    if bounded and bool(((rows >= smallest) | (rows == 0)).all()):
        return True
    return _codes_fit(spec, codes, scale, zero, offset, limits)


def _codes_fit(
    spec: MatmulSpec, codes: Tensor, scale: Tensor, zero: Tensor, offset: Tensor, limits: Limits
) -> bool:
    """Tells the same by the codes of every group: the largest |s (q - z) + o| is at the least or the largest q."""
    largest, smallest = limits
    for rows, values in decoded(spec, codes, finite_values(spec)):
        grouped = values.view(len(values), scale.shape[1], -1)
        s, z, o = (t[rows] if len(t) > 1 else t for t in (scale, zero, offset))
        ends = [(s * (q - z) + o).abs() for q in grouped.aminmax(dim=2)]
        peaks = torch.maximum(*ends).amax(dim=1)
        if bool(((peaks > largest) | ((peaks < smallest) & (peaks > 0))).any()):
            return False
    return True


def finite_values(spec: MatmulSpec) -> np.ndarray:
    """Returns the values of all codes, with 0 for NaN and infinity, which are what they are in any type."""
    values = spec.dtype.values()
    return np.where(np.isfinite(values), values, 0.0)


def _limits(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> Limits:
    """Returns the largest magnitude that no outlier takes beyond the act type, and that type's smallest normal
    number."""
    info = torch.finfo(TORCH[spec.act])
    added = outliers.largest(tensors["outliers"], spec.n) if spec.outliers else 0.0
    return info.max - added, info.smallest_normal


def _scales(spec: MatmulSpec, tensors: Mapping[str, Tensor], *indices: Index) -> Tensor:
    """Returns the product of all scales of groups or of rows, f64 [n, groups] or [n, 1]; [[1]] where
    the weight has none."""
    result = torch.ones((1, 1), dtype=torch.float64, device=tensors["codes"].device)
    for slot in spec.given_tensors:
        if slot.role == "scale" and slot.index in indices:
            result = result * numbers(spec, slot.name, tensors).double()
    return result


def _added(spec: MatmulSpec, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the zeros or offsets, f64 [n, groups]; where there are none, one 0."""
    if any(slot.name == name for slot in spec.given_tensors):
        return numbers(spec, name, tensors).double()
    return torch.zeros((1, 1), dtype=torch.float64, device=tensors["codes"].device)
