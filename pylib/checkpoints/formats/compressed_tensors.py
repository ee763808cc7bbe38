"""compressed-tensors, as llm-compressor writes it (compressed_tensors/compressors/).

    pack-quantized   weight_packed int32 [n, k * bits / 32], each row a stream of codes; weight_scale [n, groups];
                     weight_zero_point int32 [n * bits / 32, groups], each column a stream; weight_shape. Codes and
                     zeros are stored with 2^(bits - 1) added to them
    int-quantized    weight int8 [n, k]; weight_scale [n, groups], [n, 1] or [1]; weight_zero_point int8
    float-quantized  weight e4m3 [n, k]; weight_scale likewise, or one for each block
    mxfp8            weight e4m3 [n, k]; weight_scale uint8 [n, k / 32], powers of two
    mxfp4, mxfp6     weight_packed uint8, each row a stream of e2m1 or e2m3 codes; weight_scale as for mxfp8
    nvfp4            weight_packed uint8, each row a stream of e2m1 codes; scales as in nvfp4.py

w = (code - zero) * scale. Which of these a module is can be seen from its tensors; the types and bits that are so found
must be among those of the configuration's groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import Block, of_blocks, order_of
from lowbit.pylib.checkpoints.formats import nvfp4
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.formats.gpt_oss import powers_of_two
from lowbit.pylib.checkpoints.imported import Imported, integers
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_columns, from_stream

SMALL_FLOATS = {4: "f4e2m1", 6: "f6e2m3"}


def read(module: ModuleTensors) -> Imported:
    if "weight_packed" not in module:
        weight = module.take("weight", (torch.int8, torch.float8_e4m3fn), 2)
        return _int8(module, weight) if weight.dtype == torch.int8 else _float8(module, weight)
    packed = module.take("weight_packed", (torch.int32, torch.uint8), 2)
    return _packed_integers(module, packed) if packed.dtype == torch.int32 else _packed_floats(module, packed)


def _schemes(module: ModuleTensors, kind: str) -> list[Mapping[str, Any]]:
    """Returns what the configuration says of weights of one kind, "int" or "float": one entry for each group."""
    groups = module.config.get("config_groups")
    entries = groups.values() if isinstance(groups, dict) else ()
    found = [entry.get("weights") for entry in entries if isinstance(entry, dict)]
    schemes = [cast(Mapping[str, Any], scheme) for scheme in found if isinstance(scheme, dict)]
    if of_kind := [scheme for scheme in schemes if scheme.get("type", "int") == kind]:
        return of_kind
    raise CheckpointError(f"the tensors are those of {kind} weights, which no group of the quantization_config has")


def _check_bits(module: ModuleTensors, kind: str, bits: int) -> None:
    said = [scheme.get("num_bits") for scheme in _schemes(module, kind)]
    if bits not in said:
        raise CheckpointError(f"codes have {bits} bits, but num_bits={said[0]!r} in the quantization_config")


# -- integers


def _packed_integers(module: ModuleTensors, packed: Tensor) -> Imported:
    n, k = _shape(module, packed)
    bits = packed.shape[1] * 32 // k
    if not 1 <= bits <= 8 or packed.shape[1] != -(-k * bits // 32):
        raise CheckpointError(f"weight_packed {list(packed.shape)} doesn't fit weight_shape [{n}, {k}]")
    _check_bits(module, "int", bits)
    scales = _scales(module, "int", n, k)
    codes = from_stream(packed, bits, k)
    weight = integers(codes, bits, scales, _packed_zeros(module, bits, scales), module.bias())
    return weight.in_order(_order(module, k, k // scales.shape[1]))


def _order(module: ModuleTensors, k: int, group: int) -> Tensor | None:
    """Returns the columns by their groups, which older files say with weight_g_idx: -1 for columns in order."""
    if "weight_g_idx" not in module:
        return None
    groups = module.take("weight_g_idx", torch.int32, 1)
    check_shape("weight_g_idx", groups, (k,), "weight_packed")
    return None if bool((groups == -1).all()) else order_of(groups, group)


def _packed_zeros(module: ModuleTensors, bits: int, scales: Tensor) -> Tensor:
    """Returns the zeros [n, groups] as they are stored: with 2^(bits - 1) added."""
    n, groups = scales.shape
    if "weight_zero_point" not in module:
        return torch.full((n, groups), 1 << (bits - 1), dtype=torch.uint8, device=scales.device)
    packed = module.take("weight_zero_point", torch.int32, 2)
    check_shape("weight_zero_point", packed, (-(-n * bits // 32), groups), f"scales {[n, groups]}")
    return from_columns(packed, bits, n)


def _shape(module: ModuleTensors, packed: Tensor) -> tuple[int, int]:
    shape = module.take("weight_shape", (torch.int32, torch.int64), 1)
    n, k = shape.tolist() if len(shape) == 2 else (0, 0)
    if n != len(packed) or k < 1:
        raise CheckpointError(f"weight_shape={shape.tolist()} doesn't fit weight_packed {list(packed.shape)}")
    return n, k


def _int8(module: ModuleTensors, weight: Tensor) -> Imported:
    n, k = weight.shape
    _check_bits(module, "int", 8)
    scales, zeros = _scales(module, "int", n, k), None
    if "weight_zero_point" in module:
        given = module.take("weight_zero_point", torch.int8, module.tensors["weight_zero_point"].ndim)
        zeros = of_blocks(given, (n, k), _blocks(module, "int"))
        check_shape("weight_zero_point", zeros, scales.shape, "weight_scale")
    return Imported(weight, scales, zeros, weight="i8", bias=module.bias())


# -- floats


def _float8(module: ModuleTensors, weight: Tensor) -> Imported:
    n, k = weight.shape
    _check_bits(module, "float", 8)
    given = module.tensors.get("weight_scale")
    is_mx = given is not None and given.dtype == torch.uint8
    scales = _exponents(module, n, k) if is_mx else _scales(module, "float", n, k)
    return Imported(weight.contiguous().view(torch.uint8), scales, weight="f8e4m3", bias=module.bias())


def _packed_floats(module: ModuleTensors, packed: Tensor) -> Imported:
    if "weight_global_scale" in module:
        _check_bits(module, "float", 4)
        return nvfp4.read(module, packed)
    n, size = packed.shape
    groups = module.take("weight_scale", torch.uint8, 2).shape[1]
    bits = size * 8 // (groups * 32)
    if bits not in SMALL_FLOATS or size * 8 != groups * 32 * bits:
        raise CheckpointError(f"weight_packed {list(packed.shape)} doesn't fit {groups} groups of 32 columns")
    _check_bits(module, "float", bits)
    scales = _exponents(module, n, groups * 32)
    return Imported(from_stream(packed, bits, groups * 32), scales, weight=SMALL_FLOATS[bits], bias=module.bias())


def _exponents(module: ModuleTensors, n: int, k: int) -> Tensor:
    scales = module.take("weight_scale", torch.uint8, 2)
    check_shape("weight_scale", scales, (n, -(-k // 32)), f"a weight of {n} x {k}")
    return powers_of_two(scales)


# -- scales


def _scales(module: ModuleTensors, kind: str, n: int, k: int) -> Tensor:
    """Returns the scales [n, groups]."""
    given = module.tensors.get("weight_scale")
    scales = module.take("weight_scale", FLOATS, 2 if given is None else given.ndim)
    return of_blocks(scales, (n, k), _blocks(module, kind))


def _blocks(module: ModuleTensors, kind: str) -> list[Block | None]:
    """Returns what shares a scale, as each group of the configuration has it."""
    return [
        Block.of([1, scheme.get("group_size")] if scheme.get("group_size") else scheme.get("block_structure"))
        for scheme in _schemes(module, kind)
    ]


_OTHERS = (
    ".weight", ".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_g_idx", ".bias",
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point",
)  # fmt: skip
FORMAT = Format((".weight_packed", ".weight_scale"), _OTHERS, read)
