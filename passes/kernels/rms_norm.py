"""The kernel of a root-mean-square norm.

    y[t, h] = x[t, h] / sqrt(mean over h of x[t, h]^2 + eps) * (gain[h] + shift)        in f32, rounded once

A block has a token, all of it in registers. A warp adds up its squares by shuffles, and all warps read the sums of all
from shared memory, in one order.

With a counter, the norm also adds a number to it: how many tokens a cache holds, which the kernels before read.
"""

from __future__ import annotations

from lowbit.dialect.layouts.layout import local
from lowbit.passes.builder import Program, Tile

COLUMNS = 8  # of a thread at once: 16 bytes
_WARP = 32
_MOST_WARPS = 16


def rms_norm_program(hidden: int, element: str, shift: float = 0.0, counts: bool = False) -> Program:
    """Returns the program for tokens of `hidden` numbers, a multiple of 8.

    element   "f16" or "bf16": the type of x, gain and y
    shift     added to the gain: 1 for Gemma's norms
    counts    whether the first of the i32 at the pointer `counter` becomes larger by the i32 parameter `count`

    Parameters: x [m, hidden], gain [hidden], y [m, hidden], eps and m.
    """
    warps = min(_MOST_WARPS, -(-hidden // (_WARP * COLUMNS)))
    threads = warps * _WARP
    names = dict.fromkeys(("x", "gain", "y"), "pointer") | {"eps": "f32", "m": "i32"}
    names |= {"counter": "pointer", "count": "i32"} if counts else {}
    p = Program("rms_norm", threads, ("ceil(m / 1)", 1, 1), names)
    with p:
        token = p.block_id(0)
        pieces = -(-hidden // (threads * COLUMNS))
        layout = local(1, pieces).spatial(1, threads).local(1, COLUMNS)
        whole = layout.shape[1] == hidden
        beyond = ("none", "none" if whole else "zero")
        p.grid_launch_dependents()
        p.grid_wait()
        given = p.global_view(p["x"], element, (-1, hidden), sizes=[p["m"]])
        x = p.cast(p.load(given, (token, 0), layout, beyond), "f32")
        gain = p.cast(p.load(p.global_view(p["gain"], element, (1, hidden)), (0, 0), layout, beyond), "f32")
        mean = _sum_of_squares(p, x, pieces, warps) * (1 / hidden)
        factor = p.reciprocal(p.sqrt(mean + p.splat(p["eps"], "f32", mean.layout)))
        y = p.mul(p.mul(x, factor), gain + shift if shift else gain)
        view = p.global_view(p["y"], element, (-1, hidden), sizes=[p["m"]])
        p.store(p.cast(y, element), view, (token, 0), ("none", "none" if whole else "skip"))
        if counts:
            _count(p, threads)
    return p


def _sum_of_squares(p: Program, x: Tile, pieces: int, warps: int) -> Tile:
    """Returns the sum of the squares of a block's numbers [1, 1], which every thread has."""
    parts = p.reshape(p.mul(x, x), (pieces, warps, _WARP * COLUMNS))
    sums = p.reduce(p.reduce(parts, 0), 2)
    shared = p.alloc_shared("f32", (1, warps))
    p.store(p.reshape(sums, (1, warps)), shared, (0, 0))
    p.barrier()
    return p.reduce(p.load(shared, (0, 0), local(1, warps).replicated(warps * _WARP)), 1)


def _count(p: Program, threads: int) -> None:
    """Adds to the counter, in the block of the first token."""
    counter, layout = p.global_view(p["counter"], "i32", (1,)), local(1).replicated(threads)
    with p.when(p.block_id(0) == 0):
        more = p.load(counter, (0,), layout) + p.splat(p["count"], "i32", layout)
        p.barrier()
        p.store(more, counter, (0,))
