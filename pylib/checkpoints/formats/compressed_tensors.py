"""compressed-tensors, as llm-compressor writes it (compressed_tensors/compressors/).

    pack-quantized   weight_packed int32 [n, k * bits / 32], each row a stream of codes; weight_scale [n, groups];
                     weight_zero_point int32 [n * bits / 32, groups], each column a stream; weight_shape. Codes and
                     zeros are stored with 2^(bits - 1) added to them
    int-quantized    weight int8 [n, k]; weight_scale [n, groups], [n, 1] or [1]; weight_zero_point int8
    float-quantized  weight e4m3 [n, k]; weight_scale likewise, or one for each block
    mxfp8            weight e4m3 [n, k]; weight_scale uint8 [n, k / 32], powers of two
    mxfp4, mxfp6     weight_packed uint8, each row a stream of e2m1 or e2m3 codes; weight_scale as for mxfp8
    nvfp4            weight_packed uint8, each row a stream of e2m1 codes; scales as in nvfp4.py

w = (code - zero) * scale. The tensors of a module show which of these it is. That must agree with one group of the
configuration, in type, bits, strategy and group size; if the targets of some groups name the module, with one of them.
The group then says whether there are zeros and, by "actorder", a weight_g_idx.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints import transforms
from lowbit.pylib.checkpoints.blocks import Block, of_blocks, order_of
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats import nvfp4
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.formats.gpt_oss import MX, scales_of_columns
from lowbit.pylib.checkpoints.imported import Imported, check_middle, integers
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_columns, from_stream
from lowbit.pylib.torch_types import type_name

SMALL_FLOATS = {4: "f4e2m1", 6: "f6e2m3"}


def read(module: ModuleTensors) -> Imported:
    if "weight_packed" not in module:
        if "weight" not in module and "pack" in str(module.config.get("format")):
            module.check_has("weight_packed")
        _check_compressed(module)
        weight = module.take("weight", (torch.int8, torch.float8_e4m3fn), 2)
        return _int8(module, weight) if weight.dtype == torch.int8 else _float8(module, weight)
    packed = module.take("weight_packed", (torch.int32, torch.uint8), 2)
    return _packed_integers(module, packed) if packed.dtype == torch.int32 else _packed_floats(module, packed)


def _check_compressed(module: ModuleTensors) -> None:
    """Raise CheckpointError for a weight that was saved as it was before its codes are made."""
    if "weight" in module and (kind := module.tensors["weight"].dtype) in FLOATS:
        status = module.config.get("quantization_status")
        raise CheckpointError(
            f"weight is {type_name(kind)}, not compressed (quantization_status={status!r}); save the model with "
            "save_compressed=True, or quantize it again as a dense one"
        )


Scheme = Mapping[str, Any]
"""The entries for weights of one group of the configuration."""


def _schemes(module: ModuleTensors, kind: str, bits: int) -> list[Scheme]:
    """Returns what the configuration may say of a module whose weights are of one kind, "int" or "float"."""
    found = [entry.get("weights") for entry in _groups(module)]
    schemes = [cast(Scheme, scheme) for scheme in found if isinstance(scheme, dict)]
    of_kind = [scheme for scheme in schemes if scheme.get("type", "int") == kind]
    if not of_kind:
        raise CheckpointError(f"the tensors are those of {kind} weights, which no group of the quantization_config has")
    if of_bits := [scheme for scheme in of_kind if scheme.get("num_bits") == bits]:
        return of_bits
    said = of_kind[0].get("num_bits")
    raise CheckpointError(f"codes have {bits} bits, but num_bits={said!r} in the quantization_config")


def _groups(module: ModuleTensors) -> list[Mapping[str, Any]]:
    """Returns the groups of the configuration for a module: those that name it, else those that name other things."""
    groups = module.config.get("config_groups")
    entries = [cast(Mapping[str, Any], e) for e in groups.values() if isinstance(e, dict)] if _is_dict(groups) else []
    return [entry for entry in entries if any(_names(target, module.name) for target in _targets(entry))] or entries


def _targets(group: Mapping[str, Any]) -> list[str]:
    """Returns what a group is for: names of modules, regular expressions after "re:", or classes such as "Linear"."""
    targets = group.get("targets")
    return [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []


def _names(target: str, name: str) -> bool:
    if not target.startswith("re:"):
        return target == name
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error as error:
        raise CheckpointError(f"target {target!r} of the quantization_config is no pattern: {error}") from None


def _is_dict(given: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(given, dict)


# -- integers


def _packed_integers(module: ModuleTensors, packed: Tensor) -> Imported:
    n, k = _shape(module, packed)
    bits = packed.shape[1] * 32 // k
    if not 1 <= bits <= 8 or packed.shape[1] != -(-k * bits // 32):
        raise CheckpointError(f"weight_packed {list(packed.shape)} doesn't fit weight_shape [{n}, {k}]")
    scales, schemes = _scales(module, _schemes(module, "int", bits), n, k)
    codes, zeros = from_stream(packed, bits, k), _packed_zeros(module, bits, scales, schemes)
    weight = integers(codes, bits, scales, zeros, module.bias())
    return weight.in_order(_order(module, k, k // scales.shape[1], schemes))


def _order(module: ModuleTensors, k: int, group: int, schemes: Sequence[Scheme]) -> Tensor | None:
    """Returns the columns by their groups, which older files say with weight_g_idx: -1 for columns in order."""
    if all(scheme.get("actorder") in (True, "group") for scheme in schemes):
        module.check_has("weight_g_idx", f"the quantization_config has actorder={schemes[0]['actorder']!r}")
    if "weight_g_idx" not in module:
        return None
    groups = module.take("weight_g_idx", torch.int32, 1)
    check_shape("weight_g_idx", groups, (k,), "weight_packed")
    return None if bool((groups == -1).all()) else order_of(groups, group)


def _packed_zeros(module: ModuleTensors, bits: int, scales: Tensor, schemes: Sequence[Scheme]) -> Tensor:
    """Returns the zeros [n, groups] as they are stored: with 2^(bits - 1) added."""
    n, groups = scales.shape
    if not _has_zeros(module, schemes):
        return torch.full((n, groups), 1 << (bits - 1), dtype=torch.uint8, device=scales.device)
    packed = module.take("weight_zero_point", torch.int32, 2)
    check_shape("weight_zero_point", packed, (-(-n * bits // 32), groups), f"scales {[n, groups]}")
    zeros = from_columns(packed, bits, n)
    check_middle(zeros, bits, all(map(_is_symmetric, schemes)), "symmetric=True")
    return zeros


def _has_zeros(module: ModuleTensors, schemes: Sequence[Scheme]) -> bool:
    """Tells whether there are zeros. Raises CheckpointError if there are none, and the configuration says there are."""
    if not any(map(_is_symmetric, schemes)):
        module.check_has("weight_zero_point", "the quantization_config has symmetric=False")
    return "weight_zero_point" in module


def _is_symmetric(scheme: Scheme) -> bool:
    return scheme.get("symmetric") is not False


def _shape(module: ModuleTensors, packed: Tensor) -> tuple[int, int]:
    shape = module.take("weight_shape", (torch.int32, torch.int64), 1)
    n, k = shape.tolist() if len(shape) == 2 else (0, 0)
    if n != len(packed) or k < 1:
        raise CheckpointError(f"weight_shape={shape.tolist()} doesn't fit weight_packed {list(packed.shape)}")
    return n, k


def _int8(module: ModuleTensors, weight: Tensor) -> Imported:
    n, k = weight.shape
    (scales, schemes), zeros = _scales(module, _schemes(module, "int", 8), n, k), None
    if _has_zeros(module, schemes):
        given = module.take("weight_zero_point", torch.int8, module.tensors["weight_zero_point"].ndim)
        zeros = of_blocks(given, (n, k), [_block(scheme) for scheme in schemes])
        check_shape("weight_zero_point", zeros, scales.shape, "weight_scale")
        if all(map(_is_symmetric, schemes)) and bool(zeros.any()):
            raise CheckpointError("the quantization_config has symmetric=True, but weight_zero_point is not all zeros")
    return Imported(weight, scales, zeros, weight="i8", bias=module.bias())


# -- floats


def _float8(module: ModuleTensors, weight: Tensor) -> Imported:
    n, k = weight.shape
    schemes = _schemes(module, "float", 8)
    given = module.tensors.get("weight_scale")
    is_mx = given is not None and given.dtype == torch.uint8
    scales = _exponents(module, schemes, n, k) if is_mx else _scales(module, schemes, n, k)[0]
    return Imported(weight.contiguous().view(torch.uint8), scales, weight="f8e4m3", bias=module.bias())


def _packed_floats(module: ModuleTensors, packed: Tensor) -> Imported:
    if "weight_global_scale" in module:
        _check_group(_schemes(module, "float", 4), nvfp4.GROUP)
        return nvfp4.read(module, packed)
    n, size = packed.shape
    groups = module.take("weight_scale", torch.uint8, 2).shape[1]
    bits = size * 8 // (groups * 32)
    if bits not in SMALL_FLOATS or size * 8 != groups * 32 * bits:
        raise CheckpointError(f"weight_packed {list(packed.shape)} doesn't fit {groups} groups of 32 columns")
    scales = _exponents(module, _schemes(module, "float", bits), n, groups * 32)
    return Imported(from_stream(packed, bits, groups * 32), scales, weight=SMALL_FLOATS[bits], bias=module.bias())


def _exponents(module: ModuleTensors, schemes: Sequence[Scheme], n: int, k: int) -> Tensor:
    _check_group(schemes, MX)
    return scales_of_columns(module, n, k)


# -- scales


def _check_group(schemes: Sequence[Scheme], size: int) -> None:
    """Raise CheckpointError unless the configuration says, if anything, that groups have so many columns."""
    said = [scheme.get("group_size") for scheme in schemes]
    if not {None, size} & set(map(_hashable, said)):
        raise CheckpointError(f"scales have groups of {size}, but group_size={said[0]!r} in the quantization_config")


def _hashable(given: object) -> object:
    return given if isinstance(given, int) else repr(given) if given is not None else None


def _scales(module: ModuleTensors, schemes: Sequence[Scheme], n: int, k: int) -> tuple[Tensor, list[Scheme]]:
    """Returns the scales [n, groups], and what of the configuration agrees with their shape."""
    given = module.tensors.get("weight_scale")
    scales = module.take("weight_scale", FLOATS, 2 if given is None else given.ndim)
    fitting = [scheme for scheme in schemes if _fits(scheme, scales.shape, n, k)]
    if not fitting:
        strategy, size = _strategy(schemes[0]), schemes[0].get("group_size") or schemes[0].get("block_structure")
        raise CheckpointError(
            f"weight_scale {list(scales.shape)} of a weight of {n} x {k} is not what the quantization_config says: "
            f"strategy={strategy!r}" + (f" with groups or blocks of {size}" if size else "")
        )
    return of_blocks(scales, (n, k), [_block(scheme) for scheme in fitting]), fitting


def _fits(scheme: Scheme, shape: Sequence[int], n: int, k: int) -> bool:
    """Tells whether scales of this shape are what a scheme says."""
    match _strategy(scheme), _block(scheme):
        case "tensor", _:
            return math.prod(shape) == 1
        case "channel", _:
            return list(shape) in ([n], [n, 1])
        case "group" | "block", Block() as block:
            return list(shape) == block.counts(n, k)
        case _:
            return False


def _strategy(scheme: Scheme) -> object:
    """Returns what shares a scale, as the library infers it where a configuration does not say it."""
    if strategy := scheme.get("strategy"):
        return strategy
    if scheme.get("block_structure"):
        return "block"
    return {None: "tensor", -1: "channel"}.get(_hashable(scheme.get("group_size")), "group")


def _block(scheme: Scheme) -> Block | None:
    """Returns the columns of a group, or the block that shares a scale; None for whole rows."""
    size = scheme.get("group_size")
    return Block.of([1, size] if size and size != -1 else scheme.get("block_structure"))


_OTHERS = (
    ".weight", ".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_g_idx", ".bias",
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point",
)  # fmt: skip
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
ENTRIES = {
    "config_groups": {
        "*": {
            **named("targets"),
            "format": one_of(*FORMATS),
            "weights": named(
                *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
                *("zp_dtype", "is_mx"),
            ),
        }
    },
    "format": one_of(*FORMATS),
    "sparsity_config": {
        "format": one_of("dense"),
        **named("global_sparsity", "sparsity_structure", "registry_requires_subclass", "targets"),
    },
    "transform_config": transforms.problem,
    **named("quantization_status", "version"),
}
FORMAT = Format((".weight_packed", ".weight_scale"), _OTHERS, read, ENTRIES)
