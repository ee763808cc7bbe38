"""Types of GGUF in which a row is cut into blocks of 32 or 64 columns (ggml-common.h, ggml-quants.c).

    d      f16: the scale; m, f16: the least value
    qs     low nibbles are columns 0 to 15, high nibbles 16 to 31
    qh     bit j is the fifth bit of column j

Q4_0 d (q - 8), Q4_1 d q + m, Q5_0 d (q - 16), Q5_1 d q + m, Q8_0 d q, IQ4_NL d table[q], MXFP4 2^(e - 127) e2m1(q).

A block of NVFP4 has four groups of 16 columns: four bytes with a scale each, e4m3 numbers without a sign, and then e2m1
codes, low nibbles columns 0 to 7 of a group and high nibbles 8 to 15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.dialect.presets import IQ4_TABLE
from lowbit.pylib.checkpoints.imported import Imported, signed

NIBBLES = (0, 4)
EIGHT_BITS = tuple(range(8))


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF.

    columns   of a row that a block holds
    nbytes    of a block
    read      returns the weight of blocks [count, nbytes], a block a row
    """

    name: str
    columns: int
    nbytes: int
    read: Callable[[Tensor], Imported]


def fields(data: Tensor, width: int, shifts: Sequence[int], bits: int) -> Tensor:
    """Returns numbers of so many bits [blocks, count] out of bytes [blocks, nbytes], taken at these shifts.

    Bytes are in runs of `width`: of the first run come the numbers at the first shift, then those at the second.
    """
    runs = data.reshape(len(data), -1, 1, width)
    shift = torch.tensor(shifts, dtype=torch.uint8, device=data.device)[:, None]
    numbers = runs >> shift
    numbers &= (1 << bits) - 1  # in place: a large matrix is unpacked in one go
    return numbers.flatten(1)


def joined(low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Returns codes whose lower bits, so many of them, are in `low`. Both arguments are overwritten."""
    high <<= bits
    low |= high
    return low


def floats(data: Tensor) -> Tensor:
    """Returns the f16 numbers [blocks, count] in bytes [blocks, 2 * count]."""
    return data.contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> Imported:
    d, qs = blocks.split([2, 16], 1)
    return Imported(signed(fields(qs, 16, NIBBLES, 4), 4), floats(d), weight="i4")


def _q4_1(blocks: Tensor) -> Imported:
    d, m, qs = blocks.split([2, 2, 16], 1)
    return Imported(fields(qs, 16, NIBBLES, 4), floats(d), weight="u4", offsets=floats(m))


def _q5_0(blocks: Tensor) -> Imported:
    d, qh, qs = blocks.split([2, 4, 16], 1)
    return Imported(signed(_five_bits(qh, qs), 5), floats(d), weight="i5")


def _q5_1(blocks: Tensor) -> Imported:
    d, m, qh, qs = blocks.split([2, 2, 4, 16], 1)
    return Imported(_five_bits(qh, qs), floats(d), weight="u5", offsets=floats(m))


def _five_bits(qh: Tensor, qs: Tensor) -> Tensor:
    return joined(fields(qs, 16, NIBBLES, 4), fields(qh, 1, EIGHT_BITS, 1), 4)


def _q8_0(blocks: Tensor) -> Imported:
    d, qs = blocks.split([2, 32], 1)
    return Imported(qs.contiguous().view(torch.int8), floats(d), weight="i8")


def _iq4_nl(blocks: Tensor) -> Imported:
    d, qs = blocks.split([2, 16], 1)
    return Imported(fields(qs, 16, NIBBLES, 4), floats(d), weight="lut4", table=IQ4_TABLE)


def _mxfp4(blocks: Tensor) -> Imported:
    e, qs = blocks.split([1, 16], 1)
    return Imported(_e2m1(fields(qs, 16, NIBBLES, 4)), e.contiguous().view(torch.float8_e8m0fnu), weight="f4e2m1")


def _nvfp4(blocks: Tensor) -> Imported:
    d, qs = blocks.split([4, 32], 1)
    scales = (d & 0x7F).masked_fill_(d & 0x7F == 0x7F, 0)  # llama.cpp reads NaN as 0
    return Imported(_e2m1(fields(qs, 8, NIBBLES, 4)), scales.view(torch.float8_e4m3fn), weight="f4e2m1")


def _e2m1(codes: Tensor) -> Tensor:
    """Returns the codes with 0 in place of -0, which llama.cpp's table has not."""
    return codes.masked_fill(codes == 0b1000, 0)


BLOCKS = {
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
    40: BlockType("NVFP4", 64, 36, _nvfp4),
}
"""The types by their number in a file."""
