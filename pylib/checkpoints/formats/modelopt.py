"""NVIDIA ModelOpt's FP8, MXFP8, NVFP4, MXFP4, INT8, and INT4 with AWQ (modelopt/torch/export/quant_utils.py).

    FP8     weight e4m3 [n, k]; weight_scale f32 [], [n], or for blocks of 128 x 128 [n / 128, k / 128]; a layer with
            a "group_size" has blocks of so many rows and columns
    MXFP8   weight e4m3 [n, k]; weight_scale uint8 [n, k / 32], powers of two
    NVFP4   weight uint8 [n, k / 2], each row a stream of e2m1 codes; weight_scale e4m3 [n, k / 16], with FP8 inputs
            (W4A8) [n, k / 32]; weight_scale_2 f32
    MXFP4   weight as of NVFP4; weight_scale uint8 [n, k / 32], powers of two
    INT8    weight int8 [n, k]; weight_scale f32 [n], or []
    INT4    weight uint8 [n / 2, k], whose bytes of row i have row 2 i in their low halves and row 2 i + 1 in the high
            ones, in two's complement; weight_scale f32 [n, k / group]; weight_scale_2 f32 for W4A8_AWQ

w = code * weight_scale, for NVFP4 times weight_scale_2. That of W4A8_AWQ multiplies nothing: a kernel may round w to
FP8 by it, and it is left out as scales of inputs are. The tensors of a module show which of these it is, so
MIXED_PRECISION, and algorithms with inputs in FP8 (W4A8), need no more.

AWQ and SmoothQuant multiplied columns of weights, and leave it to each call to multiply those of inputs by
pre_quant_scale [k]. Layers whose scales are merged into the norm or the layer in front have none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import Block, of_blocks
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats import nvfp4
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.formats.gpt_oss import scales_of_columns
from lowbit.pylib.checkpoints.imported import Imported, signed
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors
from lowbit.pylib.checkpoints.unpack import from_stream

BLOCK = Block(128, 128)
INT4, MIXED = ("W4A16_AWQ", "W4A8_AWQ"), "MIXED_PRECISION"
ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MXFP8", "NVFP4", "W4A16_NVFP4"),
    *("W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8", "NVFP4_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL", *INT4, MIXED),
)


def read(module: ModuleTensors) -> Imported:
    weight = module.take("weight", (torch.float8_e4m3fn, torch.uint8, torch.int8), 2)
    if weight.dtype == torch.uint8:
        return _reader(module)(module, weight)
    if weight.dtype == torch.int8:
        return Imported(weight, _scales(module, weight), weight="i8", bias=module.bias())
    codes = weight.contiguous().view(torch.uint8)
    return Imported(codes, _scales(module, weight), weight="f8e4m3", bias=module.bias())


def _reader(module: ModuleTensors) -> Callable[[ModuleTensors, Tensor], Imported]:
    """Returns what reads codes of four bits, which the type of their scales shows."""
    scales = module.tensors.get("weight_scale")
    if scales is not None and scales.dtype == torch.uint8:
        return _mxfp4
    is_int = _entry(module, "quant_algo") in INT4
    may_be = is_int or (_entry(module, "quant_algo") == MIXED and scales is not None and scales.dtype in FLOATS)
    return _int4 if may_be else _nvfp4


def _entry(module: ModuleTensors, name: str) -> object:
    """Returns what the configuration says of a module, or of all; texts in capitals."""
    of_layers = module.config.get("quantized_layers") or {}
    found = {**module.config, **(of_layers.get(module.name) or {})}.get(name)
    return found.upper() if isinstance(found, str) else found


def _scales(module: ModuleTensors, weight: Tensor) -> Tensor:
    n, k = weight.shape
    given = module.tensors.get("weight_scale")
    if given is not None and given.dtype == torch.uint8:
        return scales_of_columns(module, n, k)
    scales = module.take("weight_scale", FLOATS, 2 if given is None else given.ndim).float()
    size = _entry(module, "group_size")
    blocks = [Block(size, size), BLOCK] if isinstance(size, int) and size > 0 else [BLOCK]
    return of_blocks(scales.squeeze((1, 3)) if scales.ndim == 4 else scales, (n, k), blocks)


def _mxfp4(module: ModuleTensors, packed: Tensor) -> Imported:
    n, k = packed.shape[0], packed.shape[1] * 2
    if "weight_scale_2" in module:
        raise CheckpointError("weight_scale_2 is there, but weight_scale has powers of two, which need no second scale")
    return Imported(from_stream(packed, 4, k), scales_of_columns(module, n, k), weight="f4e2m1", bias=module.bias())


def _nvfp4(module: ModuleTensors, packed: Tensor) -> Imported:
    return nvfp4.read_multiplied(module, packed, _entry(module, "group_size"))


def _int4(module: ModuleTensors, packed: Tensor) -> Imported:
    n, k = packed.shape[0] * 2, packed.shape[1]
    scales = module.floats("weight_scale", 2)
    groups = scales.shape[1]
    size = _entry(module, "group_size") or k // groups
    if not isinstance(size, int) or len(scales) != n or groups * size != k:
        raise CheckpointError(
            f"weight_scale {list(scales.shape)} does not fit a weight of {n} x {k} with group_size={size!r}; it must "
            "have a number for each group of a row, and groups must divide rows"
        )
    rows = torch.stack([packed & 15, packed >> 4], dim=1).view(n, k)
    return Imported(signed(rows ^ 8, 4), scales, weight="i4", bias=module.bias())


def _algorithm(value: object) -> str:
    return one_of(*ALGORITHMS)(value.upper() if isinstance(value, str) else value)


_OF_A_LAYER = {**named("group_size", "pre_quant_scale"), "quant_algo": _algorithm}
ENTRIES = {
    **_OF_A_LAYER,
    **named("config_groups"),
    "quantized_layers": {"*": _OF_A_LAYER},
}
_OTHERS = (".weight", ".weight_scale_2", ".input_scale", ".bias")
FORMAT = Format((".weight_scale",), _OTHERS, read, ENTRIES, scaling=".pre_quant_scale")
