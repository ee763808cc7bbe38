"""Types of GGUF with blocks of 256 columns (ggml-common.h, ggml-quants.c).

In the K types a block has a scale d and, in some, a least value dmin, both f16; its 8 or 16 groups have integers sc and
m. They are kept so (`Bilevel`): scales are codes sc with a second level of d, offsets codes m with one of -dmin.

    Q2_K     d sc q - dmin m       16 groups; sc and m of 4 bits
    Q3_K     d (sc - 32) (q - 4)   16 groups; sc of 6 bits; the third bit of q in hmask
    Q4_K     d sc q - dmin m       8 groups; sc and m of 6 bits
    Q5_K     the same              the fifth bit of q in qh
    Q6_K     d sc (q - 32)         16 groups; sc of 8 bits, signed; the two upper bits of q in qh
    IQ4_XS   d (sc - 32) table[q]  8 groups; sc of 6 bits
    TQ1_0    d (q - 1)             five numbers of 0, 1 and 2 in a byte
    TQ2_0    d (q - 1)             2 bits
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.dialect.spec import Scale
from lowbit.pylib.checkpoints.gguf.blocks import EIGHT_BITS, IQ4_TABLE, NIBBLES, BlockType, fields, floats, joined
from lowbit.pylib.checkpoints.imported import Imported, integers, signed

PAIRS_OF_BITS = (0, 2, 4, 6)


def _q2_k(blocks: Tensor) -> Imported:
    groups, qs, d, dmin = blocks.split([16, 64, 2, 2], 1)
    return _with_offsets("u2", fields(qs, 32, PAIRS_OF_BITS, 2), "u4", (d, groups & 15), (dmin, groups >> 4))


def _q3_k(blocks: Tensor) -> Imported:
    hmask, qs, groups, d = blocks.split([32, 64, 12, 2], 1)
    low, high = groups.split([8, 4], 1)
    sc = joined(fields(low, 8, NIBBLES, 4), fields(high, 4, PAIRS_OF_BITS, 2), 4)
    codes = joined(fields(qs, 32, PAIRS_OF_BITS, 2), fields(hmask, 32, EIGHT_BITS, 1), 2)
    return Imported(
        signed(codes, 3), _less_32(sc), weight="i3", scale_code="i6", second_level={"scale_scales": floats(d)}
    )


def _q4_k(blocks: Tensor) -> Imported:
    d, dmin, groups, qs = blocks.split([2, 2, 12, 128], 1)
    sc, m = _six_bits(groups)
    return _with_offsets("u4", fields(qs, 32, NIBBLES, 4), "u6", (d, sc), (dmin, m))


def _q5_k(blocks: Tensor) -> Imported:
    d, dmin, groups, qh, qs = blocks.split([2, 2, 12, 32, 128], 1)
    codes = joined(fields(qs, 32, NIBBLES, 4), fields(qh, 32, EIGHT_BITS, 1), 4)
    sc, m = _six_bits(groups)
    return _with_offsets("u5", codes, "u6", (d, sc), (dmin, m))


def _with_offsets(
    weight: str, codes: Tensor, code: Scale, scales: tuple[Tensor, Tensor], offsets: tuple[Tensor, Tensor]
) -> Imported:
    """Returns the weight d sc q - dmin m, of (d, sc) and (dmin, m)."""
    (d, sc), (dmin, m) = scales, offsets
    second = {"scale_scales": floats(d), "offset_scales": -floats(dmin)}
    return Imported(codes, sc, weight=weight, offsets=m, scale_code=code, second_level=second)


def _six_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the eight sc and eight m of 6 bits that are in 12 bytes.

    Bytes 0 to 3 have the first four sc and, in their two upper bits, the upper bits of the last four sc. Bytes 4 to 7
    have the same of m. Bytes 8 to 11 have the lower four bits of the last four, those of sc in the low nibble.
    """
    sc, m, rest = groups.split([4, 4, 4], 1)
    sc = torch.cat([sc & 63, rest & 15 | sc >> 6 << 4], 1)
    m = torch.cat([m & 63, rest >> 4 | m >> 6 << 4], 1)
    return sc, m


def _q6_k(blocks: Tensor) -> Imported:
    ql, qh, sc, d = blocks.split([128, 64, 16, 2], 1)
    codes = joined(fields(ql, 64, NIBBLES, 4), fields(qh, 32, PAIRS_OF_BITS, 2), 4)
    scales = sc.view(torch.int8)
    return Imported(signed(codes, 6), scales, weight="i6", scale_code="i8", second_level={"scale_scales": floats(d)})


def _iq4_xs(blocks: Tensor) -> Imported:
    d, high, low, qs = blocks.split([2, 2, 4, 128], 1)
    sc = joined(fields(low, 1, NIBBLES, 4), fields(high, 1, PAIRS_OF_BITS, 2), 4)
    codes, scales = fields(qs, 16, NIBBLES, 4), _less_32(sc)
    return Imported(
        codes, scales, weight="lut4", table=IQ4_TABLE, scale_code="i6", second_level={"scale_scales": floats(d)}
    )


def _less_32(sc: Tensor) -> Tensor:
    return sc.view(torch.int8) - 32


def _tq1_0(blocks: Tensor) -> Imported:
    qs, more, qh, d = blocks.split([32, 16, 4, 2], 1)
    return _ternary(torch.cat([_trits(qs, 5), _trits(more, 5), _trits(qh, 4)], 1), d)


def _trits(data: Tensor, count: int) -> Tensor:
    """Returns `count` numbers of 0, 1 and 2 from each byte, first the first number of all bytes.

    A byte is a fraction of 256 in base 3: times 3^i, its part below 1 begins with number i.
    """
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device=data.device)
    fractions = (data[:, None] * powers[:, None]).to(torch.int16)
    return (fractions * 3 >> 8).to(torch.uint8).flatten(1)


def _tq2_0(blocks: Tensor) -> Imported:
    qs, d = blocks.split([64, 2], 1)
    return _ternary(fields(qs, 32, PAIRS_OF_BITS, 2), d)


def _ternary(codes: Tensor, d: Tensor) -> Imported:
    """Returns the weight d (q - 1). Where no q is 3, as it should be, it needs no zeros."""
    if not bool((codes == 3).any()):
        return Imported(codes.view(torch.int8) - 1, floats(d), weight="i2")
    return integers(codes, 2, floats(d), torch.ones(len(d), 1, dtype=torch.uint8, device=d.device), None)


SUPER_BLOCKS = {
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
    34: BlockType("TQ1_0", 256, 54, _tq1_0),
    35: BlockType("TQ2_0", 256, 66, _tq2_0),
}
"""The types by their number in a file."""
