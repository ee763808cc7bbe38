"""NVIDIA ModelOpt's FP8, MXFP8, NVFP4 and MXFP4 (modelopt/torch/export/quant_utils.py).

    FP8     weight e4m3 [n, k]; weight_scale f32 [], [n], or for blocks of 128 x 128 [n / 128, k / 128]
    MXFP8   weight e4m3 [n, k]; weight_scale uint8 [n, k / 32], powers of two
    NVFP4   weight uint8 [n, k / 2], each row a stream of e2m1 codes; weight_scale e4m3 [n, k / 16]; weight_scale_2 f32
    MXFP4   weight as of NVFP4; weight_scale uint8 [n, k / 32], powers of two

w = code * weight_scale, for NVFP4 times weight_scale_2. The tensors of a module show which of these it is, so
MIXED_PRECISION, and algorithms with inputs in FP8 (W4A8), need no more. Scales of inputs are left out; where inputs are
multiplied for AWQ, there is a pre_quant_scale, which is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import Block, of_blocks
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats import nvfp4
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.formats.gpt_oss import powers_of_two
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

BLOCK, MX = Block(128, 128), 32
ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"),
    *("MXFP4", "W4A8_MXFP4_FP8", "MIXED_PRECISION"),
)


def read(module: ModuleTensors) -> Imported:
    weight = module.take("weight", (torch.float8_e4m3fn, torch.uint8), 2)
    if weight.dtype == torch.uint8:
        scales = module.tensors.get("weight_scale")
        read_codes = _mxfp4 if scales is not None and scales.dtype == torch.uint8 else _nvfp4
        return read_codes(module, weight)
    codes = weight.contiguous().view(torch.uint8)
    return Imported(codes, _scales(module, weight), weight="f8e4m3", bias=module.bias())


def _scales(module: ModuleTensors, weight: Tensor) -> Tensor:
    n, k = weight.shape
    given = module.tensors.get("weight_scale")
    if given is not None and given.dtype == torch.uint8:
        return _powers(module, n, k)
    scales = module.take("weight_scale", FLOATS, 2 if given is None else given.ndim).float()
    return of_blocks(scales[:, 0, :, 0] if scales.ndim == 4 else scales, (n, k), [BLOCK])


def _powers(module: ModuleTensors, n: int, k: int) -> Tensor:
    """Returns the powers of two that scale 32 columns each."""
    given = module.take("weight_scale", torch.uint8, 2)
    check_shape("weight_scale", given, (n, -(-k // MX)), f"a weight of {n} x {k}")
    return powers_of_two(given)


def _mxfp4(module: ModuleTensors, packed: Tensor) -> Imported:
    n, k = packed.shape[0], packed.shape[1] * 2
    if "weight_scale_2" in module:
        raise CheckpointError("weight_scale_2 is there, but weight_scale has powers of two, which need no second scale")
    return Imported(from_stream(packed, 4, k), _powers(module, n, k), weight="f4e2m1", bias=module.bias())


def _nvfp4(module: ModuleTensors, packed: Tensor) -> Imported:
    n, k = packed.shape[0], packed.shape[1] * 2
    scales = module.take("weight_scale", torch.float8_e4m3fn, 2)
    check_shape("weight_scale", scales, (n, -(-k // nvfp4.GROUP)), f"weight {list(packed.shape)}")
    given = module.tensors.get("weight_scale_2")
    factor = module.take("weight_scale_2", torch.float32, 0 if given is None else given.ndim).view(-1)
    nvfp4.check_positive("weight_scale_2", factor)
    return nvfp4.weight(from_stream(packed, 4, k), scales, lambda s: s * factor, factor, module.bias())


def _algorithm(value: object) -> str:
    return one_of(*ALGORITHMS)(value.upper() if isinstance(value, str) else value)


_OF_A_LAYER = {**named("group_size"), "quant_algo": _algorithm}
ENTRIES = {
    **_OF_A_LAYER,
    **named("config_groups"),
    "quantized_layers": {"*": _OF_A_LAYER},
}
_OTHERS = (".weight", ".weight_scale_2", ".input_scale", ".bias")
FORMAT = Format((".weight_scale",), _OTHERS, read, ENTRIES)
