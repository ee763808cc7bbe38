"""Laws of the memory order: every bit of every code is stored once, where its lane can use it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialect.packing import BLOCK_K, UNIT_BYTES, Packing, WordSlot, round_up

BITS = range(1, 9)


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    bits, n = draw(st.integers(1, 8)), draw(st.integers(1, 70))
    group = draw(st.none() | st.integers(16, 300))
    k = draw(st.integers(16, 1200)) if group is None else group * draw(st.integers(1, 6))
    return Packing(bits, n, k, group)


@pytest.mark.parametrize("bits", BITS)
def test_planes_cut_the_code_and_the_chunk(bits: int) -> None:
    p = Packing(bits, 16, 256)
    assert [b for plane in p.planes for b in range(plane.low, plane.low + plane.bits)] == list(range(bits))
    assert [u for plane in p.planes for u in range(plane.first_unit, plane.first_unit + plane.units)] == list(
        range(p.units)
    )
    assert all(plane.bits in (1, 2, 4, 8) for plane in p.planes)
    assert p.units * UNIT_BYTES * 8 == 16 * p.chunk * bits  # no bit is wasted


@pytest.mark.parametrize("bits", BITS)
def test_a_chunk_is_the_smallest(bits: int) -> None:
    p = Packing(bits, 16, 256)
    halves = [plane.bits * 16 * p.chunk // 2 for plane in p.planes]
    assert any(bits_of_half % (8 * UNIT_BYTES) for bits_of_half in halves)


@pytest.mark.parametrize("bits", BITS)
def test_slots_fill_every_bit_of_a_chunk_once(bits: int) -> None:
    p = Packing(bits, 16, 256)
    used = np.zeros((p.units, 4, 32), dtype=int)  # unit, word, bit
    for block in range(p.chunk // BLOCK_K):
        for register in range(4):
            for plane, slot in zip(p.planes, p.slots(block, register)):
                for first in (slot.shift, 16 + slot.shift):
                    used[slot.unit, slot.word, first : first + plane.bits] += 1
                assert plane.first_unit <= slot.unit < plane.first_unit + plane.units
    assert (used == 1).all()


@pytest.mark.parametrize(
    "bits, block, register, slots",
    [
        (4, 0, 0, [(0, 0, 0)]),
        (4, 1, 2, [(0, 1, 8)]),  # four registers to a word
        (8, 1, 3, [(0, 3, 8)]),  # two
        (2, 7, 3, [(0, 3, 14)]),  # eight
        (1, 15, 1, [(0, 3, 13)]),  # sixteen
        (6, 5, 1, [(1, 1, 4), (2, 2, 10)]),  # 4 bits in units 0 and 1, 2 in unit 2
        (7, 15, 3, [(3, 3, 12), (5, 3, 2), (6, 3, 5)]),  # right above each other, modulo 16
    ],
)
def test_slots_of_saved_weights(bits: int, block: int, register: int, slots: list[tuple[int, ...]]) -> None:
    """The format on disk: whoever changes it has to raise `pylib.packed.FORMAT`."""
    assert Packing(bits, 16, 256).slots(block, register) == tuple(WordSlot(*slot) for slot in slots)


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
