"""`lowbit.quantize`: checks a weight, hands it to its method, and returns a `QuantizedWeight`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from lowbit.dialect.call import Act
from lowbit.dialect.errors import QuantizeError, SpecError
from lowbit.pylib.quantization import hqq, rtn
from lowbit.pylib.quantization.awq import awq
from lowbit.pylib.quantization.calibration import Calibration
from lowbit.pylib.quantization.config import QuantConfig, usual_config
from lowbit.pylib.quantization.gptq import damped, gptq, k_gptq
from lowbit.pylib.quantization.grid import Codes, Grid, by_chunks
from lowbit.pylib.quantization.k_quants import KQuant, Numbers, best_k_quant, k_quant
from lowbit.pylib.quantization.quantized import QuantizedWeight
from lowbit.pylib.quantization.scale_range import check_scales
from lowbit.pylib.quantization.signround import signround
from lowbit.pylib.quantization.spqr import spqr
from lowbit.pylib.quantization.two_levels import TwoLevels
from lowbit.pylib.weights.outliers import Outliers, sparse_csr
from lowbit.pylib.weights.packed import TORCH


@torch.no_grad()
def quantize(
    weight: Tensor, config: QuantConfig | None = None, calibration: Tensor | Calibration | None = None
) -> QuantizedWeight:
    """Quantize a weight, on the device that it is on.

    weight        floats [n, k], any strides
    config        what to make of it; None: u4 in groups of 128, rounded to nearest, or by GPTQ with calibration data
    calibration   for "gptq", "awq", "signround" and "spqr", and for QuantConfig(calibration=): inputs of the layer
                  [..., k], their Hessian [k, k] (the sum of x^T x), or a `Calibration`. All else ignores it

    Raises QuantizeError for a weight that cannot be quantized (it says where a value is NaN or inf, or has a scale
    beyond its type, or that scales are below their type) and for a missing or wrong calibration, SpecError where groups
    do not divide k. Warns where a K-quant's second level has f16 scales so small that rounding them adds a tenth to the
    error: `q6_k` of weights below 1e-3, say.
    """
    config = usual_config(calibration is not None) if config is None else config
    if not isinstance(cast(object, config), QuantConfig):
        example = "QuantConfig('u4', 128) or QuantConfig.preset('nf4')"
        raise SpecError(f"config={config!r} must be a QuantConfig, such as {example}")
    weight = _checked(weight)
    config = _for_shape(config, "bf16" if weight.dtype is torch.bfloat16 else "f16", *weight.shape)
    if not config.row_scales:
        quantized = _quantized(weight, config, calibration)
        check_scales(weight, quantized)
        return quantized
    factors = _row_factors(weight, config)
    return replace(_quantized(weight / factors[:, None], config, calibration), row_scales=factors)


@lru_cache(maxsize=256)
def _for_shape(config: QuantConfig, act: Act, n: int, k: int) -> QuantConfig:
    """Returns a configuration with a type of scales. Raises SpecError where groups do not divide k."""
    config = config.multiplied_in(act)
    config.spec(n, k)
    return config


def _row_factors(weight: Tensor, config: QuantConfig) -> Tensor:
    """Returns for each row in f32 what makes the largest scale of the others the largest of its type."""
    largest = float(abs(config.dtype.values()).max()) * torch.finfo(TORCH[config.scale_type]).max
    factors = weight.abs().amax(1).float() / largest
    return torch.where(factors > 0, factors, 1.0)


def _quantized(weight: Tensor, config: QuantConfig, calibration: Tensor | Calibration | None) -> QuantizedWeight:
    grid = Grid(config, weight.shape[1], weight.device)
    if config.needs_data:
        return _calibrated(weight, grid, calibration)
    if config.method == "hqq":
        return _finish(config, by_chunks(lambda rows: hqq.hqq(rows, grid), weight, hqq.COPIES))
    return _nearest(weight, grid)


def _nearest(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> QuantizedWeight:
    """Returns a weight rounded to nearest; errors of columns count by importances."""
    if grid.config.by_k_quant:
        return _in_levels(grid.config, k_quant(weight, grid, importance))
    return _finish(grid.config, rtn.rtn(weight, grid, importance))


def _by_output(weight: Tensor, grid: Grid, hessian: Tensor) -> QuantizedWeight:
    """Returns a weight rounded to nearest, by the ranges that have the least output error."""
    if grid.config.by_k_quant:
        return _in_levels(grid.config, best_k_quant(weight, grid, hessian))
    return _finish(grid.config, rtn.best_rounded(weight, grid, hessian))


def _calibrated(weight: Tensor, grid: Grid, calibration: Tensor | Calibration | None) -> QuantizedWeight:
    config, k = grid.config, weight.shape[1]
    if calibration is None:
        what = f"calibration={config.calibration!r}" if config.calibration else f"method={config.method!r}"
        rule = f"{what} needs calibration=, inputs of the layer [..., k={k}]"
        raise QuantizeError(f"{rule}; without any use 'hqq' or 'rtn'")
    data = Calibration.of(calibration, k, weight.device)
    if config.calibration == "importance":
        return _nearest(weight, grid, data.importance)
    if data.only_importance:
        raise QuantizeError("the calibration has importances alone; use QuantConfig(..., calibration='importance')")
    if config.calibration == "hessian":
        return _by_output(weight.float(), grid, damped(data.hessian, config.damping)[0].float())
    if config.method == "gptq":
        if config.by_k_quant:
            return _in_levels(config, k_gptq(weight, grid, data))
        return _finish(config, gptq(weight, grid, data))
    if config.method == "signround":
        return _finish(config, signround(weight, grid, data))
    if config.method == "spqr":
        found = spqr(weight, grid, data)
        sparse = None if config.outlier_threshold is None else _sparse(found.outliers, *weight.shape)
        quantized = replace(_finish(config, found.codes), outliers=sparse, permutation=found.permutation)
        return _in_two_levels(quantized, *found.levels) if config.second_level else quantized
    codes, column_scales = awq(weight, grid, data)
    return _finish(config, codes, None if bool((column_scales == 1).all()) else column_scales)


def _in_two_levels(quantized: QuantizedWeight, scales: TwoLevels, zeros: TwoLevels) -> QuantizedWeight:
    """Returns a weight with the codes of its scales and zeros in place of their values."""
    levels = {
        "scale_scales": scales.scales, "scale_zeros": scales.zeros,
        "zero_scales": zeros.scales, "zero_zeros": zeros.zeros,
    }  # fmt: skip
    kind = TORCH[quantized.config.scale_type]
    second = {name: table.to(kind) for name, table in levels.items()}
    return replace(quantized, scales=scales.codes, zeros=zeros.codes, second_level=second)


def _in_levels(config: QuantConfig, found: KQuant) -> QuantizedWeight:
    """Returns the weight that K-quants make."""
    scale, of_scales = _as_packed(config, "scale", found.pair.scales)
    offset, of_offsets = _as_packed(config, "offset", found.pair.offsets) if found.pair.offsets else (None, {})
    return QuantizedWeight(found.codes, scale, offsets=offset, second_level={**of_scales, **of_offsets}, config=config)


def _as_packed(config: QuantConfig, role: str, numbers: Numbers) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns scales or offsets as `pack` takes them, and their second level."""
    if config.bilevel is None or numbers.supers is None:
        return _fitting(role, config.scale_type, numbers.codes), {}
    kind = torch.uint8 if config.scale_type.startswith("u") else torch.int8
    return numbers.codes.to(kind), {f"{role}_scales": _fitting(role, config.bilevel.scale, numbers.supers)}


def _sparse(outliers: Outliers, n: int, k: int) -> Tensor:
    """Returns outliers as a sparse matrix. Raises QuantizeError where one is beyond f16."""
    if not bool(outliers.values.isfinite().all()):
        raise QuantizeError("an outlier is beyond f16, in which outliers are kept; scale the layer down")
    return sparse_csr(outliers, n, k)


def _checked(weight: object) -> Tensor:
    """Returns a weight that can be quantized."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        given = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise QuantizeError(f"weight must be a tensor of floats [n, k], not {given}")
    if weight.ndim != 2 or not weight.numel():
        raise QuantizeError(f"weight must be [n, k], not {list(weight.shape)}")
    if weight.is_meta or weight.layout is not torch.strided:
        what = "on meta: it has no values; load it first" if weight.is_meta else f"{weight.layout}; use to_dense()"
        raise QuantizeError(f"weight is {what}")
    if weight.itemsize < 2:
        rule = "multiply it by its scales in f32 first, or name the checkpoint that it is of: lowbit.load_checkpoint"
        raise QuantizeError(f"weight is {weight.dtype}, codes of 8 bits; {rule}")
    if not _is_finite(weight):
        wrong = ~weight.isfinite()
        row, column = wrong.nonzero()[0].tolist()
        value = float(weight[row, column])
        raise QuantizeError(f"weight[{row}, {column}] = {value:g} must be finite; {int(wrong.sum())} values are not")
    return weight.detach()


def _is_finite(numbers: Tensor) -> bool:
    """Tells whether all numbers are, by the least and the largest: in a tenth of the time of looking at each."""
    return all(map(math.isfinite, numbers.aminmax()))


def _finish(config: QuantConfig, codes: Codes, column_scales: Tensor | None = None) -> QuantizedWeight:
    """Returns codes with scales and zeros in the types of the configuration."""
    scales, zeros = _fitting("scale", config.scale_type, codes.scales), None
    if config.zeros != "none":
        _fitting("zero", "f16", codes.zeros)
    if config.zeros == "int":
        zeros = codes.zeros.to(torch.int32)
    elif config.zeros == "float":
        zeros = codes.zeros.to(TORCH[config.scale_type if config.scale_type in ("f16", "f32") else "bf16"])
    return QuantizedWeight(codes.codes, scales, zeros, config=config, column_scales=column_scales)


def _fitting(name: str, kind: str, table: Tensor) -> Tensor:
    """Returns numbers in their type. Raises QuantizeError for one that is beyond it."""
    if not _is_finite(table):
        row, group = (~table.isfinite()).nonzero()[0].tolist()
        raise QuantizeError(f"group {group} of row {row} needs a {name} beyond {kind}; use scale='bf16' or 'f32'")
    return table.to(TORCH[kind])
