"""GPTQ, as AutoGPTQ and GPTQModel write it (gptqmodel/nn_modules/qlinear/__init__.py, dequantize_weight).

    qweight   int32 [k * bits / 32, n]        each column is a stream of k codes; words are of "pack_dtype"
    qzeros    int32 [groups, n * bits / 32]   each row is a stream of n zeros
    scales    f16 or bf16 [groups, n]
    g_idx     int32 [k]                       the group of each column of the weight

w[n, k] = scales[g_idx[k], n] * (code - zero). Checkpoints of format "gptq" hold zero - 1 in `bits` bits, those of
format "gptq_v2" the zero itself. With act-order ("desc_act") the columns of a group lie apart. They are put side by
side, and kernels are told the permutation. Without act-order g_idx may be left out. With "sym" all zeros are the middle
code, which shows if a file is labelled with the other version. "dynamic" has other values for some modules. Format
"marlin" has B and s instead, of symmetric weights of 4 bits: see marlin.py. Format "ipex" is "gptq".
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import order_of, spread
from lowbit.pylib.checkpoints.config_entries import named
from lowbit.pylib.checkpoints.formats import marlin
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported, check_middle, integers
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_columns, from_stream

BITS = (2, 3, 4, 8)
WORDS = (torch.int32, torch.int8, torch.int16, torch.int64)


def read(module: ModuleTensors) -> Imported:
    version = module.one_choice(("checkpoint_format", "format"), ("gptq", "gptq_v2", "ipex", "marlin"), "gptq")
    if version == "marlin" or module.config.get("is_marlin_format"):
        return marlin.read(module, "B", "s")
    qweight, scales = module.take("qweight", WORDS, 2), module.floats("scales", 2)
    n = qweight.shape[1]
    bits, k = _bits_and_k(module, qweight)
    group = _group(module, k, len(scales))
    if group < 1 or scales.shape != (-(-k // group), n):
        raise CheckpointError(f"scales {list(scales.shape)} don't fit {n} x {k} in groups of {group}")
    if True in _said(module, "desc_act"):
        module.check_has("g_idx", "the quantization_config has desc_act=True")
    order = order_of(module.take("g_idx", torch.int32, 1), group) if "g_idx" in module else None
    codes = from_columns(qweight, bits, k).t()
    zeros = _zeros(module, bits, scales, version != "gptq_v2")
    check_middle(zeros, bits, _said(module, "sym") == [True], "sym=True", _other_version(zeros, bits, version))
    weight = integers(codes, bits, spread(scales.t(), group, k), spread(zeros.t(), group, k), module.bias())
    return weight.in_order(order)


def _said(module: ModuleTensors, name: str) -> list[Any]:
    """Returns what the configuration has for an entry: its value, and those of the exceptions in "dynamic"."""
    dynamic = module.config.get("dynamic")
    exceptions = [e for e in dynamic.values() if isinstance(e, dict)] if isinstance(dynamic, dict) else []
    return [module.config.get(name), *(cast(dict[str, Any], e)[name] for e in exceptions if name in e)]


def _other_version(zeros: Tensor, bits: int, version: str) -> str:
    """Returns a hint at checkpoint_format where zeros are the middle code of the other version."""
    other, step = ("gptq_v2", 1) if version == "gptq" else ("gptq", -1)
    off = bool((zeros == (1 << (bits - 1)) + step).all())
    hint = f": those of checkpoint_format={other!r}, not of {version!r}; correct config.json if this is so"
    return hint if off else "; sym must be false for these"


def _bits_and_k(module: ModuleTensors, qweight: Tensor) -> tuple[int, int]:
    """Returns the bits of a code and the columns of the weight: the configuration's, unless it has exceptions."""
    words, size = len(qweight), 8 * qweight.itemsize
    if "g_idx" in module:
        k = len(module.take("g_idx", torch.int32, 1))
        bits, rest = divmod(words * size, k)
    else:
        bits = module.number("bits")
        k, rest = divmod(words * size, max(1, bits))
    if rest or bits not in BITS or bits not in _said(module, "bits"):
        said = module.number("bits")
        raise CheckpointError(f"{words} rows of qweight are not k={k} codes of {said} bits; 2, 3, 4 and 8 can be read")
    return bits, k


def _group(module: ModuleTensors, k: int, groups: int) -> int:
    """Returns the columns of a group: as the configuration has them, or one of its exceptions that fits."""
    first, *others = [module.number("group_size"), *_said(module, "group_size")[1:]]
    sizes = [k if size == -1 else min(size, k) for size in (first, *others) if isinstance(size, int)]
    return next((size for size in sizes if size > 0 and -(-k // size) == groups), sizes[0])


def _zeros(module: ModuleTensors, bits: int, scales: Tensor, less_one: bool) -> Tensor:
    """Returns the zeros [groups, n]."""
    groups, n = scales.shape
    qzeros = module.take("qzeros", WORDS, 2)
    check_shape("qzeros", qzeros, (groups, -(-n * bits // (8 * qzeros.itemsize))), f"scales {list(scales.shape)}")
    zeros = from_stream(qzeros, bits, n)
    return zeros + 1 & ((1 << bits) - 1) if less_one else zeros


_OF_A_LAYER = named("bits", "group_size", "sym", "desc_act", "pack_dtype")
_OF_ALL = named("checkpoint_format", "format", "is_marlin_format")
ENTRIES = {**_OF_A_LAYER, **_OF_ALL, "dynamic": {"*": _OF_A_LAYER}}
_OTHERS = (".qzeros", ".scales", ".g_idx", ".bias", ".s", ".workspace")
FORMAT = Format((".qweight", ".B"), _OTHERS, read, ENTRIES)
