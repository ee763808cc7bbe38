"""Quanto, as QuantizedTransformersModel of optimum-quanto saves it (optimum/quanto/tensor/).

    weight._data         int8 or e4m3 [n, k], with _scale [n, 1]: w = scale * code
    weight._data._data   uint8, codes of 2 or 4 bits of rows that are groups: a byte has one code from each of several
                         equal parts of the rows, the first part lowest
    weight._scale        f16, bf16 or f32 [n * groups, 1]
    weight._shift        floats likewise: w = scale * code - shift; or integers: w = scale * (code - shift)

quanto_qmap.json beside the files says the types again. A module of 2 or 4 bits does not show n and k: its bias does, or
the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.config_entries import anything, named
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import FLOATS, INTEGERS, ModuleTensors, check_shape

BYTES = {torch.int8: "i8", torch.float8_e4m3fn: "f8e4m3"}
BITS = (4, 2)


def read(module: ModuleTensors) -> Imported:
    if "weight._data._data" in module or "weight._shift" in module:
        return _groups(module, module.take("weight._data._data", torch.uint8, 2))
    data, scale = module.take("weight._data", tuple(BYTES), 2), module.floats("weight._scale", 2)
    check_shape("weight._scale", scale, (len(data), 1), f"weight._data {list(data.shape)}")
    codes = data if data.dtype == torch.int8 else data.contiguous().view(torch.uint8)
    return Imported(codes, scale, weight=BYTES[data.dtype], bias=module.bias())


def _groups(module: ModuleTensors, packed: Tensor) -> Imported:
    scale = module.floats("weight._scale", 2)
    shift = module.take("weight._shift", (*FLOATS, *INTEGERS), 2)
    rows, size = len(scale), packed.shape[1]
    check_shape("weight._scale", scale, (rows, 1), "weight._data")
    check_shape("weight._shift", shift, scale.shape, "weight._scale")
    bits = next((bits for bits in BITS if -(-rows * bits // 8) == len(packed)), 0)
    n = _n(module)
    if not bits or n < 1 or rows % n:
        raise CheckpointError(f"weight._data {list(packed.shape)} and {rows} scales are no {n} rows of 2 or 4 bits")
    codes = torch.cat([packed >> bits * part & ((1 << bits) - 1) for part in range(8 // bits)])[:rows]
    shifts = (-shift if shift.is_floating_point() else shift.to(scale.dtype)).view(n, -1)
    zeros, offsets = (None, shifts) if shift.is_floating_point() else (shifts, None)
    return Imported(
        codes.view(n, rows // n * size),
        scale.view(n, -1),
        zeros,
        weight=f"u{bits}",
        offsets=offsets,
        bias=module.bias(),
    )


def _n(module: ModuleTensors) -> int:
    """Returns the rows of the weight."""
    if module.shape:
        return module.shape[0]
    module.check_has("bias", "without it nothing says n and k; pass shape=, or load into a model")
    return len(module.floats("bias", 1))


_WEIGHTS = (".weight._data", ".weight._data._data")
_OTHERS = (".weight._scale", ".weight._shift", ".bias", ".input_scale", ".output_scale")
ENTRIES = {"qmap": anything, **named("weights", "activations", "weights_dtype")}  # tensors say it all
FORMAT = Format(_WEIGHTS, _OTHERS, read, ENTRIES)
