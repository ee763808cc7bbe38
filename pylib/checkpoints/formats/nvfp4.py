"""NVFP4: e2m1 codes whose e4m3 scales have a scale of their own, for the whole weight.

As compressed-tensors writes it (compressors/nvfp4/base.py, quantization/lifecycle/forward.py):

    weight_packed         uint8 [n, k / 2]   each row a stream of codes
    weight_scale          e4m3 [n, k / 16]
    weight_global_scale   f32 [1]            divides all scales

As ModelOpt and Quark write it:

    weight                uint8 [n, k / 2]   likewise
    weight_scale          e4m3 [n, k / size] with sizes of 16 or 32
    weight_scale_2        a number           multiplies all scales

w = code * scale in f32, rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.formats.dtypes import dtype
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors, check_shape
from lowbit.pylib.checkpoints.unpack import from_stream

WEIGHT, GROUP = "f4e2m1", 16
SIZES = (GROUP, 32)
NEIGHBORS = (0, 1, -1, 2, -2)
"""Which floats around 1 / divisor are tried, by their distance in units of the last place."""


def read(module: ModuleTensors, packed: Tensor) -> Imported:
    n, k = packed.shape[0], packed.shape[1] * 2
    scales = module.take("weight_scale", torch.float8_e4m3fn, 2)
    check_shape("weight_scale", scales, (n, -(-k // GROUP)), f"weight_packed {list(packed.shape)}")
    divisor = module.take("weight_global_scale", torch.float32, 1)
    check_positive("weight_global_scale", divisor)
    return weight(from_stream(packed, 4, k), scales, lambda scales: scales / divisor, 1 / divisor, module.bias())


def read_multiplied(module: ModuleTensors, packed: Tensor, size: object) -> Imported:
    """Returns a weight as ModelOpt and Quark write it.

    size   the columns of a group that the configuration says, one of `SIZES`; None if it says nothing
    """
    n, k = packed.shape[0], packed.shape[1] * 2
    scales = module.take("weight_scale", torch.float8_e4m3fn, 2)
    sizes = [each for each in SIZES if scales.shape[1] == -(-k // each)] or [GROUP]
    check_shape("weight_scale", scales, (n, -(-k // sizes[0])), f"weight {list(packed.shape)}")
    if size is not None and size not in sizes:
        raise CheckpointError(f"scales have groups of {sizes[0]}, but group_size={size!r} in the quantization_config")
    given = module.tensors.get("weight_scale_2")
    factor = module.take("weight_scale_2", FLOATS, 0 if given is None else given.ndim).float().view(-1)
    check_positive("weight_scale_2", factor)
    return weight(from_stream(packed, 4, k), scales, lambda s: s * factor, factor, module.bias())


def check_positive(name: str, factor: Tensor) -> None:
    """Raise CheckpointError unless the scale of a whole weight is one positive number."""
    if len(factor) != 1 or not bool(factor.isfinite() & (factor > 0)):
        raise CheckpointError(f"{name}={factor.tolist()[:3]} must be one positive number")


def weight(
    codes: Tensor, scales: Tensor, whole: Callable[[Tensor], Tensor], guess: Tensor, bias: Tensor | None
) -> Imported:
    """Returns a weight whose scales e4m3 are multiplied by a number for the whole of it.

    whole   returns scales after that, as the library computes them from f32
    guess   f32 [1], the number
    """
    factor = factor_of(scales, whole, guess)
    if factor is None:
        return Imported(codes, whole(scales.float()), weight=WEIGHT, bias=bias)
    return Imported(codes, scales, weight=WEIGHT, row_scales=factor, bias=bias)


def factor_of(scales: Tensor, whole: Callable[[Tensor], Tensor], guess: Tensor) -> Tensor | None:
    """Returns the factor f32 [1] with which all weights are in bf16 what the library computes; None if there is none.

    The library rounds each scale, lowbit each weight, so that one of many may round to another bf16. There are at most
    256 scales and eight magnitudes of codes, and so it can be seen whether one does; a neighbor of the factor then
    mostly serves.
    """
    levels = scales.float().unique()
    values = torch.tensor(dtype(WEIGHT).values()[:8], dtype=torch.float32, device=levels.device)[:, None]
    expected = (values * whole(levels)).bfloat16()
    bits = guess.view(torch.int32)
    for distance in NEIGHBORS:
        factor = (bits + distance).view(torch.float32)
        if torch.equal((values * (levels * factor)).bfloat16(), expected):
            return factor
    return None
