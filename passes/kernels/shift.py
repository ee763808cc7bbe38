"""The kernel that makes room in a cache that is full: the first token is dropped, and all others move up by one place.

    cache[i] = cache[i + 1]     for all places but the last;  held = length - 1

Caches of sliding windows do so for each token. A block has a few columns of a head at all places, and keeps them in
registers: it has read all before it writes the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import local

if TYPE_CHECKING:
    from lowbit.passes.builder import Program

COLUMNS = 8  # of a thread: 16 bytes
_WARP = 32
_MOST_WARPS = 16
_WIDE = 2048  # places up to which a block has 32 bytes of each, what memory is read in; of more it has 16


def shift_program(length: int, columns: int, element: str) -> Program:
    """Returns the program for caches [batch, heads, length, columns] of keys and of values, with columns a multiple of
    16. Registers hold 4096 places.

    element   "f16" or "bf16"

    Parameters: keys and values; `held`, an i32, which becomes length - 1; m, the number of heads of all sequences.
    """
    from lowbit.passes.builder import Program

    lanes = 2 if length <= _WIDE else 1
    warps = min(_MOST_WARPS, -(-length * lanes // _WARP))
    rows = warps * _WARP // lanes
    pieces = -(-length // rows)
    names = {"keys": "pointer", "values": "pointer", "held": "pointer", "m": "i32"}
    p = Program("shift", warps * _WARP, ("ceil(m / 1)", columns // (lanes * COLUMNS), 2), names)
    layout = local(pieces, 1).spatial(rows, lanes).local(1, COLUMNS)
    with p:
        p.grid_launch_dependents()
        p.grid_wait()
        first, column = p.block_id(0) * length, p.block_id(1) * (lanes * COLUMNS)
        for which, name in enumerate(("keys", "values")):
            with p.when(p.block_id(2) == which):
                view = p.global_view(p[name], element, (-1, columns), sizes=[first + length])
                moved = p.load(view, (first + 1, column), layout, ("zero", "none"))
                p.materialize(moved)
                p.barrier()
                ends = p.global_view(p[name], element, (-1, columns), sizes=[first + (length - 1)])
                p.store(moved, ends, (first, column), ("skip", "none"))
        with p.when((p.block_id(0) == 0) & (p.block_id(1) == 0) & (p.block_id(2) == 0)):
            counter, alone = p.global_view(p["held"], "i32", (1,)), local(1).replicated(warps * _WARP)
            p.store(p.constant(length - 1, "i32", alone), counter, (0,))
    return p
