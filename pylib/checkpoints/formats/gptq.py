"""GPTQ, as AutoGPTQ and GPTQModel write it (gptqmodel/nn_modules/qlinear/__init__.py, dequantize_weight).

    qweight   int32 [k * bits / 32, n]        each column is a stream of k codes
    qzeros    int32 [groups, n * bits / 32]   each row is a stream of n zeros
    scales    f16 or bf16 [groups, n]
    g_idx     int32 [k]                       the group of each column of the weight

w[n, k] = scales[g_idx[k], n] * (code - zero). Checkpoints of format "gptq" hold zero - 1 in `bits` bits, those of
format "gptq_v2" the zero itself. With act-order ("desc_act") the columns of a group lie apart. They are put side by
side, and kernels are told the permutation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import order_of, spread
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported, integers
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_columns, from_stream

BITS = (2, 3, 4, 8)


def read(module: ModuleTensors) -> Imported:
    version = module.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    qweight, scales = module.take("qweight", torch.int32, 2), module.floats("scales", 2)
    n = qweight.shape[1]
    bits, k = _bits_and_k(module, qweight)
    group = _group(module, k, len(scales))
    if group < 1 or scales.shape != (-(-k // group), n):
        raise CheckpointError(f"scales {list(scales.shape)} don't fit {n} x {k} in groups of {group}")
    order = order_of(module.take("g_idx", torch.int32, 1), group) if "g_idx" in module else None
    codes = from_columns(qweight, bits, k).t()
    zeros = _zeros(module, bits, scales, version == "gptq")
    weight = integers(codes, bits, spread(scales.t(), group, k), spread(zeros.t(), group, k), module.bias())
    return weight.in_order(order)


def _bits_and_k(module: ModuleTensors, qweight: Tensor) -> tuple[int, int]:
    """Returns the bits of a code and the columns of the weight: the configuration's, unless it has exceptions."""
    words = len(qweight)
    if "g_idx" in module:
        k = len(module.take("g_idx", torch.int32, 1))
        bits, rest = divmod(words * 32, k)
    else:
        bits = module.number("bits")
        k, rest = divmod(words * 32, max(1, bits))
    if rest or bits not in BITS or (bits != module.number("bits") and not module.config.get("dynamic")):
        said = module.config.get("bits")
        raise CheckpointError(f"{words} rows of qweight are not k={k} codes of {said} bits; 2, 3, 4 and 8 can be read")
    return bits, k


def _group(module: ModuleTensors, k: int, groups: int) -> int:
    """Returns the columns of a group: as the configuration has them, unless it has exceptions."""
    group = module.number("group_size")
    if module.config.get("dynamic") and k % groups == 0:
        return k // groups
    return k if group == -1 else min(group, k)


def _zeros(module: ModuleTensors, bits: int, scales: Tensor, less_one: bool) -> Tensor:
    """Returns the zeros [groups, n]."""
    groups, n = scales.shape
    qzeros = module.take("qzeros", torch.int32, 2)
    check_shape("qzeros", qzeros, (groups, -(-n * bits // 32)), f"scales {list(scales.shape)}")
    zeros = from_stream(qzeros, bits, n)
    return zeros + 1 & ((1 << bits) - 1) if less_one else zeros


FORMAT = Format((".qweight",), (".qzeros", ".scales", ".g_idx", ".bias"), read)
