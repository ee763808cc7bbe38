"""The codes and scales of a weight between [n, k] and the kernels' memory order, both ways, in torch.

One permutation brings a tile of 16 rows by a chunk of columns into the order of registers (`_register_order`); then
the halves of words are put together from the pieces that `dialect.formats.packing.run_of` says are in them, and taken
apart again. Both take a few row blocks at a time, so that the work stays in cache and the memory they need does not
grow with the weight; on a CPU in one thread, since no operation is large enough to be shared. Words are little-endian,
as on every machine that CUDA runs on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.dialect.bilevel import Bilevel
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, WORDS_PER_UNIT, Packing, run_of
from lowbit.pylib.runtime import cpu_threads
from lowbit.pylib.weights.at_once import at_once

RUNS = 4  # of a chunk
HALVES = 64  # of 16 bits: of one word of every lane of a warp


@cpu_threads.alone()
def pack_codes(packing: Packing, codes: Tensor, offset: int = 0) -> Tensor:
    """Integers [n, k] to int32 [packing.codes_shape] of (code + offset) modulo 256; padding is 0."""
    order = _register_order(packing).to(codes.device)
    source = torch.from_numpy(packing.k_source).to(codes.device)
    result = torch.empty(packing.codes_shape, dtype=torch.int32, device=codes.device)
    for blocks, rows in _slices(packing, codes.device):
        part = codes[rows].to(torch.uint8).contiguous() + offset
        if packing.padded_k != packing.k:
            part = part.gather(1, source.clamp(min=0).expand(len(part), -1)).masked_fill_(source < 0, 0)
        out = result[blocks]
        part = F.pad(part, (0, 0, 0, len(out) * ROWS - len(part)))
        tile = part.view(-1, ROWS, packing.chunks, packing.chunk).transpose(1, 2)
        tile = tile.reshape(-1, ROWS * packing.chunk)
        registers = tile.gather(1, order.expand(tile.shape)).view(len(tile), RUNS, -1, HALVES)
        words = torch.zeros(len(tile), RUNS, packing.units, HALVES, dtype=torch.int16, device=codes.device)
        for number, pieces in enumerate(run_of(packing.bits)):
            for p in pieces:
                bits = (registers[:, :, number] >> p.low) & ((1 << p.bits) - 1)
                words[:, :, p.word] |= bits.to(torch.int16) << p.shift
        words = words.view(-1, packing.units, WORDS_PER_UNIT, 32, 2)
        out.view(torch.int16).view(-1, packing.units, 32, WORDS_PER_UNIT, 2)[:] = words.transpose(2, 3)
    return result


@cpu_threads.alone()
def unpack_codes(packing: Packing, packed: Tensor, offset: int = 0) -> Tensor:
    """The inverse of `pack_codes`: uint8 [n, k], modulo 256."""
    order = _register_order(packing).argsort().to(packed.device)
    run = run_of(packing.bits)
    source = torch.from_numpy(packing.k_source).to(packed.device)
    inside = (source >= 0).nonzero()[:, 0]
    column = torch.empty_like(inside)  # in memory, of every column of the weight
    column[source[inside]] = inside
    result = torch.empty(packing.n, packing.k, dtype=torch.uint8, device=packed.device)
    for blocks, rows in _slices(packing, packed.device):
        words = packed[blocks].view(torch.int16).view(-1, packing.units, 32, WORDS_PER_UNIT, 2).transpose(2, 3)
        words = words.reshape(-1, RUNS, packing.units, HALVES)
        registers = torch.zeros(len(words), RUNS, len(run), HALVES, dtype=torch.uint8, device=packed.device)
        for number, pieces in enumerate(run):
            for p in pieces:
                bits = (words[:, :, p.word] >> p.shift) & ((1 << p.bits) - 1)
                registers[:, :, number] |= bits.to(torch.uint8) << p.low
        tile = registers.view(len(words), -1).gather(1, order.expand(len(words), -1))
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


def pack_blocks(packing: Packing, table: Tensor, bilevel: Bilevel) -> Tensor:
    """[n / rows, groups / block] to the shape in memory of `Bilevel.shapes`, padded with 0."""
    shape, _ = bilevel.shapes(packing)
    row_blocks, blocks, lanes = shape
    height = row_blocks * ROWS // bilevel.rows
    table = F.pad(table, (0, blocks - table.shape[1], 0, height - table.shape[0]))
    return _fresh(table.view(row_blocks, -1, blocks).transpose(1, 2).expand(-1, -1, lanes))


def unpack_blocks(packing: Packing, table: Tensor, bilevel: Bilevel) -> Tensor:
    """The inverse of `pack_blocks`."""
    _, (height, blocks) = bilevel.shapes(packing)
    rows = table[:, :, : ROWS // bilevel.rows].transpose(1, 2).reshape(-1, table.shape[1])
    return _fresh(rows[:height, :blocks])


def unpack_groups(packing: Packing, table: Tensor) -> Tensor:
    """The inverse of `pack_groups`."""
    groups = 1 if packing.group is None else packing.k // packing.group
    rows = _raw(table).transpose(1, 2).reshape(-1, packing.groups)
    return _fresh(rows[: packing.n, :groups]).view(table.dtype)


def _register_order(packing: Packing) -> Tensor:
    """int64 [16 * chunk]: for every run of a chunk, register of the run, lane and half the flat position of the code
    in a tile [16, chunk]."""
    row, column = np.divmod(packing.fragment_order().reshape(32, 4, 2), BLOCK_K)  # lane, register of a block, half
    order = np.empty((RUNS, len(run_of(packing.bits)), 32, 2), dtype=np.int64)
    for block, register in np.ndindex(packing.chunk // BLOCK_K, 4):
        word, number = packing.place(block, register)
        order[word // packing.units, number] = row[:, register] * packing.chunk + block * BLOCK_K + column[:, register]
    return torch.from_numpy(order.reshape(-1))


def _slices(packing: Packing, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Ranges of row blocks to work on at a time, and the rows of the weight in them."""
    step = max(1, at_once(device) // (ROWS * packing.padded_k))
    for first in range(0, packing.row_blocks, step):
        last = min(first + step, packing.row_blocks)
        yield slice(first, last), slice(first * ROWS, min(last * ROWS, packing.n))


def _fresh(t: Tensor) -> Tensor:
    """A contiguous copy; unlike contiguous(), with ordinary strides for sizes of 1, as views need them."""
    return t.clone(memory_format=torch.contiguous_format)


def _raw(t: Tensor) -> Tensor:
    """The bits of a tensor as integers of the same size."""
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])
