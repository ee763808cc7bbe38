"""Activation-aware weight quantization (Lin et al., 2023): columns with large inputs are scaled up before rounding.

Column j of the weight is multiplied by c_j and x_j divided by it: the same product, but a smaller relative error where
inputs are large. c = (mean |x|)^alpha, normalized, with the alpha of a grid whose squared output error is least. The
division of x goes into the layer before (`QuantizedWeight.fold_into`), or `prepare_input` does it.

With `clip="output"`, alpha is found with whole ranges, which is fast; then each row takes the ranges with the least
output error, and alpha = 0 stays where that is better after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowbit.pylib.quantization.calibration import Calibration, output_errors
from lowbit.pylib.quantization.grid import Codes, Grid, by_chunks
from lowbit.pylib.quantization.rtn import COPIES, best_rounded, rounded, rtn, whole

ALPHAS = [step / 20 for step in range(20)]
Rounding = Callable[[Tensor, Grid, Tensor, Tensor], Codes]
"""Rounds a weight [rows, k] whose columns are scaled, for a Hessian [k, k] of inputs before they are divided by the
scales [k]."""


def awq(weight: Tensor, grid: Grid, calibration: Calibration) -> tuple[Codes, Tensor]:
    """Returns the codes of a weight [rows, k], and the scales of its columns [k].

    The output error is at most that of rounding to nearest, which is alpha = 0.
    """
    best = shared_scales([(weight, grid)], calibration)
    return _rounding(grid)(weight.float() * best, grid, calibration.hessian.float(), best), best


def shared_scales(parts: Sequence[tuple[Tensor, Grid]], calibration: Calibration) -> Tensor:
    """Returns the scales of the columns [k] whose output error is least, summed over weights that share their input."""
    magnitude, hessian = calibration.magnitude.float(), calibration.hessian.float()
    scales = [column_scales(magnitude, alpha) for alpha in ALPHAS]
    best = _least(scales, parts, hessian, lambda grid: _whole if grid.config.clip == "output" else _searched)
    if all(grid.config.clip != "output" for _, grid in parts):
        return best
    return _least([torch.ones_like(best), best], parts, hessian, _rounding)


def column_scales(magnitude: Tensor, alpha: float) -> Tensor:
    """Returns magnitude^alpha, divided by the geometric mean of its largest and smallest value."""
    scales = magnitude.clamp(min=1e-4 * float(magnitude.max()) or 1.0).pow(alpha)
    return scales / (scales.max() * scales.min()).sqrt()


def _least(
    scales: Sequence[Tensor],
    parts: Sequence[tuple[Tensor, Grid]],
    hessian: Tensor,
    rounding: Callable[[Grid], Rounding],
) -> Tensor:
    """Returns the scales with the least squared output error, the first of equal ones."""
    errors = [sum(_error(weight, grid, hessian, each, rounding(grid)) for weight, grid in parts) for each in scales]
    return scales[errors.index(min(errors))]


def _error(weight: Tensor, grid: Grid, hessian: Tensor, scales: Tensor, rounding: Rounding) -> float:
    """Returns the squared output error of a weight that is rounded with scaled columns."""
    difference = grid.dequantize(rounding(weight.float() * scales, grid, hessian, scales)).div_(scales).sub_(weight)
    return float(output_errors(difference, hessian).double().sum())


def _rounding(grid: Grid) -> Rounding:
    return _best if grid.config.clip == "output" else _searched


def _best(weight: Tensor, grid: Grid, hessian: Tensor, scales: Tensor) -> Codes:
    return best_rounded(weight, grid, hessian / scales[:, None] / scales)


def _whole(weight: Tensor, grid: Grid, hessian: Tensor, scales: Tensor) -> Codes:
    return by_chunks(lambda rows: rounded(rows, grid, whole(rows, grid)), weight, COPIES)


def _searched(weight: Tensor, grid: Grid, hessian: Tensor, scales: Tensor) -> Codes:
    return rtn(weight, grid)
