"""MXFP4, as gpt-oss writes its experts (transformers/integrations/mxfp4.py, convert_moe_packed_tensors).

    *_blocks   uint8 [rows, k / 32, 16]   two e2m1 codes in a byte, the first in the low nibble
    *_scales   uint8 [rows, k / 32]       powers of two, 2^(byte - 127)
    *_bias     bf16 [rows]

All of it with a first dimension for the expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import spread
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

MX = 32  # columns that share a power of two


def read(module: ModuleTensors) -> Imported:
    if "blocks" in module and module.tensors["blocks"].ndim == 4:
        raise CheckpointError("the blocks are those of several experts; load_experts(name) reads them")
    blocks = module.take("blocks", torch.uint8, 3)
    rows, groups, size = blocks.shape
    check_shape("blocks", blocks, (rows, groups, 16), "scales of 32 codes")
    scales = module.take("scales", torch.uint8, 2)
    check_shape("scales", scales, (rows, groups), "blocks")
    codes = from_stream(blocks.reshape(rows, groups * size), 4, groups * 32)
    return Imported(codes, powers_of_two(scales), weight="f4e2m1", bias=module.bias())


def scales_of_columns(module: ModuleTensors, n: int, k: int) -> Tensor:
    """Returns the scales [n, groups], e8m0, of a weight whose "weight_scale" has a byte for each `MX` columns of a row,
    the last byte for what is left. Raises CheckpointError for another shape."""
    given = module.take("weight_scale", torch.uint8, 2)
    check_shape("weight_scale", given, (n, -(-k // MX)), f"a weight of {n} x {k}")
    return powers_of_two(spread(given, MX, k))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Returns bytes of e8m0 as a tensor of this type."""
    return exponents.contiguous().view(torch.float8_e8m0fnu)


FORMAT = Format(("_blocks",), ("_scales", "_bias"), read, {})
