"""The kernel that writes a row of x for each slot of an expert: y[s] = x[rows[s]].

A matmul then has the rows of a token tile side by side, which Hopper's copy engine brings to shared memory; it gathers
none itself. A block has a few slots, whose rows are on their way together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import spatial

if TYPE_CHECKING:
    from lowbit.passes.builder import Program

_THREADS = 256  # of a block, each with 16 bytes of a row
_COLUMNS = 8  # of a thread
_SLOTS = 4  # of a block


def gather_rows_program(k: int) -> Program:
    """Returns the program for rows of k columns of 16 bits, a multiple of 8.

    Parameters: x [rows, k], rows i32 [m], y [m, k], and the number of slots, m.
    """
    from lowbit.passes.builder import Program

    part = _THREADS * _COLUMNS
    names = dict.fromkeys(("x", "rows", "y"), "pointer") | {"m": "i32"}
    p = Program("gather_rows", _THREADS, (f"ceil(m / {_SLOTS})", -(-k // part), 1), names)
    with p:
        m, slot, column = p["m"], p.block_id(0) * _SLOTS, p.block_id(1) * part
        p.grid_launch_dependents()
        p.grid_wait()
        rows = p.global_view(p["rows"], "i32", (-1,), sizes=[m])
        x, y = (p.global_view(p[name], "f16", (-1, k), sizes=[m]) for name in ("x", "y"))
        layout, whole = spatial(1, _THREADS).local(1, _COLUMNS), k % part == 0
        places = [p.read_index(rows, ((slot + i).min(m - 1),)) for i in range(_SLOTS)]
        every = [p.load(x, (place, column), layout, ("none", "none" if whole else "zero")) for place in places]
        for i, numbers in enumerate(every):
            p.store(numbers, y, (slot + i, column), ("skip", "none" if whole else "skip"))
    return p
