"""The kernel that adds up what the experts of a token make of it.

    y[t, h] = sum over j of weights[t, j] * o[slots[t, j], h]        in f32, in the order of j, rounded once

A block has some columns of a token. The rows of o of all places are on their way before the first is added. A place
whose slot is in no token tile reads neither its row nor its weight: it adds exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import spatial

if TYPE_CHECKING:
    from lowbit.passes.builder import Program, Tile

_THREADS = 64  # of a block, each with 16 bytes of a row: so a single token keeps some multiprocessors busy
_COLUMNS = 8  # of a thread


def combine_program(hidden: int, top_k: int, element: str, weights: str = "f32") -> Program:
    """Returns the program for tokens of `hidden` columns, a multiple of 8, and `top_k` experts.

    element  "f16", "bf16" or "f32": the type of o and y
    weights  the same: the type of weights

    Parameters: o [m * top_k, hidden], slots [m, top_k] and tiles [m * top_k + 1, 3] of a `Routing`, weights [m, top_k],
    y [m, hidden], and m.
    """
    from lowbit.passes.builder import Program

    part = _THREADS * _COLUMNS
    names = dict.fromkeys(("o", "slots", "tiles", "weights", "y"), "pointer") | {"m": "i32"}
    p = Program("combine", _THREADS, ("ceil(m / 1)", -(-hidden // part), 1), names)
    with p:
        m, token, first = p["m"], p.block_id(0), p.block_id(1) * part
        p.grid_launch_dependents()
        p.grid_wait()
        held = p.read_index(p.global_view(p["tiles"], "i32", (-1, 3), sizes=[m * top_k + 1]), (0, 1))
        slots = p.global_view(p["slots"], "i32", (-1, top_k), sizes=[m])
        of_places = p.global_view(p["weights"], weights, (-1, top_k), sizes=[m])
        o = p.global_view(p["o"], element, (-1, hidden), sizes=[m * top_k])
        layout = spatial(1, _THREADS).local(1, _COLUMNS)
        whole = hidden % part == 0
        total: Tile | None = None
        for place in range(top_k):
            slot = p.read_index(slots, (token, place))
            here = slot < held
            row, of_token = here.select(slot, m * top_k), here.select(token, m)  # else beyond the end, where zeros are
            term = p.cast(p.load(o, (row, first), layout, ("zero", "none" if whole else "zero")), "f32")
            weight = p.cast(p.load(of_places, (of_token, place), layout.reduce((1,)), ("zero", "none")), "f32")
            total = p.mul(term, weight) if total is None else p.fma(term, weight, total)
        if total is not None:
            y = p.global_view(p["y"], element, (-1, hidden), sizes=[m])
            p.store(p.cast(total, element), y, (token, first), ("none", "none" if whole else "skip"))
    return p
