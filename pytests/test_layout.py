"""The laws of the layout algebra, against the definition spelled out independently in `definition`.

Small layouts are taken exhaustively, larger ones by hypothesis; `table()` is itself checked against the
definition first, and everything after that against numpy on tables.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lowbit.dialect.errors import LayoutError, LowbitError
from lowbit.dialect.layouts import layout as fragments
from lowbit.dialect.layouts.layout import Layout, column_local, column_spatial, local, replicated, spatial

RAW = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


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


def factorizations(n: int):
    """All ways to write n as an ordered product of factors > 1."""
    if n == 1:
        yield ()
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in factorizations(n // first))


def raw_layouts(
    shape: tuple[int, ...], replicas: tuple[tuple[int, ...], ...] = ((), (2,), (2, 2))
) -> list[RAW]:
    """Every way to call the constructor for a shape, canonical or not, with the given replication digits."""
    found: list[RAW] = []
    for per_dim in product(*map(factorizations, shape)):
        modes = tuple(size for dim in per_dim for size in dim)
        for count in range(len(modes) + 1):
            for chosen in combinations(range(len(modes)), count):
                rest = [m for m in range(len(modes)) if m not in chosen]
                for sizes in replicas:
                    for spatial_modes in set(permutations([*chosen, *(-s for s in sizes)])):
                        found += [(shape, modes, spatial_modes, order) for order in permutations(rest)]
    return found


SMALL_SHAPES = [(), (1,), (4,), (6,), (8,), (2, 2), (4, 2), (2, 3), (1, 4), (2, 1, 2)]
SMALL = [layout for shape in SMALL_SHAPES for layout in {Layout(*raw) for raw in raw_layouts(shape)}]


@st.composite
def layouts(draw, rank: int | None = None, replication: bool = True) -> Layout:
    """A layout of at most 512 elements with modes and replication digits in any order."""
    rank = rank or draw(st.integers(1, 3))
    per_dim = [draw(st.lists(st.sampled_from([2, 2, 3, 4]), max_size=3)) for _ in range(rank)]
    modes = [size for dim in per_dim for size in dim]
    assume(prod(modes) <= 512)
    order = draw(st.permutations(range(len(modes))))
    cut = draw(st.integers(0, len(modes)))
    spatial_modes = list(order[:cut])
    for size in draw(st.lists(st.sampled_from([2, 3]), max_size=2)) if replication else []:
        spatial_modes.insert(draw(st.integers(0, len(spatial_modes))), -size)
    return Layout(tuple(map(prod, per_dim)), tuple(modes), tuple(spatial_modes), tuple(order[cut:]))


def same(layout: Layout, shape: tuple[int, ...], table: np.ndarray) -> bool:
    return layout.shape == shape and np.array_equal(layout.table(), table)


# The map and its canonical form


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


# Product


def kronecker(f: Layout, g: Layout) -> np.ndarray:
    outer, inner = f.table(), g.table()
    t = np.arange(f.threads * g.threads)[:, None]
    l = np.arange(f.locals * g.locals)[None]
    return (
        outer[t // g.threads, l // g.locals] * np.array(g.shape, dtype=int)
        + inner[t % g.threads, l % g.locals]
    )


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
    wholes = {
        Layout(*raw) for raw in raw_layouts((4,), replicas) + raw_layouts((2,), ((), (2,), (2, 2), (4,)))
    }
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


# Inverse


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


# Change of shape


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
def test_reshape_squeeze_permute_against_numpy(f, data):
    assert same_row_major(f, f.flatten()) and f.flatten().reshape(f.shape) == f
    dim = data.draw(st.integers(0, f.rank))
    wide = f.unsqueeze(dim)
    assert same(wide, (*f.shape[:dim], 1, *f.shape[dim:]), np.insert(f.table(), dim, 0, axis=-1))
    assert wide.squeeze(dim) == f
    dims = data.draw(st.permutations(range(f.rank)))
    moved = f.permute(dims)
    assert same(moved, tuple(f.shape[d] for d in dims), f.table()[..., dims])
    assert moved.permute(np.argsort(dims).tolist()) == f


# Reduction, broadcast, parts


@given(layouts(), st.data())
def test_reduce_replicates_over_the_threads_of_the_reduced_dims(f, data):
    dims = data.draw(st.sets(st.integers(0, f.rank - 1)))
    r = f.reduce(sorted(dims))
    assert r.shape == tuple(1 if d in dims else n for d, n in enumerate(f.shape)) and r.threads == f.threads
    kept = f.table()
    kept[..., sorted(dims)] = 0
    # Every thread holds each result for which it had a part, once, in the order of its own slots.
    for t in range(f.threads):
        assert [tuple(i) for i in r.table()[t].tolist()] == list(
            dict.fromkeys(tuple(i) for i in kept[t].tolist())
        )


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


# Text


def test_text_of_every_small_layout_round_trips():
    forms = set()
    for f in SMALL:
        assert Layout.parse(str(f)) == f
        forms.add(str(f).partition("(")[0])
    assert forms == {"local", "spatial", "column_local", "column_spatial", "replicated", "layout"}


@given(layouts(), layouts(rank=2), layouts(rank=2))
def test_text_round_trips(f, g, h):
    for layout in (f, g * h, g.reduce([0]) * h):
        assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "text",
    [
        "local(2, 1).spatial(8, 4).local(1, 2)",
        "local(2, 1).column_spatial(4, 8).local(2, 1)",
        "spatial(4, 1).column_local(2, 2).spatial(8, 4).local(1, 2)",
        "replicated(4, rank=2).spatial(2, 2)",
        "local(2, 1).spatial(8, 1).replicated(4)",
        "local(1, 1)",
        "local()",
        "replicated(32, rank=0)",
        "layout(shape=(4,), modes=(2, 2), spatial=(1, 0), local=())",
    ],
)
def test_text_of_known_layouts(text):
    assert str(Layout.parse(text)) == text


def test_a_product_is_written_where_there_is_one():
    """Products of atoms never fall back to the explicit form."""
    atoms = [
        local(2, 1),
        spatial(1, 2),
        column_spatial(2, 2),
        column_local(2, 3),
        replicated(2, 2),
        spatial(3, 2),
    ]
    for f, g, h in product(atoms, repeat=3):
        assert not str(f * g * h).startswith("layout")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "local",
            "local(2",
            "3",
            "locals(2)",
            "local(2).shape(3)",
            "local('a')",
            "local(2.0)",
            "local(x)",
        ),
        *("local(2) * local(2)", "layout(shape=(4,))", "local(0)", "local(2).spatial(2, 2)"),
        "__import__('os').getcwd()",
    ],
)
def test_unreadable_text_is_a_layout_error(text):
    with pytest.raises(LayoutError):
        Layout.parse(text)


# Fragments, from the formulas of PTX ISA 9.7.14.5; g is groupID, q is threadID_in_group, i the element


def two_halves(i: int) -> int:
    return 8 if i in (2, 3, 6, 7) else 0


FRAGMENTS = {
    "MMA_M16N8K16_A": (
        (16, 16),
        8,
        lambda g, q, i: (g + two_halves(i), 2 * q + (i & 1) + (8 if i >= 4 else 0)),
    ),
    "MMA_M16N8K16_B": ((16, 8), 4, lambda g, q, i: (2 * q + (i & 1) + (8 if i >= 2 else 0), g)),
    "MMA_M16N8K16_B_NK": ((8, 16), 4, lambda g, q, i: (g, 2 * q + (i & 1) + (8 if i >= 2 else 0))),
    "MMA_M16N8K32_A": (
        (16, 32),
        16,
        lambda g, q, i: (g + (8 if i // 4 in (1, 3) else 0), 4 * q + (i & 3) + (16 if i >= 8 else 0)),
    ),
    "MMA_M16N8K32_B_NK": ((8, 32), 8, lambda g, q, i: (g, 4 * q + (i & 3) + (16 if i >= 4 else 0))),
    "MMA_M16N8_D": ((16, 8), 4, lambda g, q, i: (g if i < 2 else g + 8, 2 * q + (i & 1))),
    "MMA_M16N8_PAIRS": ((16, 2), 2, lambda g, q, i: (g + 8 * i, q % 2)),
}


@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragment_is_the_table_of_the_ptx_isa(name):
    fragment = getattr(fragments, name)
    shape, elements, row_column = FRAGMENTS[name]
    assert (fragment.shape, fragment.threads, fragment.locals) == (shape, 32, elements)
    for lane, i in product(range(32), range(elements)):
        assert fragment.index(lane, i) == row_column(lane >> 2, lane % 4, i)


def test_no_fragment_is_left_out():
    assert {name for name, value in vars(fragments).items() if isinstance(value, Layout)} == set(FRAGMENTS)


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Layout((4,), (3,), (0,), ()), r"modes=\(3,\) do not tile shape=\(4,\)"),
        (lambda: Layout((4,), (4, 2), (0, 1), ()), "do not tile"),
        (lambda: Layout((4,), (), (), ()), "do not tile"),
        (lambda: Layout((0,), (), (), ()), "do not tile"),
        (lambda: Layout((4,), (2, 2), (0,), ()), "exactly once|must be once"),
        (lambda: Layout((4,), (2, 2), (0, 1), (1,)), "must be once"),
        (lambda: Layout((4,), (4,), (0,), (-2,)), "only spatial may replicate"),
        (lambda: replicated(0, 1), "must be once"),
        (
            lambda: local(2) * local(2, 2),
            r"\(local\(2\)\) \* \(local\(2, 2\)\) needs equal ranks, not 1 and 2",
        ),
        (lambda: spatial(4) / local(2), r"\(spatial\(4\)\) / \(local\(2\)\)"),
        (lambda: spatial(4, 2) / spatial(4), "there is no f"),
        (lambda: spatial(6) / spatial(4), "there is no f"),
        (lambda: spatial(4).inverse(), "rank 1"),
        (lambda: spatial(4, 1).replicated(2).inverse(), "replication 2"),
        (lambda: spatial(4).index(4), "thread 4"),
        (lambda: spatial(4).index(0, 1), "slot 1"),
        (lambda: spatial(4).owner((4,)), "outside"),
        (lambda: spatial(4).owner((0, 0)), "outside"),
        (lambda: local(4).reshape((2, 3)), "cannot reshape"),
        (lambda: local(4).reshape((-2, -2)), "cannot reshape"),
        (lambda: local(4).unsqueeze(2), "unsqueeze"),
        (lambda: local(4).squeeze(0), "size 1"),
        (lambda: local(4, 2).permute((0, 0)), "distinct"),
        (lambda: local(4, 2).permute((0,)), "all 2 dims"),
        (lambda: local(4, 2).reduce((2,)), "rank 2"),
        (lambda: local(4, 2).broadcast_to((4, 4)), "only dims of size 1 grow"),
        (lambda: local(4, 1).slots_for(local(2, 4)), "only dims of size 1 grow"),
        (lambda: local(4).restrict(0, 2, 3), "no range"),
        (lambda: spatial(4).restrict(0, 0, 2), "local digits alone"),
    ],
)
def test_errors_name_the_reason(call, message):
    with pytest.raises(LayoutError, match=message) as caught:
        call()
    assert isinstance(caught.value, LowbitError)
