"""The kernel between the projection to queries, keys and values, and attention: it normalizes and rotates heads, and
appends keys and values to a cache.

    head = x / sqrt(mean of x^2 + eps) * (gain + shift)         where queries and keys have a norm
    head = [a cos - b sin, b cos + a sin, c]                    for queries and keys

in f32, rounded once; a and b are the halves of the columns that are rotated, or every second of them and those beside
them, and c are the others. A token's place in the cache is the number of tokens that it has held so far, and the
token's own among the new ones of its sequence.

A block is one warp, and has a head of a token, in pieces of which a, b and c are whole numbers; a and b that are
neighbours are one piece each, with those of c, which are turned by nothing. A thread has the same columns of all
pieces, so that nothing is exchanged but the sum of a norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import Layout, spatial

if TYPE_CHECKING:
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


@dataclass(frozen=True)
class Rotation:
    """Which columns of queries and keys are rotated.

    columns   how many, an even number: the first of a head; 0: none
    repeated  whether cos and sin have a number for each of these columns, the same in both halves; else they have one
              for each of a half
    beside    whether columns that are rotated together are neighbours; else one is in the first half, one in the second
    """

    columns: int
    repeated: bool = True
    beside: bool = False

    def piece(self, columns: int) -> int:
        """Returns the columns of the largest pieces that both a half of what is rotated and the rest of a head's
        columns consist of."""
        return math.gcd(self.columns // 2, columns - self.columns)


def rope_program(
    heads: Heads, element: str, norm: HeadNorm | None = None, rotation: Rotation | None = None
) -> Program:
    """Returns the program for heads of queries, keys and values, which lie side by side in this order.

    element   "f16" or "bf16": the type of all tensors
    rotation  None: of all columns

    Parameters: x [m, heads.all * columns]; cos and sin [m, columns that are rotated, or half of them], unless there are
    none; q [m, heads.queries * columns], which is written; keys and values [batch, heads.keys, length, columns], which
    are appended to; `held`, an i32: how many tokens there are in the cache; m; `tokens`, the new ones of a sequence;
    `length`; with a norm the gains and eps.
    """
    from lowbit.passes.builder import Program

    turn = rotation or Rotation(heads.columns)
    cosines = ("cos", "sin") if turn.columns else ()
    names: dict[str, str] = dict.fromkeys(("x", *cosines, "q", "keys", "values", "held"), "pointer")
    names |= dict.fromkeys(("m", "tokens", "length"), "i32")
    names |= {"query_gain": "pointer", "key_gain": "pointer", "eps": "f32"} if norm else {}
    p = Program("rope", _WARP, ("ceil(m / 1)", heads.all, 1), names)
    with p:
        p.grid_launch_dependents()
        p.grid_wait()
        _Block(p, heads, element, norm, turn).write()
    return p


class _Block:
    """What one block does for its head."""

    def __init__(
        self, p: Program, heads: Heads, element: str, norm: HeadNorm | None, rotation: Rotation
    ) -> None:
        self.p, self.heads, self.element, self.norm, self.rotation = p, heads, element, norm, rotation
        self.piece = heads.columns // 2 if rotation.beside else rotation.piece(heads.columns)
        self.half = 1 if rotation.beside else rotation.columns // 2 // self.piece  # pieces

    def write(self) -> None:
        """Writes the head, to where those of its kind go."""
        p, heads = self.p, self.heads
        token, head = p.block_id(0), p.block_id(1)
        x = self._load("x", p["m"] * heads.all, token * heads.all + head, heads.columns)
        turn = self._turn(token)
        held = p.read_index(p.global_view(p["held"], "i32", (1,)), (0,))
        place = held + token % p["tokens"]
        values = heads.queries + heads.keys
        with p.when(head < heads.queries):
            rows, row = p["m"] * heads.queries, token * heads.queries + head
            self._store(self._turned(x, turn, "query_gain"), "q", rows, row)
        with p.when((head >= heads.queries) & (head < values)):
            self._append(self._turned(x, turn, "key_gain"), "keys", head - heads.queries, place)
        with p.when(head >= values):
            self._append(self._pieces(x), "values", head - values, place)

    def _turn(self, token: Scalar) -> list[Tile]:
        """Returns cos and sin of a token, if heads are rotated."""
        given = self.rotation.columns if self.rotation.repeated else self.rotation.columns // 2
        if not given:
            return []
        if self.rotation.beside:
            return [self._of_pairs(name, token, given, rest) for name, rest in (("cos", 1.0), ("sin", 0.0))]
        return [self._load(name, self.p["m"], token, given) for name in ("cos", "sin")]

    def _of_pairs(self, name: str, token: Scalar, given: int, rest: float) -> Tile:
        """Returns the numbers of all pairs [1, pairs, 1]: the first of those given, and another for pairs that are not
        rotated."""
        p, layout = self.p, self._layout(self.heads.columns).reduce((2,))
        view = p.global_view(p[name], self.element, (-1, given, 1), sizes=[p["m"]])
        found = p.cast(p.load(view, (token, 0, 0), layout, ("none", "zero", "none")), "f32")
        return p.select(p.iota(1, layout) < self.rotation.columns // 2, found, rest)

    def _turned(self, x: Tile, turn: list[Tile], gain: str) -> list[Tile]:
        """Returns the pieces of a head that is normalized and rotated."""
        p, half, pieces = self.p, self.half, self._pieces(self._normed(x, gain))
        if not turn:
            return pieces
        cosines, sines = (self._pieces(each) for each in turn)
        cosines, sines = (each * 2 if len(each) == half else each for each in (cosines, sines))
        pairs = [(pieces[at], pieces[at + half], at) for at in range(half)]
        first = [p.fma(a, cosines[at], p.neg(p.mul(b, sines[at]))) for a, b, at in pairs]
        second = [p.fma(b, cosines[at + half], p.mul(a, sines[at + half])) for a, b, at in pairs]
        return [*first, *second, *pieces[2 * half :]]

    def _normed(self, x: Tile, gain: str) -> Tile:
        """Returns a head with the norm of its kind, if it has one."""
        from lowbit.passes.builder import Scalar

        if self.norm is None:
            return x
        p = self.p
        mean = p.reduce(p.reduce(p.mul(x, x), 1), 2) * (1 / self.heads.columns)
        factor = p.reciprocal(p.sqrt(mean + p.splat(p["eps"], "f32", mean.layout)))
        gains = self._load(gain, Scalar.of(1), Scalar.of(0), self.heads.columns)
        return p.mul(p.mul(x, factor), gains + self.norm.shift if self.norm.shift else gains)

    def _pieces(self, x: Tile) -> list[Tile]:
        """Returns the pieces of a head, or of cos or sin."""
        return [self.p.slice(x, self._dim, at, 1) for at in range(x.shape[self._dim])]

    @property
    def _dim(self) -> int:
        """Returns the dim of a head's tile that counts pieces."""
        return 2 if self.rotation.beside else 1

    def _append(self, pieces: list[Tile], name: str, head: Scalar, place: Scalar) -> None:
        """Writes a head to its place in a cache; one that is full is left alone."""
        p, sequence, length = self.p, self.p.block_id(0) // self.p["tokens"], self.p["length"]
        with p.when(place < length):
            sequences = (p["m"] + p["tokens"] - 1) // p["tokens"]
            row = (sequence * self.heads.keys + head) * length + place
            self._store(pieces, name, sequences * self.heads.keys * length, row)

    def _store(self, pieces: list[Tile], name: str, rows: Scalar, row: Scalar) -> None:
        for at, tile in enumerate(pieces):
            view = self._view(name, rows, self.heads.columns)
            self.p.store(self.p.cast(tile, self.element), view, (row, 0, at) if self.rotation.beside else (row, at, 0))

    def _load(self, name: str, rows: Scalar, row: Scalar, columns: int) -> Tile:
        """Returns a row of columns [1, pieces, columns of a piece], or [1, pairs, 2]."""
        view = self._view(name, rows, columns)
        return self.p.cast(self.p.load(view, (row, 0, 0), self._layout(columns)), "f32")

    def _layout(self, columns: int) -> Layout:
        lanes = math.gcd(self.piece, _WARP)
        if self.rotation.beside:
            return spatial(1, lanes, 1).replicated(_WARP // lanes).local(1, self.piece // lanes, 2)
        return spatial(1, 1, lanes).replicated(_WARP // lanes).local(1, columns // self.piece, self.piece // lanes)

    def _view(self, name: str, rows: Scalar, columns: int) -> Memory:
        """Returns rows of columns, cut in pieces."""
        pieces = columns // self.piece
        shape = (-1, self.piece, pieces) if self.rotation.beside else (-1, pieces, self.piece)
        return self.p.global_view(self.p[name], self.element, shape, sizes=[rows])
