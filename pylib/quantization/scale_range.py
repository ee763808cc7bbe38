"""Whether scales are of a type that reaches as low, and as high, as a weight needs."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import QuantizeError
from lowbit.dialect.formats.byte_codes import LARGEST
from lowbit.pylib.quantization.grid import LEAST_SCALE, Grid
from lowbit.pylib.quantization.quantized import QuantizedWeight

_LARGEST_E4M3 = LARGEST["f8e4m3"]  # larger scales are rounded to it, while those of other types become infinities
_COARSE = 4  # times the least scale: the largest scales that may be so far off that half of a weight is lost


def check_scales(weight: Tensor, quantized: QuantizedWeight) -> None:
    """Raises QuantizeError where the type of scales has none as small, or as large, as a weight needs, so that its
    nearest codes lose half of it."""
    level = quantized.config.second_level
    kind = quantized.config.scale_type if level is None else level.scale
    scales = quantized.second_level.get("scale_scales", quantized.scales)
    largest, least = float(scales.float().abs().max()), LEAST_SCALE[kind]
    too_large = kind == "e4m3" and largest >= _LARGEST_E4M3
    if (largest > _COARSE * least and not too_large) or not _is_lost(weight, quantized):
        return
    limit = f"beyond {_LARGEST_E4M3:g}, the largest" if too_large else f"below {least:.2g}, the least"
    what = f"weights of at most {float(weight.abs().max()):.2g} need scales {limit} of {kind}"
    wider = "scale='bf16' or 'f32'" + ("" if level is None else " in bilevel=")
    raise QuantizeError(f"{what}; use {'row_scales=True, as NVFP4 has, or ' if kind == 'e4m3' else ''}{wider}")


def _is_lost(weight: Tensor, quantized: QuantizedWeight) -> bool:
    """Tells whether the codes that are nearest to a weight lose half of it. Codes of methods with data do not count,
    as they are farther off for the weight; but where scales were chosen with the codes, there are no others."""
    if quantized.config.by_k_quant or quantized.second_level:
        return _norm(quantized.dequantize() - weight) > _norm(weight) / 2
    scales, columns = quantized.scales.float(), quantized.column_scales
    scaled = weight.float() if columns is None else weight * columns
    zeros = torch.zeros_like(scales) if quantized.zeros is None else quantized.zeros.float()
    grid = Grid(quantized.config, weight.shape[1], weight.device)
    return _norm(grid.errors(grid.groups(scaled), scales, zeros)) > _norm(scaled) / 2


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.float64))  # squares leave f32
