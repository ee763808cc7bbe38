"""Layouts for tests: all small ones, and a strategy for larger ones."""

from __future__ import annotations

from itertools import combinations, permutations, product
from math import prod

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from lowbit.dialect.layouts.layout import Layout

RAW = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def factorizations(n: int):
    """All ways to write n as an ordered product of factors > 1."""
    if n == 1:
        yield ()
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in factorizations(n // first))


def raw_layouts(shape: tuple[int, ...], replicas: tuple[tuple[int, ...], ...] = ((), (2,), (2, 2))) -> list[RAW]:
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
