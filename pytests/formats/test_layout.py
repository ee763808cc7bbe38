"""The laws of the layout algebra, against the definition spelled out independently in `definition`.

Small layouts are taken exhaustively, larger ones by hypothesis; `table()` is itself checked against the
definition first, and everything after that against numpy on tables.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import SMALL, SMALL_SHAPES, layouts, raw_layouts, same

from lowbit.dialect.errors import LayoutError
from lowbit.dialect.layouts.layout import Layout, column_local, column_spatial, local, replicated, spatial


def definition(shape, mode_shape, spatial_modes, local_modes) -> np.ndarray:
    """int [threads, locals, rank], from the words of the docstring: digits of both numbers, then of dims."""
    spatial_sizes = [mode_shape[m] if m >= 0 else -m for m in spatial_modes]
    local_sizes = [mode_shape[m] for m in local_modes]
    out = np.zeros((prod(spatial_sizes), prod(local_sizes), len(shape)), dtype=int)
    for t, thread_digits in enumerate(product(*map(range, spatial_sizes))):
        for l, local_digits in enumerate(product(*map(range, local_sizes))):
            digit = {m: d for m, d in zip(spatial_modes, thread_digits) if m >= 0}
            digit |= dict(zip(local_modes, local_digits))
            mode = 0
            for dim, extent in enumerate(shape):
                reach, value = 1, 0
                while reach < extent:
                    value = value * mode_shape[mode] + digit[mode]
                    reach *= mode_shape[mode]
                    mode += 1
                out[t, l, dim] = value
    return out


@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_every_small_layout_is_its_definition_and_equality_is_equality_of_maps(shape):
    values, maps = defaultdict(set), defaultdict(set)
    for raw in raw_layouts(shape):
        layout, table = Layout(*raw), definition(*raw)
        assert same(layout, shape, table)
        values[table.shape, table.tobytes()].add(layout)
        maps[layout].add((table.shape, table.tobytes()))
        fields = (layout.shape, layout.mode_shape, layout.spatial_modes, layout.local_modes)
        assert Layout(*fields) == layout
        assert np.array_equal(definition(*fields), table)
        assert 1 not in layout.mode_shape
    assert all(len(group) == 1 for group in (*values.values(), *maps.values()))


def test_modes_of_size_one_and_mergeable_modes_vanish():
    plain = Layout((4, 6), (4, 6), (0,), (1,))
    assert plain == Layout((4, 6), (1, 2, 2, 1, 6, 1), (0, 1, 2, 5), (3, 4))
    assert hash(plain) == hash(Layout((4, 6), (2, 2, 3, 2), (0, 1), (2, 3)))
    assert plain != Layout((4, 6), (2, 2, 6), (1, 0), (2,))
    assert Layout((2,), (2,), (-1, 0, -2, -3), ()) == spatial(2).replicated(6)
    assert Layout((2,), (2,), (-2, 0, -3), ()).spatial_modes == (-2, 0, -3)


@given(layouts())
def test_table_index_owner_and_digits_agree(layout):
    table = layout.table()
    assert table.shape == (layout.threads, layout.locals, layout.rank)
    assert layout.threads * layout.locals == layout.size * layout.replication
    owners = defaultdict(list)
    for t in range(layout.threads):
        for l in range(layout.locals):
            index = tuple(table[t, l].tolist())
            assert layout.index(t, l) == index
            owners[index].append((t, l))
            coords = [0] * layout.rank
            for x, digits in ((t, layout.thread_digits()), (l, layout.local_digits())):
                for size, divisor, dim, stride in digits:
                    coords[dim] += ((x // divisor) % size) * stride
            assert tuple(coords) == index
    assert set(owners) == set(product(*map(range, layout.shape)))
    for index, held in owners.items():
        assert layout.owner(index) == held
        assert len(held) == layout.replication


def test_constructors_are_row_and_column_major():
    grid = np.stack(np.unravel_index(np.arange(6), (2, 3)), axis=-1)
    columns = np.stack(np.unravel_index(np.arange(6), (2, 3), order="F"), axis=-1)
    assert same(local(2, 3), (2, 3), grid[None])
    assert same(spatial(2, 3), (2, 3), grid[:, None])
    assert same(column_local(2, 3), (2, 3), columns[None])
    assert same(column_spatial(2, 3), (2, 3), columns[:, None])
    assert same(replicated(5, rank=2), (1, 1), np.zeros((5, 1, 2)))
    assert local() == spatial() == Layout((), (), (), ())


def kronecker(f: Layout, g: Layout) -> np.ndarray:
    outer, inner = f.table(), g.table()
    t = np.arange(f.threads * g.threads)[:, None]
    l = np.arange(f.locals * g.locals)[None]
    return outer[t // g.threads, l // g.locals] * np.array(g.shape, dtype=int) + inner[t % g.threads, l % g.locals]


def test_product_of_small_layouts_is_its_definition_and_quotients_undo_it():
    one_dim = [f for f in SMALL if f.shape in ((1,), (4,), (6,))]
    two_dim = [f for f in SMALL if f.shape in ((2, 2), (1, 4), (2, 3))]
    rng = np.random.default_rng(0)
    for few in (one_dim, two_dim):
        for i, j in rng.integers(0, len(few), (1500, 2)).tolist():
            f, g = few[i], few[j]
            h = f * g
            assert same(h, tuple(np.multiply(f.shape, g.shape).tolist()), kronecker(f, g))
            assert h / g == f


@given(st.integers(1, 3).flatmap(lambda rank: st.tuples(*[layouts(rank)] * 3)))
def test_product_is_associative_with_identity_and_cancels(three):
    f, g, h = three
    assert (f * g) * h == f * (g * h)
    one = local(*[1] * f.rank)
    assert f * one == one * f == f
    assert (f * g) / g == f
    assert f / f == one
    assert f / one == f


def test_product_does_not_commute():
    assert spatial(2) * spatial(1) == spatial(1) * spatial(2)
    assert local(2) * spatial(2) != spatial(2) * local(2)
    assert column_spatial(2, 2) * spatial(2, 2) != spatial(2, 2) * column_spatial(2, 2)


def test_quotient_exists_exactly_when_some_factor_exists():
    """Over layouts of up to 4 elements, h / g answers exactly when a search does."""
    replicas = ((), (2,))
    wholes = {Layout(*raw) for raw in raw_layouts((4,), replicas) + raw_layouts((2,), ((), (2,), (2, 2), (4,)))}
    parts = {Layout(*raw) for shape in ((1,), (2,), (4,)) for raw in raw_layouts(shape, ((), (2,), (2, 2)))}
    products = {(f, g): f * g for f in parts for g in parts}
    for h in wholes:
        for part in parts:
            wanted = [f for f in parts if products[f, part] == h]
            if wanted:
                assert [h / part] == wanted
            else:
                with pytest.raises(LayoutError, match="there is no"):
                    _ = h / part


def test_examples_of_tilus():
    """Sections 4.1 and 4.2 and figures 3 to 5 of the paper."""
    a = local(2, 1).spatial(8, 4).local(1, 2)
    assert (a.shape, a.threads, a.locals) == ((16, 8), 32, 4)
    for t, i in product(range(32), range(4)):
        assert a.index(t, i) == (t // 4 + i // 2 * 8, t % 4 * 2 + i % 2)
    assert local(2, 3).index(0, 4) == (1, 1) and spatial(2, 3).index(4, 0) == (1, 1)
    c = local(2, 1) * spatial(2, 3) * local(1, 2)
    for t, i in product(range(6), range(4)):
        assert c.index(t, i) == (i // 2 * 2 + t // 3, t % 3 * 2 + i % 2)
    assert local(2, 4) / local(1, 2) == local(2, 2)
    # 6.2: a tile of i6 with 3 bytes per thread is read as bytes laid out
    # local(n2).spatial(threads).local(n1).
    i6, u8 = local(2, 1).column_spatial(4, 8).local(2, 1), local(3).spatial(32).local(1)
    assert i6.threads == u8.threads and i6.locals * 6 == u8.locals * 8


def test_inverse_of_every_small_matrix_layout():
    for f in (f for f in SMALL if f.rank == 2 and f.replication == 1):
        g = f.inverse()
        assert g.inverse() == f
        assert (g.shape, g.threads, g.locals) == ((f.threads, f.locals), *f.shape)
        for t, l in product(range(f.threads), range(f.locals)):
            assert g.index(*f.index(t, l)) == (t, l)


@given(layouts(replication=False))
def test_inverse_of_any_rank_through_reshape(f):
    flat = f.reshape((1, f.size))
    inverse = flat.inverse()
    assert inverse.inverse() == flat
    numbers = np.ravel_multi_index(np.moveaxis(f.table(), -1, 0), f.shape)
    for t, l in product(range(f.threads), range(f.locals)):
        assert inverse.index(0, int(numbers[t, l])) == (t, l)
