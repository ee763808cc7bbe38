"""The rows of a weight whose matmul is gated: in memory, halves of row blocks (`dialect.epilogue`)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.epilogue import HALF, stored_rows
from lowbit.dialect.spec import MatmulSpec


def stored(spec: MatmulSpec, rows: Tensor) -> Tensor:
    """Returns rows [n, ...] in the order in which they are stored."""
    if not spec.is_gated:
        return rows
    return rows.view(spec.experts, 2, -1, HALF, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def given(spec: MatmulSpec, rows: Tensor) -> Tensor:
    """Returns stored rows [n, ...] in the order of the weight: those of the gate first."""
    if not spec.is_gated:
        return rows
    return rows.view(spec.experts, -1, 2, HALF, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def halves(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gate and what it multiplies, [..., n / 16, 8] each, of sums [..., n] in the order of stored rows."""
    gate, up = sums.unflatten(-1, (-1, 2, HALF)).unbind(-2)
    return gate, up


def number_in_memory(spec: MatmulSpec, rows: Tensor) -> Tensor:
    """Returns where rows of these numbers are stored."""
    return _numbers(spec, rows, inverse=True)


def number_given(spec: MatmulSpec, rows: Tensor) -> Tensor:
    """Returns which rows are stored at these numbers."""
    return _numbers(spec, rows, inverse=False)


def _numbers(spec: MatmulSpec, rows: Tensor, inverse: bool) -> Tensor:
    if not spec.is_gated:
        return rows
    order = torch.from_numpy(stored_rows(spec.n, spec.experts)).to(rows.device)
    return (order.argsort() if inverse else order)[rows]
