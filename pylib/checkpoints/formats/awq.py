"""AWQ, as AutoAWQ writes it for several kernels (awq/modules/linear/).

    "gemm"        qweight   int32 [k, n / 8]        eight codes of a column: rows 8i + 0, 2, 4, 6, 1, 3, 5, 7
                  qzeros    int32 [groups, n / 8]   the zeros, likewise
                  scales    f16 or bf16 [groups, n]
    "gemv"        qweight   int32 [n, k / 8]        each row is a stream of codes
                  qzeros    int32 [n, w]            each row is a stream of zeros, and padding
                  scales    f16 [n, 8 w]            with padding, too
    "gemv_fast"   qweight   int16 [n / 4, k]        four rows, 64 columns of each in turn
                  qzeros    f16 [8 w, n]            -zero * scale: offsets
                  scales    f16 [8 w, n]
    "marlin"      qweight, scales                   see marlin.py

w[n, k] = scale * (code - zero). Files for the kernels "exllama", "exllamav2" and "ipex" are those for "gemm".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import spread
from lowbit.pylib.checkpoints.config_entries import named
from lowbit.pylib.checkpoints.formats import marlin
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported, check_middle, integers
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

BITS = 4
VERSION = ("version", "checkpoint_format", "format")
"""Names of the entry that says which layout it is: AutoAWQ's, and GPTQModel's."""
NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds the code of row 8i + j, for each j."""


def read(module: ModuleTensors) -> Imported:
    module.choice("bits", (BITS,))
    return READERS[module.one_choice(VERSION, tuple(READERS), "gemm")](module)


def _gemm(module: ModuleTensors) -> Imported:
    qweight, scales = module.take("qweight", torch.int32, 2), module.floats("scales", 2)
    k, words = qweight.shape
    n, group = words * 8, _group(module, k)
    if scales.shape != (-(-k // group), n):
        raise CheckpointError(f"scales {list(scales.shape)} don't fit {n} x {k} in groups of {group}")
    qzeros = module.take("qzeros", torch.int32, 2)
    check_shape("qzeros", qzeros, (len(scales), words), f"scales {list(scales.shape)}")
    codes, zeros = (in_order(from_stream(packed, BITS, n)).t() for packed in (qweight, qzeros))
    return _affine(module, codes, scales.t(), zeros)


def _gemv(module: ModuleTensors) -> Imported:
    qweight, scales = module.take("qweight", torch.int32, 2), module.take("scales", FLOATS, 2)
    n, k = len(qweight), qweight.shape[1] * 8
    groups = _check_padded("scales", scales, n, _group(module, k), k)
    qzeros = module.take("qzeros", torch.int32, 2)
    check_shape("qzeros", qzeros, (n, scales.shape[1] // 8), f"scales {list(scales.shape)}")
    return _affine(module, from_stream(qweight, BITS, k), scales[:, :groups], from_stream(qzeros, BITS, groups))


def _gemv_fast(module: ModuleTensors) -> Imported:
    qweight = module.take("qweight", torch.int16, 2)
    scales, offsets = module.take("scales", FLOATS, 2), module.take("qzeros", FLOATS, 2)
    n, k = len(qweight) * 4, qweight.shape[1]
    if k % 64:
        raise CheckpointError(f"qweight has {k} columns; they must be whole runs of 64")
    group = _group(module, k)
    groups = _check_padded("scales", scales.t(), n, group, k)
    check_shape("qzeros", offsets, scales.shape, "scales")
    each, shift = (spread(t[:groups].t(), group, k) for t in (scales, offsets))
    return Imported(_interleaved(qweight, n, k), each, weight=f"u{BITS}", offsets=shift, bias=module.bias())


def _interleaved(packed: Tensor, n: int, k: int) -> Tensor:
    """Returns the codes [n, k] of words in which four rows take turns every 64 columns. Of 32 columns, pairs lie eight
    columns apart, and then the even ones of eight before the odd ones."""
    rows = from_stream(packed, BITS, 4 * k).reshape(n // 4, k // 64, 4, 2, 4, 2, 4)  # .., halves, eights, parity, pairs
    return rows.permute(0, 2, 1, 3, 6, 4, 5).reshape(n, k)


def _affine(module: ModuleTensors, codes: Tensor, scales: Tensor, zeros: Tensor) -> Imported:
    """Returns the weight of codes [n, k], and scales and zeros [n, groups]."""
    check_middle(zeros, BITS, module.config.get("zero_point") is False, "zero_point=False")
    k = codes.shape[1]
    group = _group(module, k)
    return integers(codes, BITS, spread(scales, group, k), spread(zeros, group, k), module.bias())


def _group(module: ModuleTensors, k: int) -> int:
    """Returns the columns of a group."""
    group = module.number("group_size")
    if group < 1 and group != -1:
        raise CheckpointError(f"the quantization_config has group_size={group}; it must be positive, or -1 for rows")
    return k if group == -1 else group


def _check_padded(name: str, t: Tensor, n: int, group: int, k: int) -> int:
    """Returns how many of the columns of a tensor are groups; the others, zeros, fill up words, or several of these.

    Raises CheckpointError for a tensor of another shape, and one that has more groups.
    """
    groups, step = -(-k // group), 8 * max(1, 128 // group)
    if t.shape != (n, -(-groups // step) * step) or bool(t[:, groups:].any()):
        raise CheckpointError(f"{name} {list(t.shape)} don't fit {n} x {k} in groups of {group}")
    return groups


def in_order(nibbles: Tensor) -> Tensor:
    """Returns codes [rows, n] in the order of n, from those in the order of the bits."""
    return nibbles.view(len(nibbles), -1, 8)[..., list(NIBBLE)].view(len(nibbles), -1)


READERS: Mapping[str, Callable[[ModuleTensors], Imported]] = {
    **dict.fromkeys(("gemm", "exllama", "exllamav2", "ipex"), _gemm),
    "gemv": _gemv,
    "gemv_fast": _gemv_fast,
    "marlin": lambda module: marlin.read(module, "qweight", "scales"),
}
"""By "version" of the configuration."""
ENTRIES = named("bits", "group_size", "zero_point", "sym", "desc_act", "pack_dtype", *VERSION)
FORMAT = Format((".qweight",), (".qzeros", ".scales", ".bias", ".workspace"), read, ENTRIES)
