"""The values of a packed weight in torch, on the device that it is on: codes decoded, scales and the rest as numbers.

`dequantize` is the definition of a weight in f32. Kernels give the same, rounded to the act type; where zeros are
subtracted, from codes of scales or offsets included, they may differ from it by f32 roundings, else they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel, least_code
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights import outliers
from lowbit.pylib.weights.at_once import at_once
from lowbit.pylib.weights.memory_order import unpack_blocks, unpack_codes, unpack_groups
from lowbit.pylib.weights.shared_bytes import codes_of
from lowbit.pylib.weights.values import least

_SCALING = ("group", "padded_row")


def dequantize(spec: MatmulSpec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Returns W [n, k] of the packed tensors, computed in f32."""
    have = {slot.name: numbers(spec, slot.name, tensors) for slot in spec.given_tensors if slot.index in _SCALING}
    sparse = outliers.unpack_lines(tensors["outliers"], spec.n) if spec.outliers else None
    row, scale, zero, offset = (have.get("row_scales"), have["scales"], have.get("zeros"), have.get("offsets"))
    if row is not None:
        scale, offset = row * scale, None if offset is None else row * offset
    result = torch.empty((spec.n, spec.k), dtype=dtype, device=tensors["codes"].device)
    for rows, values in decoded(spec, tensors["codes"], spec.dtype.values().astype(np.float32)):
        grouped = values.view(len(values), scale.shape[1], -1)
        if zero is not None:
            grouped = grouped - zero[rows, :, None]
        grouped = grouped * scale[rows, :, None]
        if offset is not None:
            grouped = grouped + offset[rows, :, None]
        total = grouped.view(values.shape)
        if sparse is not None:
            here = (sparse.rows >= rows.start) & (sparse.rows < rows.stop)
            total[sparse.rows[here] - rows.start, sparse.columns[here]] += sparse.values[here]
        result[rows] = total.to(dtype)
    return in_order_of_x(result, tensors["permutation"]) if spec.permuted else result


def in_order_of_x(w: Tensor, permutation: Tensor, permute: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Returns the columns of w [n, k], which are stored permuted, in the order of x.

    permutation   i32 [experts k]: that of each expert, which has n / experts rows of w
    permute       returns columns of rows [n, k] in the order of i32 [k]; None: torch does
    """
    experts = len(permutation) // w.shape[1]
    permute = permute or _take_columns
    parts = [permute(*each) for each in zip(w.chunk(experts), map(inverse_of, permutation.chunk(experts)))]
    return parts[0] if experts == 1 else torch.cat(parts)


def _take_columns(w: Tensor, columns: Tensor) -> Tensor:
    return w.index_select(1, columns)


def inverse_of(permutation: Tensor) -> Tensor:
    """Returns the permutation, in i32, that undoes one: where its result has column j of what it permutes."""
    places = torch.arange(len(permutation), dtype=torch.int32, device=permutation.device)
    return torch.empty_like(places).index_copy_(0, permutation.long(), places)


def decoded(spec: MatmulSpec, codes: Tensor, values: np.ndarray) -> Iterator[tuple[slice, Tensor]]:
    """Yields a few rows at a time, with what stands in `values` for their codes, by code."""
    packing, table = spec.packing, torch.from_numpy(np.roll(values, -least(spec))).to(codes.device)
    step = max(1, at_once(codes.device) // (ROWS * packing.padded_k))
    for first in range(0, packing.row_blocks, step):
        part = codes[first : first + step]
        rows = slice(ROWS * first, min(ROWS * (first + len(part)), packing.n))
        yield rows, table[unpack_codes(replace(packing, n=rows.stop - rows.start), part).long()]


def numbers(spec: MatmulSpec, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns a tensor of a weight in f32, which holds them all: [n, groups], or [n, 1] for one number a row."""
    slot = spec.slot(name)
    values = stored_numbers(spec, slot, tensors[slot.tensor])
    return of_codes(spec, slot, values, lambda block: stored_numbers(spec, block, tensors[block.name]))


def of_codes(spec: MatmulSpec, slot: TensorSlot, codes: Tensor, read: Callable[[TensorSlot], Tensor]) -> Tensor:
    """Returns the scales, zeros or offsets [n, groups] that codes stand for; numbers that are no codes as they are.

    codes   [n, groups], of the type in which to compute
    read    returns the numbers [blocks of rows, blocks of groups] of a tensor of the second level
    """
    bilevel = spec.bilevel
    if bilevel is None or not slot.code:
        return codes
    blocks = (each for each in spec.given_tensors if each.index == "block" and each.name.startswith(f"{slot.role}_"))
    second = {block.role: _of_groups(spec, bilevel, read(block)) for block in blocks}
    values = codes.new_tensor(bilevel.table)[codes.long()] if bilevel.table else codes
    if bilevel.zeros:
        values = values - second["super_zero"]
    values = values * second["super_scale"]
    return values + second["super_offset"] if bilevel.offsets else values


def _of_groups(spec: MatmulSpec, bilevel: Bilevel, table: Tensor) -> Tensor:
    """Returns numbers of blocks for every row and group, [n, groups]."""
    return table.repeat_interleave(bilevel.rows, 0)[: spec.n].repeat_interleave(bilevel.groups, 1)


def stored_numbers(spec: MatmulSpec, slot: TensorSlot, stored: Tensor) -> Tensor:
    """Returns a tensor of a weight in f32, in the shape in which `pack` takes it, but [n, 1] for numbers of rows.

    stored: the tensor in memory that holds its numbers
    """
    if slot.index == "group":
        values = codes_of(slot, unpack_groups(spec.packing, stored))
    elif slot.index == "block" and spec.bilevel:
        values = unpack_blocks(spec.packing, stored, spec.bilevel)
    else:
        values = stored.view(-1, 1)[: spec.n]
    values = values.view(TORCH[slot.storage]).float()
    if slot.storage == "u8":  # less the least value of a format
        values += least_code(slot.code) if slot.code else least(spec)
    return values
