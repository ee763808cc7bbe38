"""Whether the values of a weight are numbers of the activation's type.

Kernels for many tokens round whole weights s (q - z) to the type of x before they multiply: the dequantize kernel, and
wgmma schedules that scale weights. Where such a value overflows, or a whole row is so small that it loses its digits,
they would be wrong, and a weight has a wide range: kernels then scale sums in f32 for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack

from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.pylib.memory_order import unpack_codes, unpack_groups
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weight_values import CHECKED, least


def has_wide_range(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> bool:
    """Tells whether a weight has a wide range; it is looked at once, and the answer is kept with its codes.

    While torch traces or a CUDA graph is recorded, nothing can be looked at, and a weight passes for an ordinary one.
    """
    codes = tensors["codes"]
    known = known_range(codes)
    if known is not None:
        return known
    if _len_torch_dispatch_stack() or _is_tracing() or (codes.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    with torch.no_grad():
        wide = not _fits(spec, tensors)
    codes._lowbit_wide_range = (codes.data_ptr(), wide)  # type: ignore[attr-defined]
    return wide


def known_range(codes: Tensor) -> bool | None:
    """Returns what `has_wide_range` found for the weight of these codes; None where it has not been asked."""
    address, wide = getattr(codes, "_lowbit_wide_range", (0, None))
    return wide if address == codes.data_ptr() else None


def _fits(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> bool:
    """Tells whether no value overflows, and the largest of every row is 0 or a normal number of the act type."""
    scale, zero = _scale(spec, tensors), _zero(spec, tensors)
    largest, smallest = _limits(spec)
    values = np.abs(finite_values(spec))
    top = float(values.max())
    if bool((scale * zero.abs()).max() > largest):
        return False
    if spec.zeros == "float":
        return bool(zero.abs().max() + top <= largest) and _codes_fit(spec, tensors["codes"], scale, zero)
    # Most weights are known by their scales: codes differ from a whole zero by 1 at least.
    step = 1.0 if spec.zeros == "int" else float(values[values > 0].min(initial=top))
    bounded = bool((scale * (top + zero.abs())).max() <= largest)
    rows = scale.amax(dim=1) * step
    if bounded and bool(((rows >= smallest) | (rows == 0)).all()):
        return True
    return _codes_fit(spec, tensors["codes"], scale, zero)


def _codes_fit(spec: MatmulSpec, codes: Tensor, scale: Tensor, zero: Tensor) -> bool:
    """Tells the same by the codes of every group: the largest |s (q - z)| is at the least or the largest q."""
    largest, smallest = _limits(spec)
    for rows, values in _values(spec, codes):
        grouped = values.view(len(values), scale.shape[1], -1)
        low, high = grouped.aminmax(dim=2)
        z = zero[rows] if zero.numel() > 1 else zero
        peaks = (scale[rows] * torch.maximum((high - z).abs(), (low - z).abs())).amax(dim=1)
        if bool(((peaks > largest) | ((peaks < smallest) & (peaks > 0))).any()):
            return False
    return True


def _values(spec: MatmulSpec, codes: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields a few rows at a time, with their decoded codes."""
    packing, table = spec.packing, torch.from_numpy(_by_stored_code(spec)).to(codes.device)
    step = max(1, CHECKED // (ROWS * packing.padded_k))
    for first in range(0, packing.row_blocks, step):
        part = codes[first : first + step]
        rows = slice(ROWS * first, min(ROWS * (first + len(part)), packing.n))
        yield rows, table[unpack_codes(replace(packing, n=rows.stop - rows.start), part).long()]


def finite_values(spec: MatmulSpec) -> np.ndarray:
    """Returns the values of all codes, with 0 for NaN and infinity, which are what they are in any type."""
    values = spec.dtype.values()
    return np.where(np.isfinite(values), values, 0.0)


def _by_stored_code(spec: MatmulSpec) -> np.ndarray:
    """Returns the value of every code as it is in memory: signed ones are in offset binary."""
    return np.roll(finite_values(spec), -least(spec))


def _limits(spec: MatmulSpec) -> tuple[float, float]:
    """Returns the largest and the smallest normal number of the act type."""
    info = torch.finfo(TORCH[spec.act])
    return info.max, info.smallest_normal


def _scale(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the magnitude of the product of all scales, f64 [n, groups]."""
    found = [_numbers(spec, slot.name, tensors) for slot in spec.tensors if slot.role == "scale"]
    result = found[0]
    for other in found[1:]:
        result = result * other
    return result.abs()


def _zero(spec: MatmulSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the zeros, f64 [n, groups], or one 0."""
    names = [slot.name for slot in spec.tensors if slot.role == "zero"]
    if not names:
        return torch.zeros((1, 1), dtype=torch.float64, device=tensors["codes"].device)
    zero = _numbers(spec, names[0], tensors)
    return zero + least(spec) if spec.zeros == "int" else zero


def _numbers(spec: MatmulSpec, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns a tensor of a weight as f64: [n, groups], or [n, 1] for one number a row."""
    (slot,) = (slot for slot in spec.tensors if slot.name == name)
    stored = tensors[name]
    stored = unpack_groups(spec.packing, stored) if slot.index == "group" else stored.view(-1, 1)
    return stored.view(TORCH[slot.storage]).float().double()
