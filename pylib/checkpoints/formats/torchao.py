"""torchao's tensors in safetensors (torchao/prototype/safetensors/, torchao/quantization/quantize_/workflows/).

Int4Tensor                 _weight_qdata int8 or uint8 [n, k / 2]   two's complement, the first code in the low nibble
                           _weight_scale [k / g, n], _weight_zero_point [k / g, n]: w = code * scale + zero_point
IntxUnpackedToInt8Tensor   _weight_qdata int8 [n, k], _weight_scale [n, k / g], _weight_zero_point int8 [n, k / g]:
                           w = (code - zero_point) * scale
                           (codes of 4 bits are kept as 4 bits)
Int8Tensor                 the same with a scale for each row, without zero_point or with
Float8Tensor               _weight_qdata e4m3 [n, k], _weight_scale [n, k / g], or one for each block

Which it is can be seen from the tensors: in Int4Tensor the zero point is a float. torchao's metadata in the file names
the tensors of each layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import Block, of_blocks
from lowbit.pylib.checkpoints.config_entries import named
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported, signed
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

KINDS = ("Int4Tensor", "IntxUnpackedToInt8Tensor", "Int8Tensor", "Float8Tensor")
QDATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"


def read(module: ModuleTensors) -> Imported:
    if "_weight_act_pre_scale" in module:
        raise CheckpointError("act_pre_scale multiplies inputs, which can't be imported")
    qdata = module.take(QDATA, (torch.int8, torch.uint8, torch.float8_e4m3fn), 2)
    scale = module.floats(SCALE, 2)
    if ZERO in module and module.tensors[ZERO].dtype in FLOATS:
        return _int4(module, qdata, scale)
    if qdata.dtype == torch.float8_e4m3fn:
        return Imported(
            qdata.contiguous().view(torch.uint8), _of_groups(scale, qdata), weight="f8e4m3", bias=module.bias()
        )
    return _int8(module, qdata, scale)


def _int4(module: ModuleTensors, qdata: Tensor, scale: Tensor) -> Imported:
    n, k = qdata.shape[0], qdata.shape[1] * 2
    zero = module.take(ZERO, scale.dtype, 2)
    check_shape(ZERO, zero, scale.shape, SCALE)
    if scale.shape[1] != n or k % len(scale):
        raise CheckpointError(f"{SCALE} {list(scale.shape)} must be [groups, n={n}], with groups that divide k={k}")
    nibbles = from_stream(qdata.contiguous().view(torch.uint8), 4, k)
    return Imported(signed(nibbles ^ 8, 4), scale.t(), weight="i4", offsets=zero.t(), bias=module.bias())


def _int8(module: ModuleTensors, qdata: Tensor, scale: Tensor) -> Imported:
    codes, scales, zeros = module.take(QDATA, torch.int8, 2), _of_groups(scale, qdata), None
    if scale.shape[1] > 1:
        module.check_has(ZERO, f"{SCALE} has groups along k, as IntxUnpackedToInt8Tensor alone has")
    if ZERO in module:
        given = module.take(ZERO, (torch.int8, torch.int32, torch.int64), 2)
        check_shape(ZERO, given, scale.shape, SCALE)
        zeros = _of_groups(given, qdata) if bool(given.any()) else None
    bits = 4 if all(_fits_4_bits(t) for t in (codes, zeros) if t is not None) else 8
    return Imported(codes, scales, zeros, weight=f"i{bits}", bias=module.bias())


def _fits_4_bits(t: Tensor) -> bool:
    low, high = t.aminmax()
    return int(low) >= -8 and int(high) <= 7


def _of_groups(numbers: Tensor, weight: Tensor) -> Tensor:
    """Returns the numbers [n, groups] of a weight [n, k]."""
    (n, k), (rows, columns) = weight.shape, numbers.shape
    if n % rows or k % columns:
        raise CheckpointError(f"{list(numbers.shape)} scales don't divide a weight of {n} x {k}")
    return of_blocks(numbers, (n, k), [Block(n // rows, k // columns)])


def _listed(metadata: Mapping[str, str], module: str) -> list[str]:
    """Returns the tensors that a layer has by the metadata of the files, where these have an entry for its weight.

    Raises CheckpointError where it is of another kind than can be read.
    """
    found: Any = None
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        found = json.loads(metadata[f"{module}.weight"])
    if not isinstance(found, dict):
        return []
    kind, names = (cast(dict[str, Any], found).get(key) for key in ("_type", "_tensor_data_names"))
    if isinstance(kind, str) and kind not in KINDS:
        raise CheckpointError(f"its weight is a {kind[:40]!r} of torchao; what can be read is {', '.join(KINDS)}")
    return [f"_weight_{name}" for name in names] if isinstance(names, list) else []


_OTHERS = (f".{SCALE}", f".{ZERO}", "._weight_act_pre_scale", "._weight_scale_and_zero", ".bias")
_OTHERS += ("._weight_act_quant_scale", "._weight_act_quant_zero_point")  # inputs stay in f16 or bf16
ENTRIES = named(  # tensors say it all
    *("quant_type", "quant_type_kwargs", "include_input_output_embeddings", "untie_embedding_weights")
)
FORMAT = Format((f".{QDATA}",), _OTHERS, read, ENTRIES, _listed)
