"""Several layers that read the same inputs as one weight, whose rows are theirs, one below the other.

Other libraries quantize the gate and the up projection of an expert apart; transformers keeps one matrix of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.formats.dtypes import dtype
from lowbit.pylib.checkpoints.imported import Imported

OF_ROWS = ("codes", "scales", "zeros", "offsets", "row_scales", "bias")
"""The tensors of a weight whose first dimension is that of the weight's rows, some of which may be None."""


def below(parts: Sequence[Imported]) -> Imported:
    """Returns a weight with the rows of several. Raises CheckpointError where no weight has them all."""
    if len(parts) == 1:
        return parts[0]
    alike = _with_same_scales(_with_same_codes(parts))
    first = alike[0]
    for part in alike[1:]:
        if reason := _difference(first, part):
            raise CheckpointError(f"layers that become the rows of one matrix have different {reason}")
    if any(part.outliers is not None for part in alike):
        raise CheckpointError("layers with outliers can't become the rows of one matrix")
    tensors = {name: _cat([getattr(part, name) for part in alike]) for name in OF_ROWS}
    levels = {name: torch.cat([part.second_level[name] for part in alike]) for name in first.second_level}
    return replace(first, **tensors, second_level=levels)


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Returns tensors one below the other; all of them are None, or none is."""
    given = [t for t in tensors if t is not None]
    return torch.cat(given) if given else None


def _with_same_codes(parts: Sequence[Imported]) -> Sequence[Imported]:
    """Returns weights of signed codes as those of unsigned ones where others are: an importer drops zeros that are all
    the middle one."""
    names = {part.weight for part in parts}
    (bits, *others) = {dtype(name).bits for name in names}
    if others or names != {f"i{bits}", f"u{bits}"}:
        return parts
    return [_unsigned(part, bits) if part.weight == f"i{bits}" else part for part in parts]


def _unsigned(part: Imported, bits: int) -> Imported:
    """Returns a weight of signed codes as one of unsigned codes with zeros."""
    half = 1 << (bits - 1)
    codes = (part.codes.view(torch.uint8) + half) & ((1 << bits) - 1)
    return replace(part, weight=f"u{bits}", codes=codes, zeros=torch.full_like(part.scales, half, dtype=torch.uint8))


def _with_same_scales(parts: Sequence[Imported]) -> Sequence[Imported]:
    """Returns weights with one kind of scales. Scales of rows become one for each row; where one weight has none, those
    of the others are multiplied into their scales of groups, in f32."""
    if all(part.row_scales is None for part in parts):
        return parts
    if all(part.row_scales is not None for part in parts):
        return [replace(part, row_scales=_row_scales(part)) for part in parts]
    return [replace(part, scales=part.scales.float() * _row_scales(part)[:, None], row_scales=None) for part in parts]


def _row_scales(part: Imported) -> Tensor:
    """Returns a scale for each row of a weight."""
    given = torch.ones(1, dtype=torch.float32, device=part.codes.device) if part.row_scales is None else part.row_scales
    return given.expand(len(part.codes))


def _difference(one: Imported, other: Imported) -> str:
    """Returns what of two weights keeps them from being parts of one; "" if nothing does."""
    kinds = {
        "formats": lambda part: (part.weight, part.table),
        "columns": lambda part: part.codes.shape[1],
        "groups": lambda part: part.scales.shape[1],
        "types of scales": lambda part: (part.scales.dtype, part.scale_code, part.scale_table),
        "tensors": lambda part: ([getattr(part, name) is None for name in OF_ROWS], sorted(part.second_level)),
        "orders of columns": lambda part: None if part.permutation is None else part.permutation.tolist(),
    }
    return next((name for name, kind in kinds.items() if kind(one) != kind(other)), "")
