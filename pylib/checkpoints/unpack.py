"""Codes of 1 to 8 bits out of bytes and words, as other libraries pack them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.weights.at_once import at_once

SPREAD = {1: (torch.int64, 7), 2: (torch.int32, 6), 4: (torch.int16, 4)}
"""For codes that do not straddle bytes: the type with a byte for each code of a byte, and how much further to the left
each code comes to lie in it than the code before."""


def from_stream(packed: Tensor, bits: int, count: int) -> Tensor:
    """Returns codes [rows, count], uint8, from rows of words or bytes that hold them one after the other.

    The lowest bits of the first byte hold the first code; words are little-endian; codes may straddle words.
    """
    stored = packed.shape[1] * packed.element_size()
    rows = packed.reshape(-1).contiguous().view(torch.uint8).view(len(packed), stored)  # of one word a row, too
    if stored * 8 < count * bits:
        raise CheckpointError(f"{stored} bytes a row can't hold {count} codes of {bits} bits")
    if bits == 8:
        return rows[:, :count]
    codes = torch.empty(len(rows), count, dtype=torch.uint8, device=packed.device)
    step = max(1, at_once(packed.device) // count)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        found = _spread(part, bits) if bits in SPREAD else _gathered(part, bits, count)
        codes[first : first + step] = found[:, :count]
    return codes


def _spread(rows: Tensor, bits: int) -> Tensor:
    """Returns the codes of 1, 2 or 4 bits in rows of bytes."""
    wide, step = SPREAD[bits]
    data = rows.to(wide)
    codes = data.clone()
    for number in range(1, 8 // bits):
        codes |= data << (step * number)
    codes &= int.from_bytes(bytes([(1 << bits) - 1]) * (8 // bits), "little")
    return codes.view(torch.uint8)


def _gathered(rows: Tensor, bits: int, count: int) -> Tensor:
    """Returns the codes in rows of bytes, eight of which fill as many bytes as they have bits."""
    periods = -(-count // 8)
    missing = max(0, periods * bits - rows.shape[1])
    period = pad(rows, (0, missing))[:, : periods * bits].view(-1, periods, bits)
    codes = torch.empty(len(rows), periods, 8, dtype=torch.uint8, device=rows.device)
    for number in range(8):
        byte, shift = divmod(number * bits, 8)
        code = period[..., byte] >> shift
        if shift + bits > 8:
            code = code | (period[..., byte + 1] << (8 - shift))
        codes[..., number] = code & ((1 << bits) - 1)
    return codes.view(len(rows), -1)[:, :count]


def from_columns(packed: Tensor, bits: int, count: int) -> Tensor:
    """Returns codes [count, columns], where each column of int32 words [words, columns] is a stream."""
    return from_stream(packed.t(), bits, count).t()


def high_nibbles_first(packed: Tensor) -> Tensor:
    """Returns the two codes of each byte, that in the high nibble first: [2 * bytes] for bytes of any shape."""
    flat = packed.reshape(-1)
    return torch.stack([flat >> 4, flat & 15], dim=1).view(-1)


def from_parts(packed: Tensor, bits: int, rows: int) -> Tensor:
    """Returns codes [rows, columns], of which a word holds one from each of several equal parts of the rows, that from
    the first part in the highest bits."""
    parts = packed.element_size() * 8 // bits
    shifts = range((parts - 1) * bits, -1, -bits)
    codes = torch.cat([(packed >> shift & ((1 << bits) - 1)).to(torch.uint8) for shift in shifts])
    if len(codes) < rows:
        raise CheckpointError(f"{len(packed)} rows of words can't hold {rows} rows of codes of {bits} bits")
    return codes[:rows]
