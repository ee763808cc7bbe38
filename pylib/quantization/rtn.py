"""Round to nearest: the range of each group is searched, then every weight takes the nearest code."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.pylib.quantization.grid import Codes, Grid

RATIOS = [1 - 0.02 * step for step in range(41)]  # of a group's range, 1 to 0.2
COPIES = 6  # temporaries of the search in f32, for each weight


def rtn(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> Codes:
    """Returns the codes of a weight [rows, k] in f32, each the nearest one.

    importance   [k]: squared errors of a column count so much in the search; None: all columns alike
    """
    scales, zeros, _ = search(weight, grid, importance)
    return grid.quantize(weight, scales, zeros)


def search(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scales, zeros, and the parts of the groups' ranges that they span, each [rows, groups]."""
    groups = grid.groups(weight)
    low, high = groups.aminmax(dim=-1)
    scales, zeros = grid.fit(low, high)
    best_ratio = torch.ones_like(scales)
    if grid.config.clip == "max":
        return scales, zeros, best_ratio
    weights = None if importance is None else importance.view(-1, grid.group_size)
    best = _squared(grid, groups, scales, zeros, weights)
    for ratio in RATIOS[1:]:
        s, z = grid.fit(low * ratio, high * ratio)
        error = _squared(grid, groups, s, z, weights)
        better = error < best
        best = torch.where(better, error, best)
        scales, zeros = torch.where(better, s, scales), torch.where(better, z, zeros)
        best_ratio.masked_fill_(better, ratio)
    return scales, zeros, best_ratio


def _squared(grid: Grid, groups: Tensor, scales: Tensor, zeros: Tensor, importance: Tensor | None) -> Tensor:
    """Returns the squared error of each group."""
    squares = grid.errors(groups, scales, zeros).square_()
    if importance is not None:
        squares *= importance
    return squares.sum(-1)
