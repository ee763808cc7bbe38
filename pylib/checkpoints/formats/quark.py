"""AMD Quark, as it exports safetensors (quark/torch/utils/pack.py, export/nn/modules/realquantizer.py).

    int4, uint4   per_group            weight int32 [k, n / 8], weight_scale [groups, n], weight_zero_point int32
                                       [groups, n / 8]: eight numbers of a column of n in a word
                  per_channel          weight int32 [n, k / 8], weight_scale [n], weight_zero_point int32 [n / 8]
    int8, uint8   per_group            weight [k, n], weight_scale and weight_zero_point [groups, n]
                  per_channel          weight [n, k], weight_scale and weight_zero_point [n]; or [] of "per_tensor"
    fp8_e4m3                           weight [n, k], weight_scale [] or [n]; per_group [n, groups]; per_block one for
                                       each block of "block_size"; bytes where they are e8m0
    fp4, fp6      per_group with e8m0  weight uint8, each row a stream of codes; weight_scale uint8 [n, k / 32]
    fp4           in two stages        the same with scales as in nvfp4.py

Of a word's eight numbers, 0, 2, 4, 6, 1, 3, 5, 7 follow one another from the lowest bits on if "pack_method" is
"reorder". w = scale * (code - zero). "layer_quant_config" has other values for modules, by patterns of their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import Block, of_blocks, spread
from lowbit.pylib.checkpoints.config_entries import anything, named, one_of
from lowbit.pylib.checkpoints.formats import nvfp4
from lowbit.pylib.checkpoints.formats.awq import in_order
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.formats.gpt_oss import MX, powers_of_two, scales_of_columns
from lowbit.pylib.checkpoints.imported import Imported, integers
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

SMALL_FLOATS = {"fp4": "f4e2m1", "fp6_e2m3": "f6e2m3", "fp6_e3m2": "f6e3m2"}
INTEGERS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
SIGNED = ("int4", "int8")
DTYPES = (*INTEGERS, "fp8_e4m3", *SMALL_FLOATS)


def read(module: ModuleTensors) -> Imported:
    scheme = _scheme(module)
    dtype = scheme.get("dtype")
    if dtype not in DTYPES:
        raise CheckpointError(f"weights of dtype={dtype!r} can't be read; those of {', '.join(DTYPES)} can")
    if dtype in SMALL_FLOATS:
        return _small_floats(module, SMALL_FLOATS[dtype], scheme)
    return _float8(module, scheme) if dtype == "fp8_e4m3" else _integers(module, dtype, scheme)


def _scheme(module: ModuleTensors) -> Mapping[str, Any]:
    """Returns the entries for the weight of a module: those by its name, else those of all."""
    by_name = module.config.get("layer_quant_config")
    names = cast(Mapping[str, Any], by_name) if isinstance(by_name, Mapping) else {}
    found = next((entry for pattern, entry in names.items() if fnmatchcase(module.name, pattern)), None)
    entry = found or module.config.get("global_quant_config")
    weight = cast(Mapping[str, Any], entry).get("weight") if isinstance(entry, Mapping) else None
    if isinstance(weight, list):
        return _of_stages(cast(list[Any], weight))
    if not isinstance(weight, Mapping):
        raise CheckpointError("the quantization_config says nothing of the weight of this layer")
    return cast(Mapping[str, Any], weight)


def _of_stages(stages: list[Any]) -> Mapping[str, Any]:
    """Returns the first of two stages, if the second one quantizes its scales, as in NVFP4."""
    match stages:
        case [{"dtype": "fp4"} as codes, {"dtype": "fp8_e4m3", "is_scale_quant": True}]:
            return {**cast(Mapping[str, Any], codes), "scale_format": "e4m3"}
        case _:
            raise CheckpointError(
                "weights quantized in two stages, of which the configuration has a list, can't be read but for NVFP4: "
                "fp4 whose scales are fp8_e4m3"
            )


# -- integers


def _integers(module: ModuleTensors, dtype: str, scheme: Mapping[str, Any]) -> Imported:
    bits, by_group = INTEGERS[dtype], scheme.get("qscheme") == "per_group"
    codes = _unpacked(module, "weight", dtype, 2)
    given = module.tensors.get("weight_scale")
    scales = module.take("weight_scale", FLOATS, 0 if given is None else given.ndim)
    zeros = _zeros(module, dtype, scales)
    if by_group:
        codes, scales, zeros = codes.t(), scales.t(), zeros.t()
    n, k = codes.shape
    scales, zeros = (_rows(t, n) for t in (scales, zeros))
    size = scheme.get("group_size") if by_group else k
    if not isinstance(size, int) or size < 1 or scales.shape != (n, -(-k // size)):
        raise CheckpointError(f"weight_scale {list(scales.shape)} doesn't fit {n} x {k} in groups of {size!r}")
    return integers(codes, bits, spread(scales, size, k), spread(zeros, size, k), module.bias())


def _zeros(module: ModuleTensors, dtype: str, scales: Tensor) -> Tensor:
    """Returns the zeros in the shape of the scales."""
    zeros = _unpacked(module, "weight_zero_point", dtype, scales.ndim)
    check_shape("weight_zero_point", zeros, scales.shape, "weight_scale")
    return zeros


def _unpacked(module: ModuleTensors, name: str, dtype: str, ndim: int) -> Tensor:
    """Returns codes or zeros, uint8: signed ones with half of their range added."""
    half = 1 << (INTEGERS[dtype] - 1) if dtype in SIGNED else 0
    if INTEGERS[dtype] == 8:
        return module.take(name, (torch.int8, torch.uint8), ndim).contiguous().view(torch.uint8) ^ half
    words = module.take(name, torch.int32, ndim)
    if not ndim:
        return (words & 15).to(torch.uint8) ^ half
    rows = words.view(-1, words.shape[-1])
    nibbles = from_stream(rows, 4, rows.shape[1] * 8)
    ordered = in_order(nibbles) if _is_reordered(module) else nibbles
    return ordered.view(*words.shape[:-1], -1) ^ half


def _is_reordered(module: ModuleTensors) -> bool:
    export = module.config.get("export")
    method = cast(Mapping[str, Any], export).get("pack_method") if isinstance(export, Mapping) else None
    return method in (None, "reorder")


def _rows(t: Tensor, n: int) -> Tensor:
    """Returns numbers [n, groups], of those of groups, of rows, or of all."""
    return t if t.ndim == 2 else t.reshape(-1, 1).expand(n, 1) if t.numel() == 1 else t.reshape(-1, 1)


# -- floats


def _float8(module: ModuleTensors, scheme: Mapping[str, Any]) -> Imported:
    weight = module.take("weight", torch.float8_e4m3fn, 2)
    given = module.tensors.get("weight_scale")
    kinds = EXPONENTS if _has_exponents(scheme) else FLOATS
    stored = module.take("weight_scale", kinds, 0 if given is None else given.ndim)
    scales = of_blocks(stored.view(torch.uint8) if kinds is EXPONENTS else stored, weight.shape, [_block(scheme)])
    scales = powers_of_two(scales) if kinds is EXPONENTS else scales
    return Imported(weight.contiguous().view(torch.uint8), scales, weight="f8e4m3", bias=module.bias())


EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def _has_exponents(scheme: Mapping[str, Any]) -> bool:
    return "e8m0" in str(scheme.get("scale_format")) or "e8m0" in str(scheme.get("scale_type"))


def _block(scheme: Mapping[str, Any]) -> Block | None:
    """Returns the block of a weight that shares a scale; None for rows, and for all of it."""
    match scheme.get("qscheme"):
        case "per_group":
            return Block.of([1, scheme.get("group_size")])
        case "per_block":
            return Block.of(scheme.get("block_size"))
        case _:
            return None


def _small_floats(module: ModuleTensors, weight: str, scheme: Mapping[str, Any]) -> Imported:
    if scheme.get("scale_format") == "e4m3" and weight == nvfp4.WEIGHT:
        return nvfp4.read_multiplied(module, module.take("weight", torch.uint8, 2), scheme.get("group_size"))
    if (said := (scheme.get("scale_format"), scheme.get("group_size"))) != ("e8m0", MX):
        raise CheckpointError(f"scale_format={said[0]!r} and group_size={said[1]!r} must be 'e8m0' and {MX}")
    packed, bits = module.take("weight", torch.uint8, 2), int(weight[1])
    k = packed.shape[1] * 8 // bits
    scales = scales_of_columns(module, len(packed), k)
    return Imported(from_stream(packed, bits, k), scales, weight=weight, bias=module.bias())


# -- the configuration


def _algorithms(value: object) -> str:
    """Returns what is wrong with the algorithms that made a checkpoint: rotations that are left to be done."""
    entries = cast(list[Any], value) if isinstance(value, list) else [value]
    if all(isinstance(entry, Mapping) and _is_merged(cast(Mapping[str, Any], entry)) for entry in entries):
        return ""
    return "rotations of what goes into layers are not implemented; use a checkpoint without"


def _is_merged(algorithm: Mapping[str, Any]) -> bool:
    """Tells whether an algorithm leaves nothing to be done at a call: rotations R1 and R2 are merged into weights."""
    name = algorithm.get("name")
    return name in MERGED or (name == "rotation" and not any(algorithm.get(part) is not False for part in AT_EACH_CALL))


MERGED = ("awq", "gptq", "gptaq", "qronos", "smooth", "autosmoothquant", "auto_round", "autoround")
AT_EACH_CALL = ("r3", "r4", "online_r1_rotation")
_OF_A_LAYER = {"weight": anything, **named("input_tensors", "output_tensors", "target_device")}
ENTRIES = {
    "algo_config": _algorithms,
    "export": {
        **named("kv_cache_group", "min_kv_scale", "weight_merge_groups"),
        "pack_method": one_of("reorder", "order"),
        "weight_format": one_of("real_quantized"),
    },
    "global_quant_config": _OF_A_LAYER,
    "layer_quant_config": {"*": _OF_A_LAYER},
    **named("kv_cache_quant_config", "kv_cache_post_rope", "quant_mode", "version", "custom_mode", "min_kv_scale"),
    **named("kv_cache_group", "log_severity_level", "shared_scale_groups", "quant_flow", "keep_prequantized_layers"),
    **named("gpu_resident_blocks", "sync_moe_expert_input_amax"),
}
_OTHERS = (".weight", ".weight_scale_2", ".weight_zero_point", ".bias", ".input_scale", ".input_zero_point")
FORMAT = Format((".weight_scale",), (*_OTHERS, ".output_scale", ".output_zero_point"), read, ENTRIES)
