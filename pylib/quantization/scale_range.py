"""Checks that the scales' type reaches as low and as high as a weight needs, with the digits that it needs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.errors import QuantizeError
from lowbit.dialect.formats.byte_codes import LARGEST
from lowbit.pylib.quantization.config import QuantConfig
from lowbit.pylib.quantization.grid import LEAST_SCALE, Grid
from lowbit.pylib.quantization.k_quants import k_quant
from lowbit.pylib.quantization.quantized import QuantizedWeight

_LARGEST_E4M3 = LARGEST["f8e4m3"]  # larger scales are rounded to it, while those of other types become infinities
_COARSE = 4  # times the least scale: the largest scales that may be so far off that half of a weight is lost,
_ROUNDED = 16  # and the largest of a second level whose rounding may be seen beside that of codes
_SHOWN = 1.1  # times the error of a weight without it: a tenth more is worth a word


def check_scales(weight: Tensor, quantized: QuantizedWeight) -> None:
    """Raises QuantizeError where the type of scales has none as small, or as large, as a weight needs, so that its
    nearest codes lose half of it. Warns where those of a second level are so small that rounding them adds a tenth to
    the error."""
    config, level = quantized.config, quantized.config.second_level
    kind = config.scale_type if level is None else level.scale
    scales = quantized.second_level.get("scale_scales", quantized.scales)
    largest, least = float(scales.float().abs().max()), LEAST_SCALE[kind]
    too_large = kind == "e4m3" and largest >= _LARGEST_E4M3
    wider = "scale='bf16' or 'f32'" + ("" if level is None else " in bilevel=")
    if (largest <= _COARSE * least or too_large) and _is_lost(weight, quantized):
        limit = f"beyond {_LARGEST_E4M3:g}, the largest" if too_large else f"below {least:.2g}, the least"
        wider = f"{'row_scales=True, as NVFP4 has, or ' if kind == 'e4m3' else ''}{wider}"
        raise QuantizeError(f"{_of_size(weight)} {limit} of {kind}; use {wider}")
    if config.bilevel is not None and largest <= _ROUNDED * least and (excess := _excess(weight, config)) > _SHOWN:
        few = f"of a second level that are a few times {least:.2g}, the least of {kind}"
        cost = f"rounding them makes the error {excess:.2g} times as large"
        # The caller is beyond `quantize` and torch.no_grad.
        warnings.warn(f"{_of_size(weight)} {few}: {cost}; use {wider}", stacklevel=4)


def _of_size(weight: Tensor) -> str:
    return f"weights of at most {float(weight.abs().max()):.2g} need scales"


def _excess(weight: Tensor, config: QuantConfig) -> float:
    """Returns how many times as large the error of a weight in a K-quant is as with a second level in f32. Codes of
    methods with data do not count, as they are farther off for the weight."""
    exact = replace(config, bilevel=replace(cast(Bilevel, config.bilevel), scale="f32"))
    grids = (Grid(each, weight.shape[1], weight.device) for each in (config, exact))
    rounded, unrounded = (_norm(k_quant(weight, grid).dequantize(grid) - weight) for grid in grids)
    return rounded / unrounded if unrounded else 1.0


def _is_lost(weight: Tensor, quantized: QuantizedWeight) -> bool:
    """Tells whether the codes that are nearest to a weight lose half of it. Codes of methods with data do not count,
    as they are farther off for the weight; but where scales were chosen with the codes, there are no others."""
    if quantized.config.by_k_quant or quantized.second_level:
        return _norm(quantized.dequantize() - weight) > _norm(weight) / 2
    scales, columns = quantized.scales.float(), quantized.column_scales
    scaled = (weight if columns is None else weight * columns).float()
    zeros = torch.zeros_like(scales) if quantized.zeros is None else quantized.zeros.float()
    grid = Grid(quantized.config, weight.shape[1], weight.device)
    return _norm(grid.errors(grid.groups(scaled), scales, zeros)) > _norm(scaled) / 2


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.float64))  # squares leave f32
