"""HQQ, as HQQLinear.state_dict writes it into safetensors (hqq/core/quantize.py, hqq/core/bitpack.py).

    W_q       uint8, int32 for 3 bits, or these bits called floats: a row is a group, and a word holds the codes of rows
              that lie as far apart as there are words
    scale     f16, bf16 or f32 [n * groups, 1]
    zero      of the same type and shape
    nbits, group_size, shape, axis, packing, view_as_float    numbers, and text as bytes

w = (code - zero) * scale, where a group lies along k (axis 1). Groups along n (axis 0) are none that kernels can read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.config_entries import named
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors
from lowbit.pylib.checkpoints.unpack import from_parts

PACKED_BITS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
PACKINGS = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def read(module: ModuleTensors) -> Imported:
    if (axis := _number(module, "axis")) != 1:
        raise CheckpointError(f"axis={axis}: groups must lie along k; quantize with axis=1")
    shape, scale = module.take("shape", (torch.int32, torch.int64), 1), module.floats("scale", 2)
    n, k = shape.tolist() if len(shape) == 2 else (0, 0)
    rows, columns = len(scale), n * k // max(1, len(scale))
    if n < 1 or k < 1 or scale.shape[1] != 1 or rows % n or columns * rows != n * k:
        raise CheckpointError(f"scale {list(scale.shape)} doesn't fit a weight of shape {shape.tolist()}")
    if "group_size" in module and _number(module, "group_size") != columns:
        raise CheckpointError(f"group_size={_number(module, 'group_size')}, but scale has {columns} columns to a group")
    zero = module.take("zero", scale.dtype, 2)
    if zero.shape != scale.shape:
        raise CheckpointError(f"zero {list(zero.shape)} must have the shape of scale {list(scale.shape)}")
    codes = _codes(module, rows, columns).view(n, k)
    return Imported(codes, scale.view(n, -1), zero.view(n, -1), weight=f"u{_bits(module)}", bias=module.bias())


def _codes(module: ModuleTensors, rows: int, columns: int) -> Tensor:
    """Returns the codes [rows, columns], a group a row."""
    packing = "".join(map(chr, module.take("packing", torch.uint8, 1)[:16].tolist()))
    if packing not in PACKED_BITS:
        raise CheckpointError(f"packing={packing!r} must be one of {', '.join(PACKED_BITS)}")
    bits = PACKED_BITS[packing]
    if PACKINGS[_bits(module)] != packing:
        raise CheckpointError(f"nbits={_bits(module)} is packed as {PACKINGS[_bits(module)]}, but packing={packing!r}")
    given = module.take("W_q", (torch.uint8, torch.int32, *FLOATS), 2).contiguous().view(torch.uint8)
    words = given.view(torch.int32) if bits == 3 and given.shape[1] % 4 == 0 else given
    parts = 10 if bits == 3 else 8 // bits
    if words.shape != (-(-rows // parts), columns):
        raise CheckpointError(f"W_q has {list(words.shape)} words for {rows} x {columns} codes of {packing}")
    return from_parts(words, bits, rows)


def _bits(module: ModuleTensors) -> int:
    bits = _number(module, "nbits")
    if bits not in PACKINGS:
        raise CheckpointError(f"nbits={bits} must be 1 to 6, or 8")
    return bits


def _number(module: ModuleTensors, name: str) -> int:
    """Returns a number that is kept as a tensor without dimensions."""
    return int(module.take(name, (torch.int32, torch.int64, torch.uint8), 0))


_OTHERS = (
    ".scale", ".zero", ".bias", ".nbits", ".group_size", ".shape", ".axis", ".packing", ".unpack_view_dtype",
    ".view_as_float", ".quant_scale", ".quant_zero", ".compute_dtype", ".offload_meta", ".encoded_state_dict",
    ".stores_quant_config", ".channel_wise", ".optimize", ".round_zero",
)  # fmt: skip
ENTRIES = named("quant_config", "dynamic_config", "nbits", "group_size", "axis", "view_as_float")  # tensors say it all
FORMAT = Format((".W_q",), _OTHERS, read, ENTRIES)
