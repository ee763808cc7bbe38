"""The kernel of a root-mean-square norm.

    y[t, h] = x[t, h] / sqrt(mean over h of x[t, h]^2 + eps) * (gain[h] + shift)        in f32, rounded once

A block has a token, all of it in registers. A warp adds up its squares by shuffles, and all warps read the sums of all
from shared memory, in one order.

With a counter, the norm also adds a number to it: how many tokens a cache holds, which the kernels before read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import local

if TYPE_CHECKING:
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
    from lowbit.passes.builder import Program

    threads = Token.threads(hidden)
    names = dict.fromkeys(("x", "gain", "y"), "pointer") | {"eps": "f32", "m": "i32"}
    names |= {"counter": "pointer", "count": "i32"} if counts else {}
    p = Program("rms_norm", threads, ("ceil(m / 1)", 1, 1), names)
    with p:
        token = Token(p, hidden, element)
        p.grid_launch_dependents()
        p.grid_wait()
        y = token.normed(token.read("x"), "gain", "eps", shift)
        token.write(p.cast(y, element), "y")
        if counts:
            count_in(p, threads)
    return p


class Token:
    """The token of a block: `hidden` numbers of tensors [m, hidden], as the registers of all threads hold them."""

    def __init__(self, p: Program, hidden: int, element: str) -> None:
        self.p, self.hidden, self.element, self.number = p, hidden, element, p.block_id(0)
        threads = self.threads(hidden)
        self.warps = threads // _WARP
        self.pieces = -(-hidden // (threads * COLUMNS))
        self.layout = local(1, self.pieces).spatial(1, threads).local(1, COLUMNS)
        self.is_whole = self.layout.shape[1] == hidden

    @staticmethod
    def threads(hidden: int) -> int:
        """Returns how many threads a block has."""
        return min(_MOST_WARPS, -(-hidden // (_WARP * COLUMNS))) * _WARP

    def read(self, name: str) -> Tile:
        """Returns the token's numbers of a tensor, in f32; zeros beyond them."""
        view = self.p.global_view(self.p[name], self.element, (-1, self.hidden), sizes=[self.p["m"]])
        return self.p.cast(self.p.load(view, (self.number, 0), self.layout, self._beyond("zero")), "f32")

    def write(self, numbers: Tile, name: str) -> None:
        """Writes the token's numbers of a tensor, which are of its type."""
        view = self.p.global_view(self.p[name], self.element, (-1, self.hidden), sizes=[self.p["m"]])
        self.p.store(numbers, view, (self.number, 0), self._beyond("skip"))

    def normed(self, x: Tile, gain: str, eps: str, shift: float) -> Tile:
        """Returns the norm of numbers, with the parameters of these names, in f32."""
        p = self.p
        given = p.global_view(p[gain], self.element, (1, self.hidden))
        gains = p.cast(p.load(given, (0, 0), self.layout, self._beyond("zero")), "f32")
        mean = self._sum_of_squares(x) * (1 / self.hidden)
        factor = p.reciprocal(p.sqrt(mean + p.splat(p[eps], "f32", mean.layout)))
        return p.mul(p.mul(x, factor), gains + shift if shift else gains)

    def _beyond(self, word: str) -> tuple[str, str]:
        return "none", "none" if self.is_whole else word

    def _sum_of_squares(self, x: Tile) -> Tile:
        """Returns the sum of the squares of a block's numbers [1, 1], which every thread has."""
        p = self.p
        parts = p.reshape(p.mul(x, x), (self.pieces, self.warps, _WARP * COLUMNS))
        sums = p.reduce(p.reduce(parts, 0), 2)
        shared = p.alloc_shared("f32", (1, self.warps))
        p.store(p.reshape(sums, (1, self.warps)), shared, (0, 0))
        p.barrier()
        return p.reduce(p.load(shared, (0, 0), local(1, self.warps).replicated(self.warps * _WARP)), 1)


def count_in(p: Program, threads: int) -> None:
    """Adds `count` to the counter, in the block of the first token."""
    counter, layout = p.global_view(p["counter"], "i32", (1,)), local(1).replicated(threads)
    with p.when(p.block_id(0) == 0):
        more = p.load(counter, (0,), layout) + p.splat(p["count"], "i32", layout)
        p.barrier()
        p.store(more, counter, (0,))
