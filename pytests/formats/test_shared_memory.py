"""Swizzles are bijections, and the one in use is that of the hardware."""

from __future__ import annotations

from itertools import product

import pytest

from lowbit.dialect.errors import LayoutError
from lowbit.dialect.layouts.shared_memory import BANK_BYTES, BANKS, Swizzle
from lowbit.dialect.types import SWIZZLE_128

SWIZZLES = [Swizzle(b, m, s) for b in range(4) for m in range(5) for s in range(b, 6)]


@pytest.mark.parametrize("swizzle", SWIZZLES, ids=str)
def test_swizzle_is_an_involution_that_keeps_vectors_and_blocks(swizzle: Swizzle) -> None:
    offsets = range(1 << (swizzle.bits + swizzle.base + swizzle.shift + 1))
    swizzled = [swizzle.apply(x) for x in offsets]
    assert [swizzle.apply(x) for x in swizzled] == list(offsets)
    vector, block = swizzle.base, swizzle.base + swizzle.bits
    assert all(x % (1 << vector) == y % (1 << vector) and x >> block == y >> block for x, y in zip(offsets, swizzled))


def test_swizzle_128_xors_the_row_number_into_the_vector_number() -> None:
    """The 128-byte swizzle of TMA: 16-byte chunk c of row r lies in chunk c ^ (r % 8)."""
    for row, chunk, byte in product(range(16), range(8), range(16)):
        assert SWIZZLE_128.apply(row * 128 + chunk * 16 + byte) == row * 128 + (chunk ^ row % 8) * 16 + byte


def test_a_swizzled_column_of_vectors_meets_all_banks() -> None:
    """Eight rows' vectors are 128 bytes: one in each bank."""
    for column in range(0, 128, 16):
        starts = [SWIZZLE_128.apply(row * 128 + column) // BANK_BYTES for row in range(8)]
        assert sorted((start + i) % BANKS for start in starts for i in range(4)) == list(range(BANKS))


@pytest.mark.parametrize(
    ("numbers", "message"), [((3, 4, 2), "shift >= bits"), ((-1, 4, 2), "bits >= 0"), ((0, -1, 2), "base >= 0")]
)
def test_errors_name_the_reason(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Swizzle(*numbers)
