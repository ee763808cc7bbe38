"""Laws of the memory order: every bit of every code is stored once, where its lane can use it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.dialect.formats.packing import BLOCK_K, UNIT_BYTES, Packing, Piece, round_up, run_of

BITS = range(1, 9)


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    bits, n = draw(st.integers(1, 8)), draw(st.integers(1, 70))
    group = draw(st.none() | st.integers(16, 300))
    k = draw(st.integers(16, 1200)) if group is None else group * draw(st.integers(1, 6))
    return Packing(bits, n, k, group)


@pytest.mark.parametrize("bits", BITS)
def test_pieces_make_up_the_code(bits: int) -> None:
    for pieces in run_of(bits):
        assert [b for piece in pieces for b in range(piece.low, piece.low + piece.bits)] == list(range(bits))


@pytest.mark.parametrize("bits", BITS)
def test_a_run_fills_every_bit_of_its_words_once(bits: int) -> None:
    p = Packing(bits, 16, 256)
    used = np.zeros((p.units, 16), dtype=int)  # word, bit of a half
    for pieces in run_of(bits):
        for piece in pieces:
            used[piece.word, piece.shift : piece.shift + piece.bits] += 1
            assert piece.shift + piece.bits <= 16
    assert (used == 1).all()


@pytest.mark.parametrize("bits", BITS)
def test_as_many_codes_as_can_be_are_whole(bits: int) -> None:
    whole = [pieces for pieces in run_of(bits) if len(pieces) == 1]
    assert len(whole) == Packing(bits, 16, 256).units * (16 // bits)


@pytest.mark.parametrize("bits", BITS)
def test_a_chunk_is_four_runs(bits: int) -> None:
    p, run = Packing(bits, 16, 256), run_of(bits)
    places = [p.place(block, register) for block in range(p.chunk // BLOCK_K) for register in range(4)]
    assert places == [(i * p.units, number) for i in range(4) for number in range(len(run))]
    assert p.units * UNIT_BYTES * 8 == 16 * p.chunk * bits  # no bit is wasted


@pytest.mark.parametrize("bits", BITS)
def test_a_run_is_the_smallest(bits: int) -> None:
    assert any(len(run_of(bits)) // d * bits % 16 for d in (2, 4, 8, 16)) or Packing(bits, 16, 256).units == 1


@pytest.mark.parametrize(
    "bits, block, register, first, pieces",
    [
        (4, 0, 0, 0, [(0, 0, 0, 4)]),
        (4, 1, 2, 1, [(0, 8, 0, 4)]),  # four registers to a word
        (8, 1, 3, 3, [(0, 8, 0, 8)]),  # two
        (2, 7, 3, 3, [(0, 14, 0, 2)]),  # eight
        (1, 15, 1, 3, [(0, 13, 0, 1)]),  # sixteen
        (3, 14, 1, 9, [(1, 12, 0, 3)]),  # five, and a third of one
        (3, 11, 3, 6, [(0, 15, 0, 1), (1, 15, 1, 1), (2, 15, 2, 1)]),
        (6, 5, 3, 6, [(1, 14, 0, 2), (2, 12, 2, 4)]),
        (7, 15, 3, 21, [(3, 15, 0, 1), (4, 14, 1, 2), (5, 14, 3, 2), (6, 14, 5, 2)]),
    ],
)
def test_places_of_saved_weights(
    bits: int, block: int, register: int, first: int, pieces: list[tuple[int, ...]]
) -> None:
    """The format on disk: whoever changes it has to raise `pylib.weights.packed.FORMAT`."""
    word, number = Packing(bits, 16, 256).place(block, register)
    assert (word, run_of(bits)[number]) == (first, tuple(Piece(*piece) for piece in pieces))


def test_fragment_order_is_ptxs_table() -> None:
    """PTX ISA 9.7.14.5.8: a0..a7 of mma.m16n8k16's A fragment, 16-bit types."""
    order = Packing.fragment_order()
    assert order.shape == (32, 8)
    assert sorted(order.ravel()) == list(range(256))
    for lane in range(32):
        group_id, thread_in_group = lane >> 2, lane % 4
        for i in range(8):
            row = group_id if i in (0, 1, 4, 5) else group_id + 8
            column = thread_in_group * 2 + (i & 1) + (8 if i >= 4 else 0)
            assert order[lane, i] == row * 16 + column


@given(packings())
def test_k_source_holds_every_column_once_in_order(p: Packing) -> None:
    source = p.k_source
    assert source.shape == (p.padded_k,)
    assert source[source >= 0].tolist() == list(range(p.k))
    assert p.padded_k % p.chunk == 0 and p.chunks * p.chunk == p.padded_k
    assert p.pads_groups or (source[: p.k] == np.arange(p.k)).all()


@given(packings())
def test_groups_are_whole_in_memory(p: Packing) -> None:
    if p.group is None:
        assert p.groups == 1 and p.padded_group is None
        return
    assert p.padded_group is not None and p.padded_group >= p.group and p.padded_group % BLOCK_K == 0
    assert p.padded_group % p.chunk == 0 or p.chunk % p.padded_group == 0
    assert p.groups * p.padded_group == p.padded_k
    column = np.flatnonzero(p.k_source >= 0)
    np.testing.assert_array_equal(column // p.padded_group, p.k_source[column] // p.group)


@given(packings())
def test_shapes(p: Packing) -> None:
    assert p.codes_shape == (p.row_blocks, p.padded_k // p.chunk, p.units, 32, 4)
    assert p.scales_shape == (p.row_blocks, p.groups, 16)
    assert 0 <= 16 * p.row_blocks - p.n < 16
    assert int(np.prod(p.codes_shape)) * 32 == p.bits * 16 * p.row_blocks * p.padded_k


@pytest.mark.parametrize(
    "bits, group, padded",
    [
        (4, 128, 128),
        (4, 32, 32),
        (4, 17, 32),
        (4, 48, 64),
        (4, 100, 128),
        (1, 64, 64),
        (1, 300, 512),
        (8, 96, 96),
    ],
)
def test_padded_group(bits: int, group: int, padded: int) -> None:
    assert Packing(bits, 16, group * 4, group).padded_group == padded


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_round_up(x: int, multiple: int) -> None:
    assert x <= round_up(x, multiple) < x + multiple and round_up(x, multiple) % multiple == 0
