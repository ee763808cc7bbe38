"""Gemma in 2, 4 and 8 bits, as Google publishes it for transformers (transformers/integrations/gemma_quant.py).

    weight         int8 [n, k], or uint8 [n, k / codes of a byte], the first code in the low bits
    weight_scale   f32 [n, 1]
    embedding_quantized, embedding_scale   the same of an embedding

w = scale * (code - 2^(bits - 1)), or scale * code for int8. transformers rounds inputs and outputs of a layer to 8
bits, too, by input_activation_scale and output_activation_scale; here they stay in f16 or bf16.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.config_entries import anything, named
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported, signed
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

BITS = (2, 4, 8)


def read(module: ModuleTensors) -> Imported:
    is_embedding = "embedding_scale" in module
    names = ("embedding_quantized", "embedding_scale") if is_embedding else ("weight", "weight_scale")
    packed, scales = module.take(names[0], (torch.int8, torch.uint8), 2), module.take(names[1], torch.float32, 2)
    check_shape(names[1], scales, (len(packed), 1), f"{names[0]} {list(packed.shape)}")
    if packed.dtype is torch.int8:
        return Imported(packed, scales, weight="i8", bias=module.bias())
    bits, k = _bits_and_k(module, packed)
    return Imported(signed(from_stream(packed, bits, k), bits), scales, weight=f"i{bits}", bias=module.bias())


def _bits_and_k(module: ModuleTensors, packed: Tensor) -> tuple[int, int]:
    """Returns the bits of a code and the columns of the weight: of several that the configuration has for some modules
    those that fit the model's columns."""
    others = module.config.get("module_quant_configs")
    exceptions = [e for e in others.values() if isinstance(e, dict)] if isinstance(others, dict) else []
    said = [module.config.get("num_bits", 4), *(cast(dict[str, Any], e).get("num_bits") for e in exceptions)]
    found = [bits for bits in BITS[:2] if bits in said]
    if module.shape is not None:
        found = [bits for bits in found if -(-module.shape[1] * bits // 8) == packed.shape[1]]
    if len(found) != 1:
        size = "" if module.shape is None else f" for {module.shape[1]} columns"
        raise CheckpointError(
            f"{packed.shape[1]} bytes a row{size} can't be read: the quantization_config has codes of "
            f"{' and '.join(sorted(set(map(str, said))))} bits; give the shape of the weight if it has several"
        )
    return found[0], packed.shape[1] * 8 // found[0] if module.shape is None else module.shape[1]


ENTRIES = {**named("num_bits", "quantize_embeddings"), "module_quant_configs": {"*": {"num_bits": anything}}}
_OTHERS = (".weight", ".embedding_quantized", ".bias")
FORMAT = Format((".weight_scale", ".embedding_scale"), _OTHERS, read, ENTRIES)
