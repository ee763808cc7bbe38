"""AutoRound's own checkpoints, with layers packed as those of GPTQ or AWQ (auto_round/export/export_to_autoround/).

    packing_format   "auto_round:auto_gptq"   GPTQ's tensors; qzeros hold zero - 1
                     "auto_round"             the same; qzeros hold the zeros, with g_idx if ":gptqmodel" follows
                     "auto_round:auto_awq"    AWQ's tensors
    extra_config     other bits, group_size and sym for some layers, by their names or by patterns of them

Older files call the packing "backend", and may add the name of a kernel: "auto_round:exllamav2".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats import awq, gptq
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors

OWN = "auto_round"
PACKING = re.compile(r"(auto_round|auto_gptq|auto_awq|gptq|gptqmodel|awq|exllama|exllamav2|triton|marlin|:)+")


def read(module: ModuleTensors) -> Imported:
    packing = module.config.get("packing_format") or module.config.get("backend") or OWN
    if not isinstance(packing, str) or not PACKING.fullmatch(packing):
        said = f"the quantization_config has packing_format={packing!r}"
        raise CheckpointError(f"{said}; those of integers packed as by GPTQ or AWQ can be read")
    config = _of_layer(module.config, module.name)
    if "awq" in packing:
        return awq.read(ModuleTensors({**config, "version": "gemm"}, module.tensors, module.shape, module.name))
    version = "gptq" if "gptq" in packing and "gptqmodel" not in packing else "gptq_v2"
    return gptq.read(ModuleTensors({**config, "checkpoint_format": version}, module.tensors, module.shape, module.name))


def _of_layer(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the entries for a layer: those of the model, but for what extra_config has for the layer."""
    own = {key: config.get(key) for key in ("bits", "group_size", "sym")}
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


_OF_A_LAYER = {**named("bits", "group_size", "sym"), "data_type": one_of("int")}
ENTRIES = {**_OF_A_LAYER, **named("packing_format"), "extra_config": {"*": _OF_A_LAYER}}
FORMAT = Format(gptq.FORMAT.markers, gptq.FORMAT.others, read, ENTRIES)
