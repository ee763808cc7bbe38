"""SpQR (Dettmers et al., 2023): small groups, whose scales and zeros are quantized, and outliers beside them.

Columns are rounded one after the other and the rest makes up for each error, as in GPTQ (`gptq.py`; H and U as there).
When the first column of a group comes, each row of the group gets its scale and zero from its weights as they are then:

1. A weight is likely an outlier if the group without it, with the scale and zero that fit the rest, has a squared error
   that is less than that of the whole group by more than the threshold. Errors of column j count 1 / U[j, j]^2.
2. Scale and zero are those that fit the other weights, rounded to codes: over `scale_rows` rows, a code has
   `scale_bits` bits between the least and the largest. What kernels get are the values of these codes.

A weight whose own error, so counted, is above the threshold is an outlier: what its code leaves is kept in f16. The
threshold is relative to the mean of a column's variance over U[j, j]^2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.pylib.outliers import Outliers
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.gptq import BLOCK, corrected, damped, factor
from lowbit.pylib.quantization.grid import Codes, Grid, by_chunks
from lowbit.pylib.quantization.rtn import COPIES, rtn

LEAST = 2.0**-14  # of scales: the least normal number of f16


class Spqr(NamedTuple):
    """A weight [rows, k] as SpQR quantizes it. Columns of codes and outliers are in the order of `permutation`, if
    there is one: column j is column permutation[j] of the weight."""

    codes: Codes
    outliers: Outliers
    permutation: Tensor | None


def spqr(weight: Tensor, grid: Grid, calibration: Calibration) -> Spqr:
    """Returns the quantized weight."""
    hessian, damping = damped(calibration.hessian, grid.config.damping)
    target = weight.float().contiguous()
    if calibration.cross is not None:
        target = corrected(target, hessian, calibration.cross, damping)
    permutation = None
    if grid.config.act_order:
        permutation = hessian.diagonal().argsort(descending=True, stable=True)
        target, hessian = target[:, permutation].contiguous(), hessian[permutation][:, permutation]
    codes, left = _round_columns(target, grid, factor(hessian).float())
    rows, columns = left.nonzero(as_tuple=True)
    return Spqr(codes, Outliers(rows, columns, left[rows, columns]), permutation)


def _round_columns(weight: Tensor, grid: Grid, u: Tensor) -> tuple[Codes, Tensor]:
    """Returns codes, and what outliers add to them: f16 [rows, k], 0 elsewhere."""
    rest, size = weight.T.contiguous(), grid.group_size  # a column of the weight is a row here
    limit = threshold(weight, u.diagonal(), grid.config.outlier_threshold)
    codes = torch.empty_like(rest, dtype=grid.code_type)
    left = torch.zeros_like(rest, dtype=torch.float16)
    tables: list[tuple[Tensor, Tensor]] = []
    step = max(size, BLOCK // size * size)  # whole groups
    for first in range(0, len(rest), step):
        last = min(first + step, len(rest))
        errors = torch.empty_like(rest[first:last])
        for j in range(first, last):
            if j % size == 0:
                group = slice(j, j + size)
                tables.append(statistics(rest[group].T.contiguous(), u.diagonal()[group], grid, limit))
            scale, zero = tables[-1]
            codes[j] = grid.encode(rest[j] / scale + zero)
            difference = rest[j] - (grid.decode(codes[j]) - zero) * scale
            is_outlier = (difference / u[j, j]).square() > limit
            left[j] = torch.where(is_outlier, difference, 0.0).half()
            error = (difference - left[j].float()) / u[j, j]
            rest[j + 1 : last] -= u[j, j + 1 : last, None] * error
            errors[j - first] = error
        rest[last:] -= u[first:last, last:].T @ errors
    scales, zeros = (torch.stack(table, dim=1) for table in zip(*tables))
    return Codes(codes.T.contiguous(), scales, zeros), left.T.contiguous()


def threshold(weight: Tensor, diagonal: Tensor, relative: float | None) -> float:
    """Returns the counted error above which a weight is an outlier."""
    if relative is None:
        return torch.inf
    return relative * float((weight.var(dim=0, correction=0) / diagonal.square()).mean())


def statistics(weight: Tensor, diagonal: Tensor, grid: Grid, limit: float) -> tuple[Tensor, Tensor]:
    """Returns scale and zero of each row of a group [rows, size], fitted to what are no outliers, and coded."""
    likely = gain_without(weight, diagonal, grid) > limit
    count = (~likely).sum(1, keepdim=True).clamp(min=1)
    mean = torch.where(likely, 0.0, weight).sum(1, keepdim=True) / count
    others = torch.where(likely, mean, weight)
    scale, zero = _fit(others, diagonal, grid)
    rows, bits = grid.config.scale_rows, grid.config.scale_bits
    scale = coded(scale, rows, bits).clamp(min=LEAST).half().float()
    return scale, coded(zero, rows, bits).half().float()


def _fit(group: Tensor, diagonal: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Returns scale and zero of each row of a group: those of its range, or of the best part of it."""
    if grid.config.clip == "max":
        return range_of(*group.aminmax(dim=1), grid)
    one = Grid(grid.config, group.shape[1], group.device)
    _, scales, zeros = by_chunks(lambda rows: rtn(rows, one, 1 / diagonal.square()), group, COPIES)
    return scales[:, 0], zeros[:, 0]


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


def coded(values: Tensor, rows: int, bits: int) -> Tensor:
    """Returns values [n] in f32 rounded to codes of some bits between the least and the largest of each `rows` of them;
    the two numbers that give codes their meaning, second-level scale and zero, are in f16."""
    padded = torch.cat([values, values[-1:].expand(-len(values) % rows)]).view(-1, rows)
    low, high = padded.aminmax(dim=1, keepdim=True)
    scale = ((high - low) / ((1 << bits) - 1)).half().float()
    flat = scale < 2.0**-13 * torch.maximum(low.abs(), high.abs())  # equal to the precision of f16
    scale = torch.where(flat, torch.ones_like(scale), scale)
    zero = (-low / scale).half().float()
    codes = (padded / scale + zero).round_().clamp_(0, (1 << bits) - 1)
    return torch.where(flat, padded, (codes - zero) * scale).view(-1)[: len(values)]
