"""AutoRound's own checkpoints, with layers packed as those of GPTQ, AWQ or compressed-tensors
(auto_round/export/export_to_autoround/). Integers, "data_type" is "int":

    packing_format   "auto_round:auto_gptq"   GPTQ's tensors; qzeros hold zero - 1
                     "auto_round"             the same; qzeros hold the zeros, with g_idx if ":gptqmodel" follows
                     "auto_round:auto_awq"    AWQ's tensors

Floats, which their data_type and group_size tell apart:

    mx_fp    bits 4 or 8, groups of 32   tensors of compressed-tensors' mxfp4 and mxfp8
    nv_fp    bits 4, groups of 16        those of its nvfp4
    fp       e4m3 with group_size -1, scales of rows, or 0, one of all: those of its float-quantized
             e4m3 with group_size [rows, columns]: those of "fp8"

extra_config has other entries for some layers, by their names or by patterns of them. Older files call the packing
"backend", and may add the name of a kernel: "auto_round:exllamav2".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats import awq, compressed_tensors, fp8, gptq
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors

OWN = "auto_round"
DATA_TYPES = ("int", "mx_fp", "mx_fp_rceil", "nv_fp", "nv_fp4", "fp", "fp8")
PACKING = re.compile(r"(auto_round|auto_gptq|auto_awq|gptq|gptqmodel|awq|exllama|exllamav2|triton|marlin|:)+")


def read(module: ModuleTensors) -> Imported:
    config = _of_layer(module.config, module.name)
    if config["data_type"] in DATA_TYPES[1:]:
        return _floats(module, config)
    packing = module.config.get("packing_format") or module.config.get("backend") or OWN
    if not isinstance(packing, str) or not PACKING.fullmatch(packing):
        said = f"the quantization_config has packing_format={packing!r}"
        raise CheckpointError(f"{said}; those of integers packed as by GPTQ or AWQ can be read")
    if "awq" in packing:
        return awq.read(_described(module, {**config, "version": "gemm"}))
    version = "gptq" if "gptq" in packing and "gptqmodel" not in packing else "gptq_v2"
    return gptq.read(_described(module, {**config, "checkpoint_format": version}))


def _floats(module: ModuleTensors, config: Mapping[str, Any]) -> Imported:
    size = config["group_size"]
    if isinstance(size, list):
        return fp8.read(_described(module, {"weight_block_size": size}))
    weights = {"type": "float", "num_bits": config["bits"], "group_size": size or None}
    form = "float-quantized" if config["bits"] == 8 else "pack-quantized"
    return compressed_tensors.read(_described(module, {"format": form, "config_groups": {"": {"weights": weights}}}))


def _described(module: ModuleTensors, config: Mapping[str, Any]) -> ModuleTensors:
    """Returns a module as another format describes it."""
    return ModuleTensors(config, module.tensors, module.shape, module.name)


def _of_layer(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the entries for a layer: those of the model, but for what extra_config has for the layer."""
    own = {key: config.get(key) for key in ("bits", "group_size", "sym", "data_type")}
    extra = config.get("extra_config")
    for pattern, entries in cast(Mapping[str, Any], extra).items() if isinstance(extra, Mapping) else ():
        if isinstance(entries, Mapping) and _matches(pattern, name):
            return own | {key: value for key, value in cast(Mapping[str, Any], entries).items() if key in own}
    return own


def _matches(pattern: str, name: str) -> bool:
    try:
        return pattern == name or re.search(pattern, name) is not None
    except re.error:
        return False


_OF_A_LAYER = {
    **named("bits", "group_size", "sym", "weight_block_size"),
    "data_type": one_of(*DATA_TYPES),
    "fmt": one_of("e4m3"),
}
ENTRIES = {**_OF_A_LAYER, **named("packing_format"), "extra_config": {"*": _OF_A_LAYER}}
_MARKERS = (*gptq.FORMAT.markers, ".weight_packed", ".weight_scale", ".weight_scale_inv")
_OTHERS = (".weight", ".weight_global_scale", ".input_global_scale", ".input_scale")
FORMAT = Format(_MARKERS, (*gptq.FORMAT.others, *_OTHERS), read, ENTRIES)
