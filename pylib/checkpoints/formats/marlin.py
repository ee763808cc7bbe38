"""The layout of the first Marlin kernels, in which AutoGPTQ and AutoAWQ have saved symmetric weights of 4 bits.

    weight   int32 [k / 16, 2 n]   tiles of 16 x 16, side by side; 64 columns of n of a row of tiles are 1024 codes in
                                   the order in which the lanes of a warp take them
    scales   [groups, n]           64 at a time, or 32 where rows have one scale, in the order of the lanes

w[n, k] = scale * (code - 8).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.blocks import spread
from lowbit.pylib.checkpoints.imported import Imported, signed
from lowbit.pylib.checkpoints.module_tensors import FLOATS, ModuleTensors
from lowbit.pylib.checkpoints.unpack import from_stream

BITS, TILE, COLUMNS = 4, 16, 64
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def read(module: ModuleTensors, weight: str, scales: str) -> Imported:
    """Returns the weight of a module, in which weight and scales have these names."""
    packed, given = module.take(weight, torch.int32, 2), module.take(scales, FLOATS, 2)
    k, n = len(packed) * TILE, packed.shape[1] // 2
    group = module.number("group_size")
    group = k if group == -1 else group
    if n % COLUMNS or group < 1 or given.shape != (-(-k // group), n):
        shapes = f"{weight} {list(packed.shape)} and {scales} {list(given.shape)}"
        raise CheckpointError(f"{shapes} don't fit Marlin's layout in groups of {group}")
    order = _scale_order(group < k)
    rows = given.reshape(-1, len(order))[:, _inverse(order)].view(len(given), n)
    codes = signed(_codes(packed, n, k), BITS)
    return Imported(codes, spread(rows.t(), group, k), weight=f"i{BITS}", bias=module.bias())


def _codes(packed: Tensor, n: int, k: int) -> Tensor:
    """Returns the codes [n, k], uint8."""
    order = _inverse(_order())
    tiles = from_stream(packed, BITS, n * TILE).reshape(-1, len(order))[:, order]
    return tiles.view(k // TILE, n // TILE, TILE, TILE).permute(1, 3, 0, 2).reshape(n, k)


def _order() -> list[int]:
    """Returns which of the 1024 codes of 16 x 64 in tiles comes first, second and so on."""
    found: list[int] = []
    for lane in range(32):
        column, row = lane // 4, 2 * (lane % 4)
        rows = (row, row + 1, row + 8, row + 9)
        of_tile = [TILE * r + column + 8 * half for half in range(2) for r in rows]
        found += [code + TILE * TILE * tile for tile in range(4) for code in of_tile]
    return [found[start + i] for start in range(0, len(found), 8) for i in NIBBLES]


def _scale_order(of_groups: bool) -> list[int]:
    """Returns which of 64 scales, or of 32 of whole rows, comes first, second and so on."""
    if of_groups:
        return [i + 8 * j for i in range(8) for j in range(8)]
    return [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
