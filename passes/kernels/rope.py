"""The kernel between the projection to queries, keys and values, and attention: it normalizes and rotates heads, and
appends keys and values to a cache.

    head = x / sqrt(mean of x^2 + eps) * (gain + shift)         where queries and keys have a norm
    head = [a cos - b sin, b cos + a sin]                       of its halves a and b, for queries and keys

in f32, rounded once. A token's place in the cache is the number of tokens that it has held so far, and the token's own
among the new ones of its sequence.

A block is one warp, and has a head of a token. A thread has the same columns of both halves, so that nothing is
exchanged but the sum of a norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowbit.dialect.layouts.layout import spatial
from lowbit.passes.builder import Memory, Program, Scalar, Tile

_WARP = 32


@dataclass(frozen=True)
class Heads:
    """The heads of a layer of attention.

    queries   how many there are, a multiple of `keys`
    keys      how many there are, and as many values
    columns   of a head, a multiple of 16
    """

    queries: int
    keys: int
    columns: int

    @property
    def all(self) -> int:
        """Returns how many heads the projection makes of a token."""
        return self.queries + 2 * self.keys

    @property
    def group(self) -> int:
        """Returns how many queries share a key."""
        return self.queries // self.keys


@dataclass(frozen=True)
class HeadNorm:
    """The norms of queries and keys, whose gains are the parameters `query_gain` and `key_gain` [columns].

    shift   added to gains
    """

    shift: float = 0.0


def rope_program(heads: Heads, element: str, norm: HeadNorm | None = None) -> Program:
    """Returns the program for heads of queries, keys and values, which lie side by side in this order.

    element   "f16" or "bf16": the type of all tensors

    Parameters: x [m, heads.all * columns]; cos and sin [m, columns], whose halves are equal; q [m, heads.queries *
    columns], which is written; keys and values [batch, heads.keys, length, columns], which are appended to; `held`, an
    i32: how many tokens there are in the cache; m; `tokens`, the new ones of a sequence; `length`; with a norm the
    gains and eps.
    """
    names: dict[str, str] = dict.fromkeys(("x", "cos", "sin", "q", "keys", "values", "held"), "pointer")
    names |= dict.fromkeys(("m", "tokens", "length"), "i32")
    names |= {"query_gain": "pointer", "key_gain": "pointer", "eps": "f32"} if norm else {}
    p = Program("rope", _WARP, ("ceil(m / 1)", heads.all, 1), names)
    with p:
        p.grid_launch_dependents()
        p.grid_wait()
        _Block(p, heads, element, norm).write()
    return p


class _Block:
    """What one block does for its head."""

    def __init__(self, p: Program, heads: Heads, element: str, norm: HeadNorm | None) -> None:
        self.p, self.heads, self.element, self.norm = p, heads, element, norm
        self.half = heads.columns // 2
        lanes = math.gcd(self.half, _WARP)
        self.layout = spatial(1, 1, lanes).replicated(_WARP // lanes).local(1, 2, self.half // lanes)

    def write(self) -> None:
        """Writes the head, to where those of its kind go."""
        p, heads = self.p, self.heads
        token, head = p.block_id(0), p.block_id(1)
        x = self._load("x", p["m"] * heads.all, token * heads.all + head)
        cos, sin = (self._load(name, p["m"], token) for name in ("cos", "sin"))
        held = p.read_index(p.global_view(p["held"], "i32", (1,)), (0,))
        place = held + token % p["tokens"]
        values = heads.queries + heads.keys
        with p.when(head < heads.queries):
            rows, row = p["m"] * heads.queries, token * heads.queries + head
            self._store(self._turned(x, cos, sin, "query_gain"), "q", rows, row)
        with p.when((head >= heads.queries) & (head < values)):
            self._append(self._turned(x, cos, sin, "key_gain"), "keys", head - heads.queries, place)
        with p.when(head >= values):
            self._append(self._halves(x), "values", head - values, place)

    def _turned(self, x: Tile, cos: Tile, sin: Tile, gain: str) -> list[Tile]:
        """Returns the halves of a head that is normalized and rotated."""
        p = self.p
        (a, b), cosines, sines = self._halves(self._normed(x, gain)), self._halves(cos), self._halves(sin)
        return [p.fma(a, cosines[0], p.neg(p.mul(b, sines[0]))), p.fma(b, cosines[1], p.mul(a, sines[1]))]

    def _normed(self, x: Tile, gain: str) -> Tile:
        """Returns a head with the norm of its kind, if it has one."""
        if self.norm is None:
            return x
        p = self.p
        mean = p.reduce(p.reduce(p.mul(x, x), 1), 2) * (1 / self.heads.columns)
        factor = p.reciprocal(p.sqrt(mean + p.splat(p["eps"], "f32", mean.layout)))
        gains = self._load(gain, Scalar.of(1), Scalar.of(0))
        return p.mul(p.mul(x, factor), gains + self.norm.shift if self.norm.shift else gains)

    def _halves(self, x: Tile) -> list[Tile]:
        return [self.p.slice(x, 1, half, 1) for half in range(2)]

    def _append(self, halves: list[Tile], name: str, head: Scalar, place: Scalar) -> None:
        """Writes a head to its place in a cache; one that is full is left alone."""
        p, sequence, length = self.p, self.p.block_id(0) // self.p["tokens"], self.p["length"]
        with p.when(place < length):
            sequences = (p["m"] + p["tokens"] - 1) // p["tokens"]
            row = (sequence * self.heads.keys + head) * length + place
            self._store(halves, name, sequences * self.heads.keys * length, row)

    def _store(self, halves: list[Tile], name: str, rows: Scalar, row: Scalar) -> None:
        for half, tile in enumerate(halves):
            self.p.store(self.p.cast(tile, self.element), self._view(name, rows), (row, half, 0))

    def _load(self, name: str, rows: Scalar, row: Scalar) -> Tile:
        return self.p.cast(self.p.load(self._view(name, rows), (row, 0, 0), self.layout), "f32")

    def _view(self, name: str, rows: Scalar) -> Memory:
        """Returns rows of a head's columns, cut in halves."""
        return self.p.global_view(self.p[name], self.element, (-1, 2, self.half), sizes=[rows])
