"""FP8 as DeepSeek writes it, which transformers calls "fp8" (transformers/integrations/finegrained_fp8.py).

    weight                             e4m3 [n, k]
    weight_scale_inv or weight_scale   [n / rows, k / columns] in f32, bf16 or e8m0: a scale for each block of
                                       "weight_block_size" rows and columns; or one for each row, or one for all

w = code * scale: the "inverse" multiplies. Scales become f32 and are repeated for each row of their block. Those of
"mxfp8", one for 32 columns of a row, are the exponents of powers of two as bytes, and become e8m0.
"""

from __future__ import annotations

import math

import torch

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import Block, of_blocks
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.formats.gpt_oss import powers_of_two
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors

SCALES = ("weight_scale_inv", "weight_scale")


def read(module: ModuleTensors) -> Imported:
    weight = module.take("weight", torch.float8_e4m3fn, 2)
    name = next((name for name in SCALES if name in module), SCALES[0])
    given = module.tensors.get(name)
    kinds = (*FLOATS, torch.float8_e8m0fnu, torch.uint8)
    stored = module.take(name, kinds, 2 if given is None else given.ndim)
    scales = powers_of_two(stored) if stored.dtype == torch.uint8 else stored.float()
    block = Block.of(module.config.get("weight_block_size"))
    if block and scales.numel() != math.prod(block.counts(*weight.shape)):
        raise CheckpointError(
            f"the quantization_config has weight_block_size=[{block.rows}, {block.columns}], that is "
            f"{block.counts(*weight.shape)} scales for {list(weight.shape)}, but {name} is {list(scales.shape)}"
        )
    codes = weight.contiguous().view(torch.uint8)
    return Imported(codes, of_blocks(scales, weight.shape, [block]), weight="f8e4m3", bias=module.bias())


ENTRIES = {
    **named("weight_block_size"),
    "scale_fmt": one_of("float", "ue8m0"),
    "fmt": one_of("e4m3", "float8_e4m3fn"),
    "expert_dtype": one_of("fp8"),
}
_OTHERS = (".weight", ".bias", ".input_scale", ".activation_scale")
FORMAT = Format((".weight_scale_inv", ".weight_scale"), _OTHERS, read, ENTRIES)
