"""The codes and scales of a weight between [n, k] and the kernels' memory order, both ways, in torch.

`dialect.packing.Packing` says where every field of every code lies. Here that becomes, per plane, one
permutation of a tile of 16 rows by a chunk of columns (`_planes`): packing is a gather along it and a few
shifts on bytes, unpacking the gather along its inverse. Both take a few row blocks at a time, so that the
work stays in cache and the memory they need does not grow with the weight. Words are little-endian, as on
every machine that CUDA runs on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dialect.packing import BLOCK_K, ROWS, UNIT_BYTES, WORDS_PER_UNIT, Packing, Plane

SLICE = 1 << 20  # codes per step: the working set stays in cache


def pack_codes(packing: Packing, codes: Tensor, offset: int = 0) -> Tensor:
    """Integers [n, k] to int32 [packing.codes_shape] of (code + offset) modulo 256; padding is 0."""
    planes = list(_planes(packing, codes.device))
    source = torch.from_numpy(packing.k_source).to(codes.device)
    result = torch.empty(packing.codes_shape, dtype=torch.int32, device=codes.device)
    for blocks, rows in _slices(packing):
        part = codes[rows].to(torch.uint8).contiguous() + offset
        if packing.padded_k != packing.k:
            part = part.gather(1, source.clamp(min=0).expand(len(part), -1)).masked_fill_(source < 0, 0)
        out = result[blocks]
        part = F.pad(part, (0, 0, 0, len(out) * ROWS - len(part)))
        tile = part.view(-1, ROWS, packing.chunks, packing.chunk).transpose(1, 2)
        tile = tile.reshape(-1, ROWS * packing.chunk)
        stored = out.view(torch.uint8).view(-1, packing.units * UNIT_BYTES)
        for plane, index in planes:
            _pack_plane(stored, tile, plane, index)
    return result


def unpack_codes(packing: Packing, packed: Tensor, offset: int = 0) -> Tensor:
    """The inverse of `pack_codes`: uint8 [n, k], modulo 256."""
    planes = [(plane, index.argsort()) for plane, index in _planes(packing, packed.device)]
    source = torch.from_numpy(packing.k_source).to(packed.device)
    inside = (source >= 0).nonzero()[:, 0]
    column = torch.empty_like(inside)  # in memory, of every column of the weight
    column[source[inside]] = inside
    result = torch.empty(packing.n, packing.k, dtype=torch.uint8, device=packed.device)
    for blocks, rows in _slices(packing):
        stored = packed[blocks].view(torch.uint8).view(-1, packing.units * UNIT_BYTES)
        tile = reduce(torch.bitwise_or, (_unpack_plane(stored, *plane) for plane in planes))
        tile = tile.view(-1, packing.chunks, ROWS, packing.chunk).transpose(1, 2)
        part = tile.reshape(-1, packing.padded_k)[: rows.stop - rows.start]
        if packing.padded_k != packing.k:
            part = part.gather(1, column.expand(len(part), -1))
        result[rows] = part - offset
    return result


def pack_groups(packing: Packing, table: Tensor) -> Tensor:
    """[n, groups] to [packing.scales_shape], padded with 0; as bits: float8 types lack most operations."""
    raw = _raw(table.contiguous())
    raw = F.pad(raw, (0, packing.groups - raw.shape[1], 0, packing.row_blocks * ROWS - raw.shape[0]))
    return _fresh(raw.view(packing.row_blocks, ROWS, packing.groups).transpose(1, 2)).view(table.dtype)


def unpack_groups(packing: Packing, table: Tensor) -> Tensor:
    """The inverse of `pack_groups`."""
    groups = 1 if packing.group is None else packing.k // packing.group
    rows = _raw(table).transpose(1, 2).reshape(-1, packing.groups)
    return _fresh(rows[: packing.n, :groups]).view(table.dtype)


def _planes(packing: Packing, device: torch.device) -> Iterator[tuple[Plane, Tensor]]:
    """Each plane with its permutation: int64 [16 * chunk], for the fields of the plane's bytes (the lowest of
    all bytes first, then the next of all) the flat position of their code in a tile [16, chunk]."""
    order = packing.fragment_order().reshape(32, 4, 2)  # lane, register, half
    row, column = np.divmod(order, BLOCK_K)
    lane = np.arange(32)
    for number, plane in enumerate(packing.planes):
        # Axes: field of the byte, unit, lane, word of the lane, byte of the word.
        index = np.empty((8 // plane.bits, plane.units, 32, WORDS_PER_UNIT, 4), dtype=np.int64)
        for block in range(packing.chunk // BLOCK_K):
            for register in range(4):
                slot = packing.slots(block, register)[number]
                for half in range(2):
                    byte, bit = divmod(slot.shift + 16 * half, 8)
                    k = block * BLOCK_K + column[:, register, half]
                    position = row[:, register, half] * packing.chunk + k
                    index[bit // plane.bits, slot.unit - plane.first_unit, lane, slot.word, byte] = position
        yield plane, torch.from_numpy(index.reshape(-1)).to(device)


def _pack_plane(stored: Tensor, tile: Tensor, plane: Plane, index: Tensor) -> None:
    """Write the plane's bytes of `stored` [tiles, bytes] from codes `tile` [tiles, 16 * chunk] (uint8)."""
    field = tile if plane.bits == 8 else (tile >> plane.low) & ((1 << plane.bits) - 1)
    fields = field.gather(1, index.expand(tile.shape)).view(tile.shape[0], 8 // plane.bits, -1)
    shifted = (fields[:, i] << (i * plane.bits) for i in range(fields.shape[1]))
    stored[:, _bytes(plane)] = reduce(torch.bitwise_or, shifted)


def _unpack_plane(stored: Tensor, plane: Plane, inverse: Tensor) -> Tensor:
    """The plane's share of the codes, uint8 [tiles, 16 * chunk]: the inverse of `_pack_plane`."""
    packed = stored[:, _bytes(plane)]
    mask = (1 << plane.bits) - 1
    fields = torch.cat([(packed >> shift) & mask for shift in range(0, 8, plane.bits)], dim=1)
    return fields.gather(1, inverse.expand(fields.shape)) << plane.low


def _bytes(plane: Plane) -> slice:
    return slice(plane.first_unit * UNIT_BYTES, (plane.first_unit + plane.units) * UNIT_BYTES)


def _slices(packing: Packing) -> Iterator[tuple[slice, slice]]:
    """Ranges of row blocks with about SLICE codes, and the rows of the weight in them."""
    step = max(1, SLICE // (ROWS * packing.padded_k))
    for first in range(0, packing.row_blocks, step):
        last = min(first + step, packing.row_blocks)
        yield slice(first, last), slice(first * ROWS, min(last * ROWS, packing.n))


def _fresh(t: Tensor) -> Tensor:
    """A contiguous copy; unlike contiguous(), with ordinary strides for sizes of 1, as views need them."""
    return t.clone(memory_format=torch.contiguous_format)


def _raw(t: Tensor) -> Tensor:
    """The bits of a tensor as integers of the same size."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])
