"""AWQ, as AutoAWQ's GEMM layers write it (awq/modules/linear/gemm.py, awq/utils/packing_utils.py).

    qweight   int32 [k, n / 8]         eight codes of a column, those of the rows 8i + 0, 2, 4, 6, 1, 3, 5, 7
    qzeros    int32 [groups, n / 8]    the zeros, likewise
    scales    f16 or bf16 [groups, n]

w[n, k] = scale * (code - zero).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import spread
from lowbit.pylib.checkpoints.config_entries import named, one_of
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported, check_middle, integers
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

BITS = 4
NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds the code of row 8i + j, for each j."""


def read(module: ModuleTensors) -> Imported:
    module.choice("bits", (BITS,))
    module.choice("version", ("gemm", "GEMM"), "gemm")
    qweight, scales = module.take("qweight", torch.int32, 2), module.floats("scales", 2)
    (k, words), group = qweight.shape, module.number("group_size")
    n, group = words * 8, k if group == -1 else group
    if group < 1 or scales.shape != (-(-k // group), n):
        raise CheckpointError(f"scales {list(scales.shape)} don't fit {n} x {k} in groups of {group}")
    qzeros = module.take("qzeros", torch.int32, 2)
    check_shape("qzeros", qzeros, (len(scales), words), f"scales {list(scales.shape)}")
    codes, zeros = (_in_order(from_stream(packed, BITS, n)).t() for packed in (qweight, qzeros))
    check_middle(zeros, BITS, module.config.get("zero_point") is False, "zero_point=False")
    return integers(codes, BITS, spread(scales.t(), group, k), spread(zeros, group, k), module.bias())


def _in_order(nibbles: Tensor) -> Tensor:
    """Returns codes [rows, n] in the order of n, from those in the order of the bits."""
    return nibbles.view(len(nibbles), -1, 8)[..., list(NIBBLE)].view(len(nibbles), -1)


ENTRIES = {
    **named("bits", "group_size", "zero_point", "version", "sym", "desc_act", "pack_dtype"),
    "format": one_of("gemm"),
    "checkpoint_format": one_of("gemm"),
}
FORMAT = Format((".qweight",), (".qzeros", ".scales", ".bias"), read, ENTRIES)
