"""Types of GGUF whose codes stand for four or eight weights of a codebook (ggml-common.h, ggml-quants.c).

A block has 256 columns, a scale d and small integers ls for groups of 16 or 32. Each number of a vector is one of three
or eight magnitudes, and so a weight has a code of its own, of a table with all magnitudes and signs. This is exact, and
takes 3 or 4 bits a weight where the vectors take 1.6 to 3.4.

    IQ1_S     d (2 ls + 1) (g + delta)       g of -1, 0, 1; delta of 1/8 or -1/8 for 32 columns
    IQ1_M     the same                       for 16 columns; delta for 8; d lies in the upper bits of the scales
    IQ2_XXS   d (2 ls + 1) g / 8             magnitudes 8, 25, 43; signs of seven and their parity
    IQ2_XS    the same                       for 16 columns
    IQ2_S     the same                       for 16 columns; a sign for each
    IQ3_XXS   d (2 ls + 1) g / 4             magnitudes 4, 12 to 62; signs of seven and their parity
    IQ3_S     d (2 ls + 1) g                 magnitudes 1, 3 to 15; a sign for each

The codebooks are those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit.dialect.errors import CheckpointError
from lowbit.pylib.checkpoints.gguf.blocks import EIGHT_BITS, NIBBLES, BlockType, fields, floats
from lowbit.pylib.checkpoints.gguf.super_blocks import PAIRS_OF_BITS
from lowbit.pylib.checkpoints.imported import Imported

SMALL, MIDDLE, LARGE = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62), (1, 3, 5, 7, 9, 11, 13, 15)
"""The magnitudes of two-bit types, of IQ3_XXS, and of IQ3_S."""
TERNARY, DELTA = (-1, 0, 1), 1 / 8
SEVENS = (0, 7, 14, 21)
SIGNS = tuple(signs | (signs.bit_count() & 1) << 7 for signs in range(128))
"""Eight signs, of which seven are given: there is an even number of minuses."""


@cache
def _codebook(name: str) -> Tensor:
    """Returns the vectors of a type, uint8 [vectors, numbers], each number as its place among the type's numbers."""
    try:
        from gguf import quants
    except ImportError:
        raise CheckpointError(f"{name} has a codebook, which is in the gguf package; pip install gguf") from None
    kind: Any = getattr(quants, name)
    kind.init_grid()
    grid = torch.from_numpy(kind.grid).reshape(kind.grid_shape)
    return torch.searchsorted(torch.tensor(kind.grid_map, dtype=grid.dtype), grid).to(torch.uint8)


def _vectors(name: str, places: Tensor) -> Tensor:
    """Returns the numbers [blocks, 256] of vectors [blocks, count], as places among the type's numbers."""
    return _codebook(name).to(places.device)[places.long()].flatten(1)


def _weight(codes: Tensor, ls: Tensor, d: Tensor, table: tuple[float, ...]) -> Imported:
    """Returns the weight d (2 ls + 1) table[code]."""
    bits = (len(table) - 1).bit_length()
    return Imported(
        codes,
        2 * ls.to(torch.uint8) + 1,
        weight=f"lut{bits}",
        table=table,
        scale_code="u6",
        second_level={"scale_scales": floats(d)},
    )


# -- two and three bits: magnitudes with signs


def _table(magnitudes: tuple[int, ...], divisor: int) -> tuple[float, ...]:
    """Returns the magnitudes, filled up to a power of two, and these with minus signs."""
    count = 1 << (len(magnitudes) - 1).bit_length()
    positive = [magnitude / divisor for magnitude in (*magnitudes, *magnitudes[-1:] * (count - len(magnitudes)))]
    return (*positive, *(-value for value in positive))


def _signed(name: str, places: Tensor, signs: Tensor, table: tuple[float, ...]) -> Tensor:
    """Returns codes of vectors, and of bytes with the signs of eight weights each."""
    return _vectors(name, places) | fields(signs, 1, EIGHT_BITS, 1) << (len(table) // 2 - 1).bit_length()


def _of_parity(signs: Tensor) -> Tensor:
    """Returns eight signs in a byte, of seven."""
    return torch.tensor(SIGNS, dtype=torch.uint8, device=signs.device)[signs.long()].flatten(1)


def _words(data: Tensor) -> tuple[Tensor, Tensor]:
    """Returns four times seven signs, and the ls, of words of 32 bits."""
    words = data.contiguous().view(torch.int32)
    return words[..., None] >> torch.tensor(SEVENS, device=words.device) & 127, words >> 28 & 15


def _iq2_xxs(blocks: Tensor) -> Imported:
    d, qs = blocks.split([2, 64], 1)
    places, rest = qs.unflatten(1, (8, 8)).split([4, 4], 2)
    signs, ls = _words(rest.flatten(1))
    table = _table(SMALL, 8)
    return _weight(_signed("IQ2_XXS", places.flatten(1), _of_parity(signs), table), ls, d, table)


def _iq2_xs(blocks: Tensor) -> Imported:
    d, qs, scales = blocks.split([2, 64, 8], 1)
    words, table = qs.contiguous().view(torch.int16).int() & 0xFFFF, _table(SMALL, 8)
    codes = _signed("IQ2_XS", words & 511, _of_parity(words >> 9), table)
    return _weight(codes, fields(scales, 1, NIBBLES, 4), d, table)


def _iq2_s(blocks: Tensor) -> Imported:
    d, qs, signs, qh, scales = blocks.split([2, 32, 32, 8, 8], 1)
    places, table = qs.int() | fields(qh, 1, PAIRS_OF_BITS, 2).int() << 8, _table(SMALL, 8)
    return _weight(_signed("IQ2_S", places, signs, table), fields(scales, 1, NIBBLES, 4), d, table)


def _iq3_xxs(blocks: Tensor) -> Imported:
    d, places, rest = blocks.split([2, 64, 32], 1)
    (signs, ls), table = _words(rest), _table(MIDDLE, 4)
    return _weight(_signed("IQ3_XXS", places, _of_parity(signs), table), ls, d, table)


def _iq3_s(blocks: Tensor) -> Imported:
    d, qs, qh, signs, scales = blocks.split([2, 64, 8, 32, 4], 1)
    places, table = qs.int() | fields(qh, 1, EIGHT_BITS, 1).int() << 8, _table(LARGE, 1)
    return _weight(_signed("IQ3_S", places, signs, table), fields(scales, 1, NIBBLES, 4), d, table)


# -- one bit: three numbers, shifted up or down

SHIFTED = (*(g + DELTA for g in TERNARY), 0.0, *(g - DELTA for g in TERNARY), 0.0)


def _shifted(places: Tensor, is_down: Tensor) -> Tensor:
    """Returns codes of vectors, and of whether the numbers of equally many columns are shifted down."""
    numbers = _vectors("IQ1_S", places)
    return numbers | is_down.to(torch.uint8).repeat_interleave(256 // is_down.shape[1], 1) << 2


def _iq1_s(blocks: Tensor) -> Imported:
    d, qs, qh = blocks.split([2, 32, 16], 1)
    words = qh.contiguous().view(torch.int16).int() & 0xFFFF
    high = words[..., None] >> torch.tensor((0, 3, 6, 9), device=words.device) & 7
    return _weight(_shifted(qs.int() | high.flatten(1) << 8, words >> 15), words >> 12 & 7, d, SHIFTED)


def _iq1_m(blocks: Tensor) -> Imported:
    qs, qh, scales = blocks.split([32, 16, 8], 1)
    words = scales.contiguous().view(torch.int16).int() & 0xFFFF
    upper = words >> 12 << torch.tensor((0, 4, 8, 12), device=words.device)
    d = upper.sum(1, keepdim=True).to(torch.int16).view(torch.uint8)
    ls = (words[..., None] >> torch.tensor((0, 3, 6, 9), device=words.device) & 7).flatten(1)
    nibbles = fields(qh, 1, NIBBLES, 4).int()
    return _weight(_shifted(qs.int() | (nibbles & 7) << 8, nibbles >> 3), ls, d, SHIFTED)


def _type(name: str, nbytes: int, read: Callable[[Tensor], Imported]) -> BlockType:
    return BlockType(name, 256, nbytes, read)


CODEBOOKS = {
    16: _type("IQ2_XXS", 66, _iq2_xxs),
    17: _type("IQ2_XS", 74, _iq2_xs),
    18: _type("IQ3_XXS", 98, _iq3_xxs),
    19: _type("IQ1_S", 50, _iq1_s),
    21: _type("IQ3_S", 110, _iq3_s),
    22: _type("IQ2_S", 82, _iq2_s),
    29: _type("IQ1_M", 56, _iq1_m),
}
"""The types by their number in a file."""
