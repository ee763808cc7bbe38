"""BitNet's ternary weights, as transformers has them (transformers/integrations/bitnet.py).

    weight         uint8 [n / 4, k]   in a byte a code of each of four equal parts of the rows, the first part lowest:
                                      0, 1 and 2 for -1, 0 and 1
    weight_scale   [1]                divides ("linear_class": "bitlinear") or multiplies ("autobitlinear")

Inputs stay in f16 or bf16, while the library rounds them to 8 bits for each token.
"""

from __future__ import annotations

import torch

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors

PARTS = 4  # of the rows


def read(module: ModuleTensors) -> Imported:
    packed, scale = module.take("weight", torch.uint8, 2), module.floats("weight_scale", 1).float()
    if len(scale) != 1 or not bool(scale.isfinite() & (scale != 0)):
        raise CheckpointError(f"weight_scale={scale.tolist()[:3]} must be one number, and not 0")
    codes = torch.cat([packed >> 2 * part & 3 for part in range(PARTS)])
    if bool((codes == 3).any()):
        raise CheckpointError("weight has codes of 3; those of ternary weights are 0, 1 and 2")
    divides = module.choice("linear_class", ("bitlinear", "autobitlinear"), "bitlinear") == "bitlinear"
    each = (1 / scale if divides else scale).expand(len(codes), 1)
    return Imported(codes.to(torch.int8) - 1, each, weight="i2", bias=module.bias())


ENTRIES = {**named("linear_class", "rms_norm_eps"), "quantization_mode": one_of("offline")}
FORMAT = Format((".weight_scale",), (".weight", ".bias"), read, ENTRIES)
