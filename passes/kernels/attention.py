"""The kernel of attention for few tokens: each reads all of a cache that it may look at.

    y[t, h] = sum over places i of p[i] values[h / group, i] / (sum of p + exp(sinks[h]))
    p[i]    = exp(s + mask[t, i])       s = scale q[t, h] . keys[h / group, i],  or cap tanh of it / cap

Sinks, a cap and a mask are as a model has them: without sinks there is nothing besides the sum of p.

A block has a token, queries that share a key, and a part of the places: so it reads a key once for all of them. Groups
of 8 to 32 lanes, the *streams*, go through their places side by side. Each has its own running maximum, sum and output
(online softmax), so that within the loop nothing is exchanged but the products of a key's columns. Keys and values of
two rounds are on their way while one is computed. The first are asked for before the kernel in front has ended.

    for each round of places:       s = q . k;  m' = max(m, s);  p = exp(s - m')
                                    l = l exp(m - m') + p;  o = o exp(m - m') + p v
    over streams, by shared memory: m, l, o
    over blocks, by the workspace:  the last to come adds up the parts of all, in their order

Shared memory: maxima and sums of streams [queries, streams], and outputs of warps [queries, warps, columns].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.signature import WORKSPACE
from lowbit.passes.kernels.rope import Heads
from lowbit.passes.launch import COUNTERS

if TYPE_CHECKING:
    from lowbit.passes.builder import Memory, Program, Scalar, Tile

THREADS = 256
_WARP = 32
_COLUMNS = 8  # of a thread: 16 bytes
_MOST_QUERIES = 4  # of a block
_AHEAD = 2  # rounds of places that are under way
_PLACES = 2  # of a stream in a round
_LEAST = -1e30  # below every product, and finite: differences of two are numbers
_TINY = 1e-30  # less than a sum of exponentials: a token that looks at nothing gets zeros
_ROWS = ("zero", "none")
_INSIDE = ("zero", "none", "none")  # there may be fewer queries than rows of threads
_WRITTEN = ("skip", "none", "none")
PARTS = 256  # of all tokens together, at most, where their number decides how places are shared out


@dataclass(frozen=True)
class AttentionPlan:
    """What a kernel of attention is made for.

    element   "f16" or "bf16": the type of all tensors
    parts     blocks that share the places of a token
    masked    whether there is a mask
    tokens    the most of a launch, where that does not follow from the parts of a token
    added     whether the mask's numbers, of the element's type, are added to products; else it is of bytes
    sinks     whether every query has a sink
    capped    whether products have a cap
    """

    heads: Heads
    element: str
    parts: int = 1
    masked: bool = False
    tokens: int = 0
    added: bool = False
    sinks: bool = False
    capped: bool = False

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
    def rows(self) -> int:
        """Returns how many queries have a row of parts in the workspace."""
        return max(PARTS // self.parts, self.tokens * self.blocks) * self.queries

    @property
    def workspace(self) -> int:
        """Returns bytes of the parts' outputs, maxima and sums, behind the counters."""
        floats = COUNTERS + self.rows * self.parts * (self.heads.columns + 2)
        return 4 * floats if self.parts > 1 else 0


def attention_program(plan: AttentionPlan) -> Program:
    """Returns the program.

    Parameters: q and y [m, heads.queries * columns]; keys and values [batch, heads.keys, length, columns], to which the
    tokens' own have been appended; `held`, an i32: how many tokens there were before; m; `tokens`, those of a sequence;
    `length`; `scale`. A token looks at the places up to its own. With a mask, bytes [.., length], it looks only at
    those that have one other than 0 in row `mask_rows` * its sequence + its place in it; a mask that is added has
    numbers of the element's type there. With sinks, `sinks` [heads.queries]; with a cap, `cap` and `inverse_cap`, which
    is 1 / cap.
    """
    from lowbit.passes.builder import Program

    names: dict[str, str] = dict.fromkeys(("q", "keys", "values", "held", "y"), "pointer")
    names |= dict.fromkeys(("m", "tokens", "length"), "i32") | {"scale": "f32"}
    names |= {"mask": "pointer", "mask_rows": "i32"} if plan.masked else {}
    names |= {"sinks": "pointer"} if plan.sinks else {}
    names |= {"cap": "f32", "inverse_cap": "f32"} if plan.capped else {}
    names |= {WORKSPACE: "pointer"} if plan.parts > 1 else {}
    grid = ("ceil(m / 1)", plan.blocks, plan.parts)
    p = Program("attention", THREADS, grid, names, workspace=plan.workspace)
    with p:
        p.grid_launch_dependents()
        block = _Block(p, plan)
        block.prefetch()
        p.grid_wait()
        block.attend()
    return p


@dataclass
class _State:
    """What is known of one query, or of several: the largest product, the sum of exponentials, and the output times
    it."""

    most: Tile
    total: Tile
    output: Tile


def _flat(states: list[_State]) -> list[Tile]:
    return [tile for state in states for tile in (state.most, state.total, state.output)]


def _states(tiles: Sequence[Tile]) -> list[_State]:
    return [_State(*tiles[at : at + 3]) for at in range(0, len(tiles), 3)]


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
        queries = [self._query(number) for number in range(self.queries)]
        states = self._rounds(queries, *self._share())
        combined = self._over_streams(states)
        if self.plan.parts == 1:
            self._store(combined)
        else:
            self._over_parts(combined)

    def prefetch(self) -> None:
        """Asks for the block's first keys and values before the kernel in front has ended.

        What it reads for that, how many tokens are held, may still change: it is a guess, and read again. Most of the
        cache is as it will be, and the L2 cache sees what is written to the rest.
        """
        first, end = self._share()
        for ahead in range(_AHEAD):
            for view, row in self._views(first + ahead * self.at_once, end):
                self.p.prefetch(view, (row, 0), self.rows, ("clamp", "none"))

    def _share(self) -> tuple[Scalar, Scalar]:
        """Returns the first of the block's places, and their end."""
        p, step = self.p, self.plan.parts * self.at_once
        held = p.read_index(p.global_view(p["held"], "i32", (1,)), (0,))
        end = (held + self.token % p["tokens"] + 1).min(p["length"]).max(1)  # even for a guess from fresh memory
        share = (end + step - 1) // step * self.at_once
        first = (self.part * share).min(end)
        return first, (first + share).min(end)

    def _query(self, number: int) -> Tile:
        """Returns a query of the block's key, times the scale [1, 1, columns]."""
        p = self.p
        view = p.global_view(p["q"], self.plan.element, (-1, self.heads.columns), sizes=[p["m"] * self.heads.queries])
        row = self._row(number)
        q = p.cast(p.load(view, (row, 0), self.of_query), "f32")
        return p.reshape(p.mul(q, p.splat(p["scale"], "f32", q.layout)), (1, 1, self.heads.columns))

    # -- places

    def _rounds(self, queries: list[Tile], first: Scalar, end: Scalar) -> list[_State]:
        """Returns what each stream knows of each query after the block's places.

        A round of the loop has `_AHEAD` rounds of places, each with registers of its own: numbers on their way are not
        moved, which would be to wait for them.
        """
        p, step = self.p, self.at_once
        states = [_State(*self._start()) for _ in queries]
        coming = [tile for ahead in range(_AHEAD) for tile in self._load(first + ahead * step, end)]
        count = (end - first + _AHEAD * step - 1) // (_AHEAD * step)
        with p.loop(0, count, [*coming, *_flat(states)]) as loop:
            coming, states = loop.carried[: 2 * _AHEAD], _states(loop.carried[2 * _AHEAD :])
            for ahead in range(_AHEAD):
                here = first + (loop.index * _AHEAD + ahead) * step
                keys, values = (self._numbers(tile) for tile in coming[:2])
                coming = [*coming[2:], *self._load(here + _AHEAD * step, end)]
                seen, added = self._seen(here, end), self._added(here)
                states = [self._step(q, keys, values, seen, added, state) for q, state in zip(queries, states)]
            loop.results = [*coming, *_flat(states)]
        return _states(loop.carried[2 * _AHEAD :])

    def _numbers(self, tile: Tile) -> Tile:
        """Returns keys or values in f32 [streams, places, columns], before what follows: their registers are free."""
        found = self.p.cast(tile, "f32")
        self.p.materialize(found)
        return self.p.reshape(found, self.cube)

    def _start(self) -> list[Tile]:
        cube = self.rows.reshape(self.cube)
        one, output = cube.reduce((1, 2)), cube.reduce((1,))
        return [self.p.constant(value, "f32", layout) for value, layout in ((_LEAST, one), (0.0, one), (0.0, output))]

    def _load(self, here: Scalar, end: Scalar) -> list[Tile]:
        """Returns the keys and the values of a round; zeros beyond the end."""
        return [self.p.load(view, (row, 0), self.rows, _ROWS) for view, row in self._views(here, end)]

    def _views(self, here: Scalar, end: Scalar) -> list[tuple[Memory, Scalar]]:
        """Returns keys and values up to the end, and the row of a place in them."""
        p = self.p
        base = (self.token // p["tokens"] * self.heads.keys + self.key) * p["length"]
        shape = -1, self.heads.columns
        views = [p.global_view(p[name], self.plan.element, shape, sizes=[base + end]) for name in ("keys", "values")]
        return [(view, base + here) for view in views]

    def _seen(self, here: Scalar, end: Scalar) -> Tile:
        """Tells which places of a round the token looks at [streams, places, 1]."""
        p, layout = self.p, self.rows.reduce((1,))
        place = p.iota(0, layout) + p.splat(here, "i32", layout)
        shape = (self.streams, _PLACES, 1)
        inside = p.select(place < p.splat(end, "i32", layout), p.constant(1.0, "f32", layout), 0.0)
        if self.plan.masked and not self.plan.added:
            inside = p.mul(inside, p.cast(self._mask(here, "i8", layout), "f32", "unsigned"))
        return p.reshape(inside, shape)

    def _added(self, here: Scalar) -> Tile | None:
        """Returns what a mask adds to the products of a round [streams, places, 1]."""
        if not self.plan.added:
            return None
        numbers = self.p.cast(self._mask(here, self.plan.element, self.rows.reduce((1,))), "f32")
        return self.p.reshape(numbers, (self.streams, _PLACES, 1))

    def _mask(self, here: Scalar, element: str, layout: Layout) -> Tile:
        """Returns a round's part of the mask."""
        p = self.p
        row = self.token // p["tokens"] * p["mask_rows"] + self.token % p["tokens"]
        base = row * p["length"]
        view = p.global_view(p["mask"], element, (-1, 1), sizes=[base + p["length"]])
        return p.load(view, (base + here, 0), layout, ("zero", "none"))

    def _capped(self, products: Tile) -> Tile:
        """Returns cap * tanh(products / cap), by an exponential: `tanh.approx` is as exact as f16."""
        p = self.p
        inverse, cap = (p.splat(p[name], "f32", products.layout) for name in ("inverse_cap", "cap"))
        power = p.exp(p.mul(p.mul(products, inverse), 2.0))
        return p.mul(cap, p.sub(1.0, p.div(2.0, p.add(power, 1.0))))

    def _step(
        self, query: Tile, keys: Tile, values: Tile, seen: Tile, added: Tile | None, state: _State
    ) -> _State:
        """Returns what a stream knows of a query after another round."""
        p, seen_at, products = self.p, seen > 0.0, self.p.reduce(self.p.mul(keys, query), 2)
        products = self._capped(products) if self.plan.capped else products
        products = p.select(seen_at, products if added is None else p.add(products, added), _LEAST)
        most = p.max(state.most, p.reduce(products, 1, "max"))
        before, weight = p.exp(state.most - most), p.mul(p.exp(products - most), seen)
        total = p.fma(state.total, before, p.reduce(weight, 1))
        return _State(most, total, p.fma(state.output, before, p.reduce(p.mul(values, weight), 1)))

    # -- streams

    def _over_streams(self, states: list[_State]) -> _State:
        """Returns what the block knows of its queries: maxima and sums [queries, 1, 1], and outputs
        [queries, 1, columns]."""
        p, warps, columns = self.p, THREADS // _WARP, self.heads.columns
        maxima, totals = (p.alloc_shared("f32", (self.queries, self.streams, 1)) for _ in range(2))
        for number, state in enumerate(states):
            for tile, target in ((state.most, maxima), (state.total, totals)):
                p.store(p.reshape(tile, (1, self.streams, 1)), target, (number, 0, 0))
        p.barrier()
        factors = [self._factor(maxima, number, state.most) for number, state in enumerate(states)]
        outputs = p.alloc_shared("f32", (self.queries, warps, columns))
        for number, (state, factor) in enumerate(zip(states, factors)):
            scaled = p.reshape(p.mul(state.output, factor), (1, warps, self.streams // warps, columns))
            p.store(p.reshape(p.reduce(scaled, 2), (1, warps, columns)), outputs, (number, 0, 0))
        of_streams = self._queries(self.streams).reduce((2,))
        each, sums = (p.load(memory, (0, 0, 0), of_streams, _INSIDE) for memory in (maxima, totals))
        most = p.reduce(each, 1, "max")
        total = p.reduce(p.mul(sums, p.exp(each - most)), 1)
        p.barrier()
        output = p.reduce(p.load(outputs, (0, 0, 0), self._queries(warps), _INSIDE), 1)
        return _State(most, total, output)

    def _factor(self, maxima: Memory, number: int, mine: Tile) -> Tile:
        """Returns the factor by which a stream's numbers of a query count [streams, 1, 1]."""
        p = self.p
        each = p.load(maxima, (number, 0, 0), local(1, self.streams, 1).replicated(THREADS))
        return p.exp(mine - p.reduce(each, 1, "max"))

    def _queries(self, parts: int) -> Layout:
        """Returns the layout of parts of all queries [queries or more, parts, columns]: a thread has all parts of some
        columns of a query."""
        rows = 1
        while rows < self.queries:
            rows *= 2
        lanes, columns = THREADS // rows, self.heads.columns
        if lanes > columns:
            return local(1, parts, 1) * spatial(rows, 1, columns).replicated(lanes // columns)
        return local(1, parts, 1) * spatial(rows, 1, lanes) * local(1, 1, columns // lanes)

    def _store(self, state: _State) -> None:
        """Writes the outputs of the queries."""
        p, heads = self.p, self.heads
        state = self._with_sinks(state) if self.plan.sinks else state
        y = p.cast(p.div(state.output, p.max(state.total, _TINY)), self.plan.element)
        row = self._row(0)
        view = p.global_view(p["y"], self.plan.element, (-1, 1, heads.columns), sizes=[row + self.queries])
        p.store(y, view, (row, 0, 0), _WRITTEN)

    def _with_sinks(self, state: _State) -> _State:
        """Returns a state whose total has the exponentials of the queries' sinks."""
        p, first = self.p, self.number * self.queries
        view = p.global_view(p["sinks"], self.plan.element, (-1, 1, 1), sizes=[first + self.queries])
        sinks = p.cast(p.load(view, (first, 0, 0), state.most.layout, _INSIDE), "f32")
        most = p.max(state.most, sinks)
        before = p.exp(state.most - most)
        return _State(most, p.fma(state.total, before, p.exp(sinks - most)), p.mul(state.output, before))

    def _row(self, number: int) -> Scalar:
        """Returns the place of one of the block's queries among those of all tokens."""
        return self.token * self.heads.queries + self.number * self.queries + number

    # -- parts

    def _over_parts(self, state: _State) -> None:
        """Writes what the block knows; the last of its token and key adds up what all know."""
        p, parts = self.p, self.plan.parts
        which = self.token * self.plan.blocks + self.number
        places = self._workspace(which * self.queries)
        for tile, (memory, row) in zip((state.output, state.most, state.total), places):
            p.store(tile, memory, (row, self.part, 0), _WRITTEN)
        counters = p.global_view(p[WORKSPACE], "i32", (COUNTERS,))
        with p.when(p.last_arrival(counters, which, parts)):
            layout = self._queries(parts)
            of_query = layout.reduce((2,))
            every, each, sums = (
                p.load(memory, (row, 0, 0), layout if memory.type.shape[2] > 1 else of_query, _INSIDE)
                for memory, row in places
            )
            most = p.reduce(each, 1, "max")
            factor = p.exp(each - most)
            self._store(_State(most, p.reduce(p.mul(sums, factor), 1), p.reduce(p.mul(every, factor), 1)))

    def _workspace(self, query: Scalar) -> list[tuple[Memory, Scalar]]:
        """Returns outputs, maxima and sums of all parts [queries, parts, columns or 1], and the row of a query in them,
        behind which the block's queries end."""
        parts, rows, begin = self.plan.parts, self.plan.rows, COUNTERS
        found: list[tuple[Memory, Scalar]] = []
        for columns in (self.heads.columns, 1, 1):
            row = query + begin // (parts * columns)
            shape, ends = (-1, parts, columns), [row + self.queries]
            found.append((self.p.global_view(self.p[WORKSPACE], "f32", shape, sizes=ends), row))
            begin += rows * parts * columns
        return found
