"""bitsandbytes' NF4, FP4 and LLM.int8 (bitsandbytes/functional.py; nn/modules.py).

Linear4bit.state_dict writes:

    weight                  uint8 [n * k / 2, 1]   two codes of the flattened weight, the first in the high nibble; or
                            the same bytes in a tensor of another type, as "bnb_4bit_quant_storage" says
    weight.absmax           f32 [blocks]           of so many codes one after the other as "blocksize" says
    weight.quant_map        f32 [16]               the value of each code
    weight.quant_state.*    JSON as bytes: blocksize, shape, and "nested_offset" where absmax are codes themselves:
    weight.absmax           uint8 [blocks]
    weight.nested_quant_map, weight.nested_absmax   f32 [256], f32 [blocks / "nested_blocksize"]

w = quant_map[code] * absmax, absmax = nested_quant_map[code] * nested_absmax + nested_offset, in f32.

Blocks are counted through the flattened weight. Blocks of absmax lie within rows if k is a multiple of "blocksize".
Blocks of nested_absmax may hold several rows, or end within one, so every few groups of a row get a copy here. Where
fewer than four groups share a copy, it would take more bytes than it saves, and scales are f32 numbers.

Linear8bitLt.state_dict writes:

    weight          int8 [n, k]
    SCB             f32 [n]: the largest magnitude of each row
    weight_format   uint8 []: 0, for rows as they are

w = code * SCB / 127, in f32. Which columns of x are multiplied in f16 there is decided at each call; no file says it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.dialect.bilevel import TABLE_CODE
from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.fields import MOST
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.presets import nested_blocks
from lowbit.pylib.checkpoints.config_entries import named
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import high_nibbles_first

FEWEST_SHARED = 4
"""Groups of a row: a byte for each, and two f32 numbers, take less than an f32 number for each."""
STATE = "weight.quant_state.bitsandbytes__"
NAMED = {"nf4": "nf4", "fp4": "fp4_bnb"}
"""Our names of the types of codes."""
STATES = tuple(STATE + kind for kind in NAMED)


def read(module: ModuleTensors) -> Imported:
    has_codes = "weight" in module and module.tensors["weight"].dtype == torch.int8
    is_eight_bit = has_codes and not any(state in module for state in STATES)
    return _eight_bit(module) if is_eight_bit or "SCB" in module else _four_bit(module)


def _eight_bit(module: ModuleTensors) -> Imported:
    weight, largest = module.take("weight", torch.int8, 2), module.take("SCB", torch.float32, 1)
    check_shape("SCB", largest, (len(weight),), f"weight {list(weight.shape)}")
    if "weight_format" in module and int(module.take("weight_format", torch.uint8, 0)):
        raise CheckpointError("weight_format must be 0, rows as they are; save the model again with a new bitsandbytes")
    return Imported(weight, (largest / 127)[:, None], weight="i8", bias=module.bias())


def _four_bit(module: ModuleTensors) -> Imported:
    kind = _kind(module)
    state = module.json(STATE + kind)
    (n, k), block = _shape(state), _positive(state, "blocksize")
    packed = module.packed("weight")
    if packed.numel() * 2 != n * k:
        raise CheckpointError(f"weight has {packed.numel()} bytes, but is said to be {n} x {k} of 4 bits")
    nested = "nested_offset" in state
    absmax = module.take("weight.absmax", torch.uint8 if nested else torch.float32, 1)
    check_shape("weight.absmax", absmax, (-(-n * k // block),), "weight")
    group = math.gcd(block, k)  # blocks of the flattened weight may hold several rows, or end within one
    blocks = torch.arange(0, n * k, group, device=absmax.device).view(n, -1) // block
    weight, table = _elements(module.take("weight.quant_map", torch.float32, 1), kind)
    whole = Imported(
        high_nibbles_first(packed).view(n, k), absmax[blocks], weight=weight, table=table, bias=module.bias()
    )
    return _nested(module, state, whole, blocks, block // group) if nested else whole


def _nested(
    module: ModuleTensors, state: dict[str, Any], weight: Imported, blocks: Tensor, groups_of_block: int
) -> Imported:
    """Returns a weight whose scales are places in a table with their second level, or with numbers as scales.

    blocks   [n, groups]: the block that each group is in
    """
    table, outer = (module.take(f"weight.nested_{name}", torch.float32, 1) for name in ("quant_map", "absmax"))
    size, offset = _positive(state, "nested_blocksize"), state["nested_offset"]
    check_shape("weight.nested_quant_map", table, (256,), "weight.absmax")
    check_shape("weight.nested_absmax", outer, (int(blocks[-1, -1]) // size + 1,), "weight.absmax")
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise CheckpointError(f"nested_offset={offset!r} must be a finite number")
    outer, shared = outer[blocks // size], nested_blocks(blocks.shape[1], size * groups_of_block)
    if shared < FEWEST_SHARED:
        return replace(weight, scales=table[weight.scales.long()] * outer + offset)
    copies = outer[:, ::shared]
    return replace(
        weight,
        scale_code=TABLE_CODE,
        scale_table=tuple(table.tolist()),
        second_level={"scale_scales": copies, "scale_offsets": torch.full_like(copies, offset)},
    )


def _kind(module: ModuleTensors) -> str:
    """Returns the type of codes, "nf4" or "fp4". Raises CheckpointError if the configuration says another."""
    said = module.config.get("bnb_4bit_quant_type")
    found = next((kind for kind in NAMED if STATE + kind in module), None)
    if said and found and said != found:
        raise CheckpointError(f"the quantization_config has bnb_4bit_quant_type={said!r}, but there is {STATE}{found}")
    return found or ("fp4" if said == "fp4" else "nf4")


def _elements(table: Tensor, kind: str) -> tuple[str, tuple[float, ...] | None]:
    """Returns the format with these 16 values: one with a name, where its values are exactly these.

    Raises CheckpointError where they are those of another type than the file says.
    """
    check_shape("weight.quant_map", table, (16,), "weight")
    values = tuple(table.tolist())
    nearest = min(NAMED, key=lambda kind: math.dist(values, dtype(NAMED[kind]).values()))  # versions round differently
    if nearest != kind:
        raise CheckpointError(f"weight.quant_map has the values of {nearest}, but there is {STATE}{kind}")
    return (NAMED[kind], None) if tuple(dtype(NAMED[kind]).values()) == values else ("lut4", values)


def _shape(state: dict[str, Any]) -> tuple[int, int]:
    match state.get("shape"):
        case [int(n), int(k)] if 0 < n <= MOST and 0 < k <= MOST:
            return n, k
        case shape:
            raise CheckpointError(f"shape={shape!r} must be [n, k]")


def _positive(state: dict[str, Any], name: str) -> int:
    match state.get(name):
        case int(value) if 0 < value <= MOST:
            return value
        case value:
            raise CheckpointError(f"{name}={value!r} must be an integer from 1 to {MOST}")


_OTHERS = (".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")
ENTRIES = named(
    *("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "llm_int8_threshold", "bnb_4bit_quant_type"),
    *("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_blocksize"),
)
FORMAT = Format((*(f".{name}" for name in STATES), ".SCB"), (*_OTHERS, ".weight_format", ".bias"), read, ENTRIES)
