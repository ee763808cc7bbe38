"""The kernel of attention for few tokens: each reads all of a cache that it may look at.

    y[t, h] = sum over places i of p[i] values[h / group, i] / sum of p
    p[i]    = exp(scale q[t, h] . keys[h / group, i])

A block has a token, the queries that share a key, and a part of the places: so it reads every key once. `streams` of 16
or so lanes go through their places side by side. Each has its own running maximum, sum and output (online softmax), so
that within the loop nothing is exchanged but the products of a key's columns. Keys and values of a round are on their
way while the one before is computed.

    for each round of places:       s = q . k;  m' = max(m, s);  p = exp(s - m')
                                    l = l exp(m - m') + p;  o = o exp(m - m') + p v
    over streams, by shared memory: m, l, o
    over blocks, by the workspace:  the last to come adds up the parts of all, in their order

Shared memory: maxima and sums of streams [2, group, streams], then outputs of warps [group, warps, columns].
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.signature import WORKSPACE
from lowbit.passes.builder import Memory, Program, Scalar, Tile
from lowbit.passes.kernels.rope import Heads
from lowbit.passes.launch import COUNTERS

THREADS = 256
_WARP = 32
_COLUMNS = 8  # of a thread: 16 bytes
_MOST_QUERIES = 4  # of a block
_PLACES = 2  # of a stream in a round
_LEAST = -1e30  # below every product, and finite: differences of two are numbers
_TINY = 1e-30  # less than a sum of exponentials: a token that looks at nothing gets zeros
PARTS = 256  # of all tokens together, at most, where places are shared out


@dataclass(frozen=True)
class AttentionPlan:
    """What a kernel of attention is made for.

    element   "f16" or "bf16": the type of all tensors
    parts     blocks that share the places of a token
    masked    whether there is a mask
    """

    heads: Heads
    element: str
    parts: int = 1
    masked: bool = False

    @property
    def queries(self) -> int:
        """Returns how many queries of a key a block has: as many as its registers hold."""
        group = self.heads.group
        fitting = max(number for number in range(1, _MOST_QUERIES + 1) if group % number == 0)
        return fitting if fitting > 1 or group > 2 * _MOST_QUERIES else group

    @property
    def blocks(self) -> int:
        """Returns how many blocks have a part of a token's places."""
        return self.heads.queries // self.queries

    @property
    def workspace(self) -> int:
        """Returns bytes of the parts' outputs, maxima and sums, behind the counters."""
        floats = COUNTERS + PARTS * self.queries * (self.heads.columns + 2)
        return 4 * floats if self.parts > 1 else 0


def attention_program(plan: AttentionPlan) -> Program:
    """Returns the program.

    Parameters: q and y [m, heads.queries * columns]; keys and values [batch, heads.keys, length, columns], to which the
    tokens' own have been appended; `held`, an i32: how many tokens there were before; m; `tokens`, those of a sequence;
    `length`; `scale`. A token looks at the places up to its own. With a mask, bytes [.., length], it looks only at
    those that have one other than 0 in row `mask_rows` * its sequence + its place in it.
    """
    names: dict[str, str] = dict.fromkeys(("q", "keys", "values", "held", "y"), "pointer")
    names |= dict.fromkeys(("m", "tokens", "length"), "i32") | {"scale": "f32"}
    names |= {"mask": "pointer", "mask_rows": "i32"} if plan.masked else {}
    names |= {WORKSPACE: "pointer"} if plan.parts > 1 else {}
    grid = ("ceil(m / 1)", plan.blocks, plan.parts)
    p = Program("attention", THREADS, grid, names, workspace=plan.workspace)
    with p:
        p.grid_launch_dependents()
        p.grid_wait()
        _Block(p, plan).attend()
    return p


@dataclass
class _State:
    """What a stream knows of one query: the largest product, the sum of its exponentials, and the output times that."""

    most: Tile
    total: Tile
    output: Tile


class _Block:
    """What one block does."""

    def __init__(self, p: Program, plan: AttentionPlan) -> None:
        self.p, self.plan, self.heads = p, plan, plan.heads
        columns = self.heads.columns
        self.lanes = columns // _COLUMNS
        self.streams = THREADS // self.lanes
        self.at_once = self.streams * _PLACES
        self.rows = spatial(self.streams, self.lanes).local(_PLACES, _COLUMNS)
        self.cube = (self.streams, _PLACES, columns)
        self.of_query = self.rows.reduce((0,))
        self.queries = plan.queries
        self.token, self.number, self.part = (p.block_id(axis) for axis in range(3))
        self.key = self.number // (self.heads.group // self.queries)

    def attend(self) -> None:
        p = self.p
        queries = [self._query(number) for number in range(self.queries)]
        place = self.token % p["tokens"]
        held = p.read_index(p.global_view(p["held"], "i32", (1,)), (0,))
        end = (held + place + 1).min(p["length"])
        share = (end + self.plan.parts * self.at_once - 1) // (self.plan.parts * self.at_once) * self.at_once
        first = (self.part * share).min(end)
        states = self._rounds(queries, first, (first + share).min(end))
        combined = self._over_streams(states)
        if self.plan.parts == 1:
            for number, state in enumerate(combined):
                self._store(number, state)
        else:
            self._over_parts(combined)

    def _query(self, number: int) -> Tile:
        """Returns a query of the block's key, times the scale [1, 1, columns]."""
        p = self.p
        view = p.global_view(p["q"], self.plan.element, (-1, self.heads.columns), sizes=[p["m"] * self.heads.queries])
        row = self._row(number)
        q = p.cast(p.load(view, (row, 0), self.of_query), "f32")
        return p.reshape(p.mul(q, p.splat(p["scale"], "f32", q.layout)), (1, 1, self.heads.columns))

    # -- places

    def _rounds(self, queries: list[Tile], first: Scalar, end: Scalar) -> list[_State]:
        """Returns what each stream knows of each query after the block's places."""
        p, count = self.p, (end - first + self.at_once - 1) // self.at_once
        start = [*self._load(first, end), *(tile for _ in queries for tile in self._start())]
        with p.loop(0, count, start) as loop:
            keys, values, *known = loop.carried
            here = first + loop.index * self.at_once
            coming = self._load(here + self.at_once, end)
            seen = self._seen(here, end)
            states = [_State(*known[at : at + 3]) for at in range(0, len(known), 3)]
            k, v = (p.reshape(p.cast(each, "f32"), self.cube) for each in (keys, values))
            after = [self._step(q, k, v, seen, state) for q, state in zip(queries, states)]
            loop.results = [*coming, *(tile for state in after for tile in (state.most, state.total, state.output))]
        known = loop.carried[2:]
        return [_State(*known[at : at + 3]) for at in range(0, len(known), 3)]

    def _start(self) -> list[Tile]:
        cube = self.rows.reshape(self.cube)
        one, output = cube.reduce((1, 2)), cube.reduce((1,))
        return [self.p.constant(value, "f32", layout) for value, layout in ((_LEAST, one), (0.0, one), (0.0, output))]

    def _load(self, here: Scalar, end: Scalar) -> list[Tile]:
        """Returns the keys and the values of a round; zeros beyond the end."""
        p = self.p
        base = (self.token // p["tokens"] * self.heads.keys + self.key) * p["length"]
        views = [
            p.global_view(p[name], self.plan.element, (-1, self.heads.columns), sizes=[base + end])
            for name in ("keys", "values")
        ]
        return [p.load(view, (base + here, 0), self.rows, ("zero", "none")) for view in views]

    def _seen(self, here: Scalar, end: Scalar) -> Tile:
        """Tells which places of a round the token looks at [streams, places, 1]."""
        p, layout = self.p, self.rows.reduce((1,))
        place = p.iota(0, layout) + p.splat(here, "i32", layout)
        shape = (self.streams, _PLACES, 1)
        inside = p.select(place < p.splat(end, "i32", layout), p.constant(1.0, "f32", layout), 0.0)
        if self.plan.masked:
            inside = p.mul(inside, self._mask(here, layout))
        return p.reshape(inside, shape)

    def _mask(self, here: Scalar, layout: Layout) -> Tile:
        """Returns bytes of the mask as numbers."""
        p = self.p
        row = self.token // p["tokens"] * p["mask_rows"] + self.token % p["tokens"]
        base = row * p["length"]
        view = p.global_view(p["mask"], "i8", (-1, 1), sizes=[base + p["length"]])
        return p.cast(p.load(view, (base + here, 0), layout, ("zero", "none")), "f32", "unsigned")

    def _step(self, query: Tile, keys: Tile, values: Tile, seen: Tile, state: _State) -> _State:
        """Returns what a stream knows of a query after another round."""
        p, seen_at = self.p, seen > 0.0
        products = p.select(seen_at, p.reduce(p.mul(keys, query), 2), _LEAST)
        most = p.max(state.most, p.reduce(products, 1, "max"))
        before, weight = p.exp(state.most - most), p.mul(p.exp(products - most), seen)
        total = p.fma(state.total, before, p.reduce(weight, 1))
        return _State(most, total, p.fma(state.output, before, p.reduce(p.mul(values, weight), 1)))

    # -- streams

    def _over_streams(self, states: list[_State]) -> list[_State]:
        """Returns what the block knows of each query: maximum and sum [1, 1], and the output [1, columns]."""
        p, warps, group = self.p, THREADS // _WARP, self.queries
        known = p.alloc_shared("f32", (2 * group, self.streams))
        for number, state in enumerate(states):
            for half, tile in enumerate((state.most, state.total)):
                p.store(p.reshape(tile, (1, self.streams)), known, (half * group + number, 0))
        p.barrier()
        outputs = p.alloc_shared("f32", (group, warps, self.heads.columns))
        found = list[tuple[Tile, Tile]]()
        for number, state in enumerate(states):
            most, total, factor = self._of_streams(known, number, state.most)
            found.append((most, total))
            scaled = p.reshape(p.mul(state.output, factor), (1, warps, self.streams // warps, self.heads.columns))
            p.store(p.reshape(p.reduce(scaled, 2), (1, warps, self.heads.columns)), outputs, (number, 0, 0))
        p.barrier()
        return [_State(*found[number], self._of_warps(outputs, number)) for number in range(group)]

    def _of_streams(self, known: Memory, number: int, mine: Tile) -> tuple[Tile, Tile, Tile]:
        """Returns the largest product of all streams and the sum of exponentials [1, 1], and the factor by which a
        stream's own numbers count."""
        p, layout = self.p, local(1, self.streams).replicated(THREADS)
        maxima, totals = (p.load(known, (at, 0), layout) for at in (number, self.queries + number))
        most = p.reduce(maxima, 1, "max")
        total = p.reduce(p.mul(totals, p.exp(maxima - most)), 1)
        return most, total, p.exp(mine - p.reshape(most, (1, 1, 1)))

    def _of_warps(self, outputs: Memory, number: int) -> Tile:
        """Returns the output of a query, added up over warps [1, columns]."""
        p, warps, columns = self.p, THREADS // _WARP, self.heads.columns
        layout = local(1, warps, 1) * self._columns.reshape((1, 1, columns))
        return p.reshape(p.reduce(p.load(outputs, (number, 0, 0), layout), 1), (1, columns))

    @property
    def _columns(self) -> Layout:
        """Returns the layout of a query's columns, one to a thread, and to several where there are fewer columns."""
        columns = self.heads.columns
        return spatial(1, columns).replicated(THREADS // columns)

    def _store(self, number: int, state: _State) -> None:
        """Writes the output of a query."""
        p, heads = self.p, self.heads
        y = p.cast(p.div(state.output, p.max(state.total, _TINY)), self.plan.element)
        view = p.global_view(p["y"], self.plan.element, (-1, heads.columns), sizes=[p["m"] * heads.queries])
        p.store(y, view, (self._row(number), 0))

    def _row(self, number: int) -> Scalar:
        """Returns the place of one of the block's queries among those of all tokens."""
        return self.token * self.heads.queries + self.number * self.queries + number

    # -- parts

    def _over_parts(self, states: list[_State]) -> None:
        """Writes what the block knows; the last of its token and key adds up what all know."""
        p, group, parts = self.p, self.queries, self.plan.parts
        which = self.token * self.plan.blocks + self.number
        outputs, numbers, first = self._workspace()
        for number, state in enumerate(states):
            row = (which * group + number) * parts + self.part
            p.store(state.output, outputs, (row + first[0], 0))
            p.store(state.most, numbers, (row + first[1], 0))
            p.store(state.total, numbers, (row + first[1], 1))
        counters = p.global_view(p[WORKSPACE], "i32", (COUNTERS,))
        with p.when(p.last_arrival(counters, which, parts)):
            for number in range(group):
                row = (which * group + number) * parts
                self._store(number, self._of_parts(outputs, numbers, row + first[0], row + first[1]))

    def _workspace(self) -> tuple[Memory, Memory, tuple[int, int]]:
        """Returns outputs of parts, their maxima and sums, and the first row of both: a part of a query is a row."""
        p, columns, rows = self.p, self.heads.columns, PARTS * self.queries
        first = COUNTERS // columns
        behind = (first + rows) * columns // 2
        outputs = p.global_view(p[WORKSPACE], "f32", (first + rows, columns))
        return outputs, p.global_view(p[WORKSPACE], "f32", (behind + rows, 2)), (first, behind)

    def _of_parts(self, outputs: Memory, numbers: Memory, row: Scalar, behind: Scalar) -> _State:
        """Returns what all parts know of a query together."""
        p, parts = self.p, self.plan.parts
        each = local(parts, 1).replicated(THREADS)
        maxima, totals = (p.load(numbers, (behind, at), each) for at in range(2))
        most = p.reduce(maxima, 0, "max")
        factor = p.exp(maxima - most)
        output = p.mul(p.load(outputs, (row, 0), local(parts, 1) * self._columns), factor)
        return _State(most, p.reduce(p.mul(totals, factor), 0), p.reduce(output, 0))
