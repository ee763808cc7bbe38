"""Activation-aware weight quantization (Lin et al., 2023): columns with large inputs are scaled up before rounding.

Column j of the weight is multiplied by c_j and x_j divided by it: the same product, but a smaller relative error where
inputs are large. c = (mean |x|)^alpha, normalized, with the alpha of a grid whose squared output error is least. The
division of x goes into the layer before (`QuantizedWeight.fold_into`), or `prepare_input` does it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lowbit.pylib.quantization.calibration import Calibration, output_errors
from lowbit.pylib.quantization.grid import Codes, Grid, by_chunks, chunks
from lowbit.pylib.quantization.rtn import COPIES, rtn

ALPHAS = [step / 20 for step in range(20)]


def awq(weight: Tensor, grid: Grid, calibration: Calibration) -> tuple[Codes, Tensor]:
    """Returns the codes of a weight [rows, k], and the scales of its columns [k].

    The output error is at most that of rounding to nearest, which is alpha = 0.
    """
    best = shared_scales([(weight, grid)], calibration)
    return by_chunks(lambda rows: rtn(rows * best, grid), weight, COPIES), best


def shared_scales(parts: Iterable[tuple[Tensor, Grid]], calibration: Calibration) -> Tensor:
    """Returns the scales of the columns [k] whose output error is least, summed over weights that share their input."""
    hessian, magnitude = calibration.hessian.float(), calibration.magnitude.float()
    candidates = [column_scales(magnitude, alpha) for alpha in ALPHAS]
    errors = [0.0] * len(candidates)
    for weight, grid in parts:
        for at, scales in enumerate(candidates):
            errors[at] += _output_error(weight, grid, hessian, scales)
    return candidates[errors.index(min(errors))]


def column_scales(magnitude: Tensor, alpha: float) -> Tensor:
    """Returns magnitude^alpha, divided by the geometric mean of its largest and smallest value."""
    scales = magnitude.clamp(min=1e-4 * float(magnitude.max()) or 1.0).pow(alpha)
    return scales / (scales.max() * scales.min()).sqrt()


def _output_error(weight: Tensor, grid: Grid, hessian: Tensor, scales: Tensor) -> float:
    total = 0.0
    for rows in chunks(weight, COPIES):
        part = weight[rows].float().contiguous()
        rounded = grid.dequantize(rtn(part * scales, grid)) / scales
        total += float(output_errors(part - rounded, hessian).double().sum())
    return total
