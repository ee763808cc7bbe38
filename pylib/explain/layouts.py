"""Tiles as grids of lanes and registers, by the layouts in the types of the tile program."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.layouts.parse import parse_layout
from lowbit.pylib.explain.figures import Cell, Grid

SIDE = 32
"""Rows and columns that are drawn of a layout."""
_TYPE = re.compile(r'^(!reg_\w+) = !lowbit\.reg<\[([\d, ]+)\], (.+), "([^"]+)">$', re.MULTILINE)


def layout_grids(tile: str) -> list[Grid]:
    """The layouts of a tile program's types, each once, by the number of their elements per thread."""
    found: dict[Layout, str] = {}
    for name, _, element, text in _TYPE.findall(tile):
        found.setdefault(parse_layout(text), f"{name} of {element}")
    ordered = sorted(found, key=lambda layout: -layout.locals * layout.threads)
    return [layout_grid(layout, found[layout]) for layout in ordered]


def layout_grid(layout: Layout, name: str) -> Grid:
    """The first tile of a layout's last two dims: in every cell who has the element."""
    rank = layout.rank
    height, width = (*(1,) * (2 - rank), *layout.shape)[-2:]
    thread, slot = (owner.reshape(-1, height, width)[0] for owner in _owners(layout))
    rows: list[tuple[str, tuple[Cell, ...]]] = []
    for row in range(min(height, SIDE)):
        owners = [(int(thread[row, c]), int(slot[row, c])) for c in range(min(width, SIDE))]
        cells = (_cell(layout, row, column, *owner) for column, owner in enumerate(owners))
        rows.append((str(row), tuple(cells)))
    shown = "" if max(height, width) <= SIDE else f"; the first {len(rows)} x {min(width, SIDE)} elements are shown"
    about = (
        f"{layout}: {' x '.join(map(str, layout.shape))} elements, {layout.locals} in registers of each of "
        f"{layout.threads} threads{shown}. A cell has lane:slot, which of the thread's elements it is; of a tile with "
        "more dims it is the first index of these."
    )
    return Grid(f"Tile {name}", about, "element", tuple(str(c) for c in range(min(width, SIDE))), tuple(rows))


def _owners(layout: Layout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first thread that holds each element, and its slot there: two arrays of the tile's shape."""
    table = layout.table().reshape(-1, layout.rank)
    at = np.ravel_multi_index(tuple(table.T), layout.shape)
    first = np.empty(layout.size, np.int64)
    first[at[::-1]] = np.arange(len(at))[::-1]  # the lowest one stays
    thread, slot = np.divmod(first.reshape(layout.shape), layout.locals)
    return thread, slot


def _cell(layout: Layout, row: int, column: int, thread: int, slot: int) -> Cell:
    more = f", and {layout.replication - 1} more threads" if layout.replication > 1 else ""
    who = f"warp {thread // 32}, lane {thread % 32}, slot {slot}{more}"
    return Cell(f"{thread % 32}:{slot}", f"element ({row}, {column}): {who}", thread % 32)
