"""bitsandbytes' NF4 and FP4, as Linear4bit.state_dict writes them (bitsandbytes/functional.py, QuantState).

    weight                  uint8 [n * k / 2, 1]   two codes of the flattened weight, the first in the high nibble
    weight.absmax           f32 [blocks]           of so many codes one after the other as "blocksize" says
    weight.quant_map        f32 [16]               the value of each code
    weight.quant_state.*    JSON as bytes: blocksize, shape, and "nested_offset" where absmax are codes themselves:
    weight.absmax           uint8 [blocks]
    weight.nested_quant_map, weight.nested_absmax   f32 [256], f32 [blocks / "nested_blocksize"]

w = quant_map[code] * absmax, absmax = nested_quant_map[code] * nested_absmax + nested_offset, in f32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.formats.dtypes import dtype
from lowbit.dialect.spec import MOST
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import high_nibbles_first

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


def read(module: ModuleTensors) -> Imported:
    state = module.json(next((name for name in STATES if name in module), STATES[0]))
    (n, k), block = _shape(state), _positive(state, "blocksize")
    packed = module.take("weight", torch.uint8, 2)
    if packed.numel() * 2 != n * k:
        raise CheckpointError(f"weight has {packed.numel()} bytes, but is said to be {n} x {k} of 4 bits")
    absmax = _absmax(module, state, -(-n * k // block))
    group = math.gcd(block, k)  # blocks of the flattened weight may hold several rows, or end within one
    starts = torch.arange(0, n * k, group, device=absmax.device)
    scales = absmax[starts // block].view(n, -1)
    weight, table = _elements(module.take("weight.quant_map", torch.float32, 1))
    return Imported(weight, high_nibbles_first(packed).view(n, k), scales, table=table, bias=module.bias())


def _absmax(module: ModuleTensors, state: dict[str, Any], blocks: int) -> Tensor:
    """Returns the scale of each block, in f32."""
    nested = "nested_offset" in state
    absmax = module.take("weight.absmax", torch.uint8 if nested else torch.float32, 1)
    check_shape("weight.absmax", absmax, (blocks,), "weight")
    if not nested:
        return absmax
    table, outer = (module.take(f"weight.nested_{name}", torch.float32, 1) for name in ("quant_map", "absmax"))
    size, offset = _positive(state, "nested_blocksize"), state["nested_offset"]
    check_shape("weight.nested_quant_map", table, (256,), "weight.absmax")
    check_shape("weight.nested_absmax", outer, (-(-blocks // size),), "weight.absmax")
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise CheckpointError(f"nested_offset={offset!r} must be a finite number")
    outer = outer[torch.arange(blocks, device=outer.device) // size]
    return table[absmax.long()] * outer + offset


def _elements(table: Tensor) -> tuple[str, tuple[float, ...] | None]:
    """Returns the format with these 16 values: one with a name, where its values are exactly these."""
    check_shape("weight.quant_map", table, (16,), "weight")
    values = tuple(table.tolist())
    named = [name for name in ("nf4", "fp4_bnb") if tuple(dtype(name).values()) == values]
    return (named[0], None) if named else ("lut4", values)


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
FORMAT = Format("bitsandbytes", tuple(f".{name}" for name in STATES), (*_OTHERS, ".bias"), read)
