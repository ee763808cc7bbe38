"""Half-quadratic quantization (Badri and Shaji, 2023): zeros that minimize the lp norm of the error, without data.

The error is split in two: E, which is sparse, and the rest, which is small. Two steps alternate, with a weight beta of
the rest that grows:

    E = shrink(W - s (Q - z))         the minimum of |E|^p + beta/2 (E - (W - s (Q - z)))^2
    z = mean(Q - (W - E) / s)         of each group; Q are the nearest codes

Here weights and errors are in units of the scale, so that the result does not depend on how large the weights are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.pylib.quantization.grid import Codes, Grid
from lowbit.pylib.quantization.rtn import search

NORM, BETA, GROWTH, STEPS = 0.7, 10.0, 1.01, 20
LEAST = 1e-30  # smaller errors count as this one
COPIES = 8


def hqq(weight: Tensor, grid: Grid) -> Codes:
    """Returns the codes of a weight [rows, k] in f32. No group has a larger lp error than by rounding to nearest."""
    scales, zeros, _ = search(weight, grid)
    units = grid.groups(weight) / scales[..., None]
    best_zeros, best, beta = zeros, torch.full_like(zeros, torch.inf), BETA
    for _ in range(STEPS + 1):
        levels = grid.nearest(units + zeros[..., None])
        difference = levels - units
        error = zeros[..., None] - difference
        slopes = slope(error)
        norm = (error.abs() * slopes).sum(-1)
        best_zeros, best = torch.where(norm < best, zeros, best_zeros), torch.minimum(norm, best)
        zeros = grid.round_zeros(difference.add_(shrink(error, slopes, beta)).mean(-1))
        beta *= GROWTH
    return grid.quantize(weight, scales, best_zeros)


def slope(x: Tensor) -> Tensor:
    """Returns |x|^(p-1), the norm's slope over p; that at 0 is finite."""
    return x.abs().clamp_(min=LEAST).pow_(NORM - 1)


def shrink(x: Tensor, slopes: Tensor, beta: float) -> Tensor:
    """Returns x with its magnitude lowered by |x|^(p-1) / beta, at most to 0: small errors vanish, large ones stay.

    `slopes` are |x|^(p-1).
    """
    return torch.add(x.abs(), slopes, alpha=-1 / beta).clamp_(min=0).copysign_(x)
