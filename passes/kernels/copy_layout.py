"""The layout in which threads copy a tile."""

from __future__ import annotations

import math

from lowbit.dialect.layouts.layout import Layout, local, replicated, spatial


def copy_layout(shape: tuple[int, ...], threads: int, vector: int = 1) -> Layout:
    """A tile over `threads` threads: neighbours along the last dim, `vector` elements of it each; copies if small."""
    rank = len(shape)

    def along(dim: int, size: int) -> tuple[int, ...]:
        return tuple(size if d == dim else 1 for d in range(rank))

    layout = local(*along(rank - 1, vector))
    for dim in reversed(range(rank)):
        size = shape[dim] // (vector if dim == rank - 1 else 1)
        taken = math.gcd(size, threads)
        layout = local(*along(dim, size // taken)) * (spatial(*along(dim, taken)) * layout)
        threads //= taken
    return replicated(threads, rank) * layout
