"""Layouts in other shapes: reshape, reduce, broadcast, slots and restrict, against numpy on tables."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import SMALL, layouts, raw_layouts, same

from lowbit.dialect.errors import LayoutError
from lowbit.dialect.layouts import fragments
from lowbit.dialect.layouts.layout import Layout, column_spatial, local, spatial


def same_row_major(f: Layout, g: Layout) -> bool:
    numbers = [np.ravel_multi_index(np.moveaxis(x.table(), -1, 0), x.shape) for x in (f, g)]
    return np.array_equal(*numbers)


def test_reshape_finds_a_layout_exactly_when_there_is_one():
    shapes = [(12,), (2, 6), (3, 4), (4, 3), (2, 2, 3), (1, 12)]
    every = {shape: {Layout(*raw) for raw in raw_layouts(shape, ((),))} for shape in shapes}
    refused = 0
    for source, target in product(shapes, shapes):
        for f in every[source]:
            wanted = [g for g in every[target] if g.threads == f.threads and same_row_major(f, g)]
            if wanted:
                assert [f.reshape(target)] == wanted
            else:
                refused += 1
                with pytest.raises(LayoutError, match="cannot reshape"):
                    f.reshape(target)
    assert refused


@given(layouts(), st.data())
def test_reshape_unsqueeze_permute_against_numpy(f, data):
    flat = f.reshape((f.size,))
    assert same_row_major(f, flat) and flat.reshape(f.shape) == f
    dim = data.draw(st.integers(0, f.rank))
    wide = f.unsqueeze(dim)
    assert same(wide, (*f.shape[:dim], 1, *f.shape[dim:]), np.insert(f.table(), dim, 0, axis=-1))
    assert wide.reshape(f.shape) == f
    dims = data.draw(st.permutations(range(f.rank)))
    moved = f.permute(dims)
    assert same(moved, tuple(f.shape[d] for d in dims), f.table()[..., dims])
    assert moved.permute(np.argsort(dims).tolist()) == f


@given(layouts(), st.data())
def test_reduce_replicates_over_the_threads_of_the_reduced_dims(f, data):
    dims = data.draw(st.sets(st.integers(0, f.rank - 1)))
    r = f.reduce(sorted(dims))
    assert r.shape == tuple(1 if d in dims else n for d, n in enumerate(f.shape)) and r.threads == f.threads
    kept = f.table()
    kept[..., sorted(dims)] = 0
    # Every thread holds each result for which it had a part, once, in the order of its own slots.
    for t in range(f.threads):
        assert [tuple(i) for i in r.table()[t].tolist()] == list(dict.fromkeys(tuple(i) for i in kept[t].tolist()))


@given(layouts(), st.data())
def test_broadcast_undoes_reduce_and_slots_find_the_element(f, data):
    dims = sorted(data.draw(st.sets(st.integers(0, f.rank - 1))))
    r = f.reduce(dims)
    shape = tuple(data.draw(st.integers(1, 5)) if n == 1 else n for n in r.shape)
    wide = r.broadcast_to(shape)
    assert (wide.shape, wide.threads) == (shape, r.threads)
    assert wide.reduce([d for d, (n, m) in enumerate(zip(r.shape, shape)) if n != m]) == r
    for target in (f, wide):
        slots = r.slots_for(target)
        wanted = target.table() % np.array(r.shape)
        assert np.array_equal(r.table()[:, slots], wanted)


def test_slots_for_renames_registers_and_refuses_shuffles():
    f = spatial(4, 2).local(2, 3)
    assert f.slots_for(spatial(4, 2).column_local(2, 3)) == (0, 3, 1, 4, 2, 5)
    with pytest.raises(LayoutError, match="between threads"):
        f.slots_for(column_spatial(4, 2).local(2, 3))
    scales = fragments.MMA_M16N8K16_A.reduce([1])
    assert str(scales) == "local(2, 1).spatial(8, 1).replicated(4)"
    assert scales.slots_for(fragments.MMA_M16N8K16_A) == (0, 0, 1, 1, 0, 0, 1, 1)


def is_run_of_one_mode(f: Layout, dim: int, start: int, stop: int) -> bool:
    """Whether [start, stop) is some whole values of one mode of `dim` within one value of the modes above."""
    before, reach = prod(f.shape[:dim]), np.cumprod(f.mode_shape)
    sizes = [n for n, r in zip(f.mode_shape, reach) if before < r <= before * f.shape[dim]]
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return (start, stop) == (0, f.shape[dim]) or any(
        start % stride == stop % stride == 0 and start // (stride * n) == (stop - 1) // (stride * n)
        for stride, n in zip(strides, sizes)
    )


def test_restrict_answers_exactly_when_every_thread_keeps_the_same_run_of_slots():
    answered = refused = 0
    for f in SMALL:
        table = f.table()
        for dim, extent in enumerate(f.shape):
            for start, stop in combinations(range(extent + 1), 2):
                inside = (table[..., dim] >= start) & (table[..., dim] < stop)
                if (inside == inside[0]).all() and is_run_of_one_mode(f, dim, start, stop):
                    answered += 1
                    part, slots = f.restrict(dim, start, stop - start)
                    assert list(slots) == np.flatnonzero(inside[0]).tolist()
                    taken = table[:, list(slots)] - np.eye(f.rank, dtype=int)[dim] * start
                    assert same(part, (*f.shape[:dim], stop - start, *f.shape[dim + 1 :]), taken)
                else:
                    refused += 1
                    with pytest.raises(LayoutError, match="local digits alone do not cut"):
                        f.restrict(dim, start, stop - start)
    assert answered > 500 and refused > 500


def test_restrict_cuts_a_fragment_into_its_registers():
    a = fragments.MMA_M16N8K16_A
    assert a.restrict(1, 8, 8) == (fragments.MMA_M16N8_D, (4, 5, 6, 7))
    assert a.restrict(-2, 8, 8) == (fragments.MMA_M16N8K16_B_NK, (2, 3, 6, 7))
    tile = local(3, 5) * a
    part, slots = tile.restrict(1, 32, 48)
    assert part == local(3, 3) * a and slots[:8] == tuple(range(16, 24))
    with pytest.raises(LayoutError, match=r"local digits alone do not cut \[2, 6\) of dim 0"):
        a.restrict(0, 2, 4)
