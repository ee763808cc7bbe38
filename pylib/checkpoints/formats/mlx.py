"""MLX's affine weights, as mlx-lm writes them (mlx/backend/cpu/quantized.cpp).

    weight   uint32 [n, k * bits / 32]   each row is a stream of k codes
    scales   f16, bf16 or f32 [n, k / group_size]
    biases   of the same type and shape

w = scale * code + bias. "quantization" of config.json has bits and group_size, and others for some layers by name.
transformers' "metal" is the same, with `qbiases` (transformers/integrations/metal_quantization.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

BITS = (2, 3, 4, 5, 6, 8)


def read(module: ModuleTensors) -> Imported:
    packed, scales = module.take("weight", torch.uint32, 2), module.floats("scales", 2)
    name = "qbiases" if module.config.get("quant_method") == "metal" else "biases"
    offsets = module.take(name, scales.dtype, 2)
    check_shape(name, offsets, scales.shape, "scales")
    entries = _of_layer(module)
    bits, group = entries.get("bits"), entries.get("group_size")
    groups = scales.shape[1]
    if bits not in BITS or not isinstance(group, int) or group < 1:
        raise CheckpointError(f"the quantization_config has bits={bits!r} and group_size={group!r} for this layer")
    k = groups * group
    check_shape("weight", packed, (len(scales), -(-k * bits // 32)), f"{groups} groups of {group} codes of {bits} bits")
    return Imported(from_stream(packed, bits, k), scales, weight=f"u{bits}", offsets=offsets, bias=module.bias())


def _of_layer(module: ModuleTensors) -> Mapping[str, Any]:
    """Returns the entries for a layer: those of the model, but for what it has for the layer."""
    own = module.config.get(module.name)
    return {**module.config, **(cast(Mapping[str, Any], own) if isinstance(own, Mapping) else {})}


_OF_A_LAYER = {**named("bits", "group_size"), "mode": one_of("affine")}
ENTRIES = {**_OF_A_LAYER, "*": _OF_A_LAYER}
FORMAT = Format((".scales",), (".weight", ".biases", ".bias"), read, ENTRIES)
METAL = Format((".scales",), (".weight", ".qbiases", ".bias"), read, named("bits", "group_size"))
