"""Layouts as text, fragments of the PTX ISA, and errors."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from layouts import SMALL, layouts

from lowbit.dialect.errors import LayoutError, LowbitError
from lowbit.dialect.layouts import fragments
from lowbit.dialect.layouts.layout import Layout, column_local, column_spatial, local, replicated, spatial
from lowbit.dialect.layouts.parse import parse_layout


def test_text_of_every_small_layout_round_trips():
    forms = set()
    for f in SMALL:
        assert parse_layout(str(f)) == f
        forms.add(str(f).partition("(")[0])
    assert forms == {"local", "spatial", "column_local", "column_spatial", "replicated", "layout"}


@given(layouts(), layouts(rank=2), layouts(rank=2))
def test_text_round_trips(f, g, h):
    for layout in (f, g * h, g.reduce([0]) * h):
        assert parse_layout(str(layout)) == layout


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
    assert str(parse_layout(text)) == text


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
        parse_layout(text)


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
