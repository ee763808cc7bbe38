"""SpQR, as `SpQRConfig` of transformers has it (spqr_quant/inference.py, inference_kernels/spqr_cuda.cpp).

    dense_weights   int64 [n * k / 16]   tiles of 16 x 16, those of 16 rows side by side, a word for each row of a tile:
                                         3 bits each for the codes of scale, zero and 16 weights, the first lowest; then
                                         a byte of the tile's second level, and 2 bits that are not used
    col_vals        int32                outliers: the column in the lower half of a word, the f16 value in the upper
    row_offsets     int32 [n + 1]        CSR: where each row begins in col_vals
                    int32 [n / 16 + 1]   PTCSR: where each 16 rows begin, whose outliers lie side by side: a row has
                                         every 16th word, and words of 0 where another row has more
    in_perm         int32 [k / 2]        two columns of x in a word, the first in the lower half: those that the columns
                                         of all else meet; empty if they are in order

The second level of a tile is four f16 numbers, S_s, S_z, Z_s and Z_z, whose byte i is in rows 2 i and 2 i + 1.

    s = S_s (code - Z_s), z = S_z (code - Z_z), w = s (code - z) + outlier

All of these codes and numbers are kept bit for bit. The library computes s, z and w in f16, lowbit in f32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.dialect.formats.packing import ROWS
from lowbit.pylib.checkpoints.config_entries import named
from lowbit.pylib.checkpoints.formats.format import Format
from lowbit.pylib.checkpoints.imported import Imported
from lowbit.pylib.checkpoints.module_tensors import ModuleTensors
from lowbit.pylib.weights.outliers import row_offsets

BITS, TILE = 3, ROWS
SECOND_LEVEL = BITS * (2 + TILE)  # the first bit of its byte


def read(module: ModuleTensors) -> Imported:
    for name, known in (("bits", BITS), ("beta1", TILE), ("beta2", TILE)):
        module.choice(name, (known,), known)
    _check_lengths(module)
    words = module.take("dense_weights", torch.int64, 1)
    offsets = module.take("row_offsets", torch.int32, 1)
    order = _order(module.take("in_perm", torch.int32, 1, may_be_empty=True))
    n, k = _shape(module, len(words), offsets, order)
    tiles = words.view(n // TILE, k // TILE, TILE).transpose(1, 2)  # [blocks of rows, rows, tiles]
    level = _second_level(tiles)
    weight = Imported(
        _codes(tiles).view(n, k),
        _field(tiles, 0).reshape(n, -1),
        _field(tiles, 1).reshape(n, -1),
        weight="u3",
        scale_code="u3",
        outliers=_outliers(module, offsets, n),
        second_level=dict(zip(("scale_scales", "zero_scales", "scale_zeros", "zero_zeros"), level.unbind(-1))),
    )
    in_order = order is None or torch.equal(order, torch.arange(k, device=order.device))
    return weight if in_order else replace(weight, permutation=order)


def _order(pairs: Tensor) -> Tensor | None:
    """Returns the column of x that meets each column of the weight."""
    return pairs.view(torch.int16).long() & 0xFFFF if len(pairs) else None


# -- sizes


def _check_lengths(module: ModuleTensors) -> None:
    """Raise CheckpointError unless tensors are as long as "shapes" of the configuration says of this module."""
    shapes = module.config.get("shapes")
    for name, t in module.tensors.items() if isinstance(shapes, Mapping) else ():
        said = cast(Mapping[str, Any], shapes).get(f"{module.name}.{name}.shape", t.numel())
        if said != t.numel():
            has = f"{name} has {t.numel()} numbers"
            raise CheckpointError(f"{has}, but the quantization_config says {said!r}")


def _shape(module: ModuleTensors, words: int, offsets: Tensor, order: Tensor | None) -> tuple[int, int]:
    """Returns n and k: those with which the tensors are CSR or PTCSR, and which the model and in_perm don't exclude."""
    found = [
        (n, k)
        for n, k in _sizes(words, offsets)
        if module.shape in (None, (n, k)) and (order is None or len(order) == k)
    ]
    if len(found) == 1:
        return found[0]
    lengths = f"{words} dense_weights and {len(offsets)} row_offsets"
    if found:
        both = " or ".join(f"{n} x {k}" for n, k in found)
        raise CheckpointError(f"{lengths} may be {both} without in_perm; pass shape=, or load into a model")
    known = "a weight" if module.shape is None else f"a weight {list(module.shape)}"
    columns = "" if order is None else f" with {len(order)} columns in in_perm"
    raise CheckpointError(f"{lengths} don't fit {known}{columns} in tiles of {TILE} x {TILE}, in CSR or PTCSR")


def _sizes(words: int, offsets: Tensor) -> list[tuple[int, int]]:
    """Returns the n and k with which so many words are whole tiles: of CSR, then of PTCSR."""
    rows = len(offsets) - 1
    counts = [rows] if bool((offsets % TILE).any()) else [rows, TILE * rows]
    sizes = [(n, TILE * words // n) for n in counts if n > 0 and n % TILE == 0]
    return [(n, k) for n, k in sizes if k and k % TILE == 0 and n * k == TILE * words]


# -- the dense part


def _field(tiles: Tensor, number: int) -> Tensor:
    """Returns one of the codes of 3 bits of each word."""
    return (tiles >> (BITS * number) & ((1 << BITS) - 1)).to(torch.uint8)


def _codes(tiles: Tensor) -> Tensor:
    """Returns the codes of the weights, 16 for each word."""
    codes = torch.empty(*tiles.shape, TILE, dtype=torch.uint8, device=tiles.device)
    for column in range(TILE):
        codes[..., column] = _field(tiles, 2 + column)
    return codes


def _second_level(tiles: Tensor) -> Tensor:
    """Returns the four numbers of each tile, f16 [blocks of rows, tiles, 4]: both copies of each byte, joined by or."""
    parts = (tiles >> SECOND_LEVEL & 0xFF).to(torch.uint8)
    joined = parts[:, 0::2] | parts[:, 1::2]
    return joined.transpose(1, 2).contiguous().view(torch.float16)


# -- the sparse part


def _outliers(module: ModuleTensors, offsets: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the outliers as row offsets, columns and values; None if there are none."""
    packed = module.take("col_vals", (torch.int32, torch.float32), 1, may_be_empty=True)  # f32 where it is empty
    if packed.is_floating_point() and len(packed):
        raise CheckpointError("col_vals must be int32, not float32")
    halves = packed.int().view(torch.int16).view(-1, 2)
    columns, values = halves[:, 0].long() & 0xFFFF, halves[:, 1].contiguous().view(torch.float16)
    if len(offsets) == n + 1:
        return (offsets, columns, values) if len(packed) or bool(offsets.any()) else None
    rows = _interleaved_rows(offsets, len(packed))
    order = rows.argsort(stable=True)
    order = order[values[order] != 0]
    return (row_offsets(rows[order], n), columns[order], values[order]) if len(order) else None


def _interleaved_rows(offsets: Tensor, count: int) -> Tensor:
    """Returns the row of each word of PTCSR."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != count:
        raise CheckpointError(f"row_offsets must go from 0 to the {count} col_vals, not from {first} to {last}")
    lengths = offsets.diff()
    if bool((lengths < 0).any()):
        block = int((lengths < 0).nonzero()[0])
        raise CheckpointError(f"row_offsets must not fall, as they do after rows {TILE * block} to {TILE * block + 15}")
    blocks = torch.arange(len(lengths), device=offsets.device).repeat_interleave(lengths)
    return TILE * blocks + torch.arange(count, device=offsets.device) % TILE


ENTRIES = named("bits", "beta1", "beta2", "shapes")
FORMAT = Format((".dense_weights",), (".row_offsets", ".col_vals", ".in_perm"), read, ENTRIES)
