"""SpQR (Dettmers et al., 2023): small groups, whose scales and zeros are quantized, and outliers beside them.

Columns are rounded one after the other and the rest makes up for each error, as in GPTQ (`gptq.py`; H and U as there).
When the first column of a group comes, each row of the group gets its scale and zero from its weights as they are then.
`clip="mse"` tries codes out (`spqr_search.py`); `clip="max"` does as the paper:

1. A weight is likely an outlier if the group without it, with the scale and zero that fit the rest, has a squared error
   that is less than that of the whole group by more than the threshold. Errors of column j count 1 / U[j, j]^2.
2. Scale and zero are those that fit the other weights, rounded to codes: over `scale_rows` rows, a code has
   `scale_bits` bits between the least and the largest (`two_levels.py`). Where kernels do not have such codes
   (`QuantConfig.second_level`), they get the values of the codes, rounded to f16.

A weight whose own error, so counted, is above the threshold is an outlier: what its code leaves is kept in f16. The
threshold is relative to the mean of a column's variance over U[j, j]^2.

With act-order, the next column is always the one with the least U[j, j]: of an error in it, the columns that are left
can make up for the smallest part. The paper takes the column with the largest H[j, j], which ignores them. On the
layers of docs/quality.md this order has 8 % less output error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.pylib.quantization.beams import BLOCK, Beam, settle
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.gptq import corrected, damped, factor, ordered_factor, warn_if_short
from lowbit.pylib.quantization.grid import Codes, Grid
from lowbit.pylib.quantization.spqr_search import Group, multiplied
from lowbit.pylib.quantization.two_levels import LEAST, TwoLevels, coded
from lowbit.pylib.torch_types import TORCH
from lowbit.pylib.weights.outliers import Outliers


class Spqr(NamedTuple):
    """A weight [rows, k] as SpQR quantizes it. Columns of codes and outliers are in the order of `permutation`, if
    there is one: column j is column permutation[j] of the weight. `levels` are the codes of scales and zeros."""

    codes: Codes
    levels: tuple[TwoLevels, TwoLevels]
    outliers: Outliers
    permutation: Tensor | None


def spqr(weight: Tensor, grid: Grid, calibration: Calibration) -> Spqr:
    """Returns the quantized weight."""
    warn_if_short(calibration)
    hessian, damping = damped(calibration.hessian, grid.config.damping)
    target = weight.float().contiguous()
    if calibration.cross is not None:
        target = corrected(target, hessian, calibration.cross, damping)
    permutation = None
    if grid.config.act_order:
        permutation, u = ordered_factor(hessian)
        target, hessian = target[:, permutation].contiguous(), hessian[permutation][:, permutation]
    else:
        u = factor(hessian)
    codes, levels, left = _round_columns(target, grid, u.float(), hessian.float())
    rows, columns = left.nonzero(as_tuple=True)
    return Spqr(codes, levels, Outliers(rows, columns, left[rows, columns]), permutation)


def _round_columns(
    weight: Tensor, grid: Grid, u: Tensor, hessian: Tensor
) -> tuple[Codes, tuple[TwoLevels, TwoLevels], Tensor]:
    """Returns codes, those of scales and zeros, and what outliers add to the weight: f16 [rows, k], 0 elsewhere."""
    target, size = weight.T.contiguous(), grid.group_size  # a column of the weight is a row here
    limit = threshold(weight, u.diagonal(), grid.config.outlier_threshold)
    rest, codes, left = target.clone(), torch.empty_like(target), torch.empty_like(target, dtype=torch.float16)
    levels: list[tuple[TwoLevels, TwoLevels]] = []
    tables: list[tuple[Tensor, Tensor]] = []
    step = max(size, BLOCK // size * size)  # whole groups
    for first in range(0, len(rest), step):
        block = slice(first, min(first + step, len(rest)))
        beam = Beam(rest[block], u[block, block], grid, grid.config.beams, limit)
        for j in range(block.stop - first):
            if j % size == 0:
                group = slice(j, j + size)
                levels.append(_levels(beam.values(group), beam.u[group, group], grid, limit))
                tables.append(multiplied(*levels[-1], grid))
            beam.round(*tables[-1])
        codes[block], left[block], errors = beam.path()
        rest[block.stop :] -= u[block, block.stop :].T @ errors
    scales, zeros = (torch.stack(table, dim=1) for table in zip(*tables))
    if grid.config.beams > 1:
        s, z = (table.T.repeat_interleave(size, dim=0) for table in (scales, zeros))
        codes, left = settle(target, codes, left, s, z, hessian, grid)
    of_scales, of_zeros = (TwoLevels.stack(groups) for groups in zip(*levels))
    return Codes(grid.encode(codes).T.contiguous(), scales, zeros), (of_scales, of_zeros), left.T.contiguous()


def _levels(group: Tensor, u: Tensor, grid: Grid, limit: float) -> tuple[TwoLevels, TwoLevels]:
    """Returns scale and zero of each row of a group [size, rows], coded; U is that of the group's columns."""
    weight = group.T.contiguous()
    if grid.config.clip == "max":
        return statistics(weight, u.diagonal(), grid, limit)
    return Group(weight, u, grid, limit).levels()


def threshold(weight: Tensor, diagonal: Tensor, relative: float | None) -> float:
    """Returns the counted error above which a weight is an outlier."""
    if relative is None:
        return torch.inf
    return relative * float((weight.var(dim=0, correction=0) / diagonal.square()).mean())


def statistics(weight: Tensor, diagonal: Tensor, grid: Grid, limit: float) -> tuple[TwoLevels, TwoLevels]:
    """Returns scale and zero of each row of a group [rows, size], fitted to what are no outliers, and coded."""
    likely = gain_without(weight, diagonal, grid) > limit
    count = (~likely).sum(1, keepdim=True).clamp(min=1)
    mean = torch.where(likely, 0.0, weight).sum(1, keepdim=True) / count
    others = torch.where(likely, mean, weight)
    scale, zero = range_of(*others.aminmax(dim=1), grid)
    rows, bits, kind = grid.config.scale_rows, grid.config.scale_bits, TORCH[grid.config.scale_type]
    return coded(scale.clamp(min=LEAST), rows, bits, kind), coded(zero, rows, bits, kind)


def range_of(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns the scale and the zero with which the levels span low..high."""
    scale = ((high - low) / (grid.most - grid.least)).clamp(min=LEAST)
    return scale, grid.least - low / scale


def gain_without(weight: Tensor, diagonal: Tensor, grid: Grid) -> Tensor:
    """Returns for each weight of a group [rows, size] by how much less the group's counted error is without it."""
    size = weight.shape[1]
    whole = _counted(weight, *range_of(*weight.aminmax(dim=1), grid), diagonal, grid).sum(1, keepdim=True)
    gains = torch.empty_like(weight)
    for i in range(size):
        rest = [j for j in range(size) if j != i]
        low, high = weight[:, rest].aminmax(dim=1)
        gains[:, i] = whole[:, 0] - _counted(weight[:, rest], *range_of(low, high, grid), diagonal[rest], grid).sum(1)
    return gains


def _counted(weight: Tensor, scale: Tensor, zero: Tensor, diagonal: Tensor, grid: Grid) -> Tensor:
    """Returns squared errors [rows, size], each over the square of its column's entry of U."""
    levels = (weight / scale[:, None] + zero[:, None]).round_().clamp_(grid.least, grid.most)
    return ((weight - (levels - zero[:, None]) * scale[:, None]) / diagonal).square_()
