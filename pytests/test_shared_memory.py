"""Swizzles are bijections that spread columns over the banks, shared layouts never overlap."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest

from lowbit.dialect.errors import LayoutError
from lowbit.dialect.layouts.layout import LDMATRIX_X4
from lowbit.dialect.layouts.shared_memory import SharedLayout, Swizzle, wavefronts

SWIZZLES = [Swizzle(b, m, s) for b in range(4) for m in range(5) for s in range(b, 6)]


@pytest.mark.parametrize("swizzle", SWIZZLES, ids=str)
def test_swizzle_is_an_involution_that_keeps_vectors_and_blocks(swizzle):
    offsets = np.arange(1 << (swizzle.bits + swizzle.base + swizzle.shift + 1))
    swizzled = swizzle.apply(offsets)
    assert np.array_equal(swizzle.apply(swizzled), offsets)
    assert np.array_equal(np.sort(swizzled), offsets)
    assert [swizzle.apply(int(x)) for x in offsets[:64]] == swizzled[:64].tolist()
    assert np.array_equal(swizzled % (1 << swizzle.base), offsets % (1 << swizzle.base))
    assert np.array_equal(swizzled >> (swizzle.base + swizzle.bits), offsets >> (swizzle.base + swizzle.bits))


def test_swizzle_128b_xors_the_row_number_into_the_vector_number():
    """The 128-byte swizzle of TMA: 16-byte chunk c of row r lies in chunk c ^ (r % 8)."""
    swizzle = Swizzle.for_rows(128)
    assert swizzle == Swizzle(3, 4, 3)
    for row, chunk, byte in product(range(16), range(8), range(16)):
        assert swizzle.apply(row * 128 + chunk * 16 + byte) == row * 128 + (chunk ^ row % 8) * 16 + byte
    assert Swizzle.for_rows(64) == Swizzle(2, 4, 3) and Swizzle.for_rows(32) == Swizzle(1, 4, 3)
    assert Swizzle.for_rows(64, item_bytes=2) == Swizzle(3, 3, 3)


@pytest.mark.parametrize(("row_bytes", "item_bytes"), list(product([16, 32, 64, 128, 256, 512], [1, 2, 4])))
@pytest.mark.parametrize("vector_bytes", [4, 8, 16])
def test_swizzled_columns_of_vectors_have_no_bank_conflicts(row_bytes, item_bytes, vector_bytes):
    row = row_bytes // item_bytes
    swizzle = Swizzle.for_rows(row, item_bytes, vector_bytes)
    tile = SharedLayout.row_major((32, row), swizzle=swizzle)
    vector = vector_bytes // item_bytes
    for column in range(0, row, vector):
        addresses = [tile.offset((r, column)) * item_bytes for r in range(32)]
        assert wavefronts(addresses, vector_bytes) == vector_bytes // 4
    if row_bytes >= 128:
        plain = SharedLayout.row_major((32, row))
        assert wavefronts([plain.offset((r, 0)) * item_bytes for r in range(32)], vector_bytes) == 32


def test_ldmatrix_rows_of_a_swizzled_tile_have_no_bank_conflicts():
    """Each of the four 8x8 matrices reads eight 16-byte rows at once; unswizzled they share banks."""
    for swizzle, passes in ((Swizzle.for_rows(64, item_bytes=2), 4), (None, 32)):
        tile = SharedLayout.row_major((LDMATRIX_X4.shape[0], 64), swizzle=swizzle)
        assert wavefronts([tile.offset((r, 16)) * 2 for r in range(32)], 16) == passes


@pytest.mark.parametrize("shape", [(), (1,), (7,), (4, 8), (3, 5), (2, 3, 4), (1, 6, 1)])
@pytest.mark.parametrize("pad", [0, 3])
def test_row_major_is_numpy_of_a_padded_array(shape, pad):
    layout = SharedLayout.row_major(shape, pad)
    padded = np.arange(prod(shape[:-1]) * ((shape[-1] if shape else 1) + pad))
    wanted = padded.reshape(*shape[:-1], -1)[..., : shape[-1]] if shape else np.array(0)
    assert np.array_equal(layout.table(), wanted)
    assert layout.size == wanted.max() + 1
    for index in np.ndindex(*shape):
        assert layout.offset(index) == wanted[index]


@pytest.mark.parametrize("swizzle", SWIZZLES[::5], ids=str)
def test_swizzled_offsets_are_distinct_and_fit_the_size(swizzle):
    layout = SharedLayout((5, 12), (13, 1), swizzle)
    table = layout.table()
    assert len(np.unique(table)) == table.size and table.max() < layout.size
    assert all(layout.offset(index) == table[index] for index in np.ndindex(5, 12))


def test_wavefronts_of_known_accesses():
    """Cases of the CUDA programming guide: stride 1, 2, 32 words, one word for all."""
    lanes = np.arange(32)
    assert wavefronts(lanes * 4, 4) == 1
    assert wavefronts(lanes * 8, 4) == 2
    assert wavefronts(lanes * 12, 4) == 1
    assert wavefronts(lanes * 128, 4) == 32
    assert wavefronts(lanes * 0, 4) == 1
    assert wavefronts(lanes * 132, 4) == 1
    assert wavefronts(lanes * 8, 8) == 2
    assert wavefronts(lanes * 16, 16) == 4
    assert wavefronts(lanes * 32, 16) == 8
    assert wavefronts(lanes % 4 * 16, 16) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Swizzle(3, 4, 2), "shift >= bits"),
        (lambda: Swizzle(-1, 4, 2), "bits >= 0"),
        (lambda: Swizzle.for_rows(96), "row=96"),
        (lambda: Swizzle.for_rows(8, vector_bytes=16), "vector_bytes <= row"),
        (lambda: SharedLayout((4, 4), (2, 1)), "overlap"),
        (lambda: SharedLayout((4, 4), (4, 0)), "overlap"),
        (lambda: SharedLayout((4, 4), (4,)), "equal ranks"),
        (lambda: SharedLayout((4,), (1,)).offset((4,)), "outside"),
        (lambda: wavefronts([0], 2), "width=2"),
        (lambda: wavefronts([4], 8), "multiples of its width"),
    ],
)
def test_errors_name_the_reason(call, message):
    with pytest.raises(LayoutError, match=message):
        call()
