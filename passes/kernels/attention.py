"""The kernel of attention for few tokens: each reads all of a cache that it may look at.

    y[t, h] = sum over places i of p[i] values[h / group, i] / (sum of p + exp(sinks[h]))
    p[i]    = exp(s + mask[t, i])       s = scale q[t, h] . keys[h / group, i],  or cap tanh of it / cap

Sinks, a cap and a mask are as a model has them: without sinks there is nothing besides the sum of p.

A block has a token, queries that share a key, and a part of the places: so it reads a key once for all of them. Its
warps go through the places side by side, 16 at a time. Each has its own running maxima, sums and outputs (online
softmax), so that within the loop nothing is exchanged but the largest product of a query. Products are mma.sync:
queries are the upper 8 rows of operand A and the lower 8 as well; p goes in as it is rounded in the upper half, and as
what rounding takes away in the lower, so that nothing is lost to it. Keys and values of two rounds are on their way
while one is computed. The first are asked for before the kernel in front has ended.

    for each round of places:       s = q . k;  m' = max(m, s);  p = exp(s - m')
                                    l = l exp(m - m') + sum of p;  o = o exp(m - m') + p v
    over warps, by shared memory:   m, l, o
    over blocks, by the workspace:  the last to come adds up the parts of all, in their order

Operands come from device memory as mma.sync takes them, 16 bytes at a time. Which column of q and k meets in which step
does not matter to a sum, so lane t of four has columns 8t .. 8t + 7 of every 32. Of values a lane has 8 columns of four
places, each for another product: the outputs of a product are every eighth column of 64.

Shared memory: maxima and sums of warps [queries, warps], and their outputs [queries, warps, columns].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.dialect.layouts.fragments import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.layouts.layout import Layout, local, replicated, spatial
from lowbit.dialect.signature import WORKSPACE
from lowbit.passes.kernels.rope import Heads
from lowbit.passes.launch import COUNTERS

if TYPE_CHECKING:
    from lowbit.passes.builder import Memory, Program, Scalar, Tile

THREADS = 256
_WARP = 32
_WARPS = THREADS // _WARP
_QUERIES = 8  # of a block, at most: half the rows of a fragment
_PLACES = 16  # of a warp in a round
_COLUMNS = 128  # of values, of a warp: as many outputs as its registers hold
_PIECE = 8  # columns of 16 bytes
_LINE = 64  # columns of 128 bytes
_AHEAD = 256  # columns of keys that are under way, in rounds of places
_LEAST = -1e30  # below every product, and finite: differences of two are numbers
_TINY = 1e-30  # less than a sum of exponentials: a token that looks at nothing gets zeros
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
        """Returns how many queries of a key a block has."""
        group = self.heads.group
        return max(number for number in range(1, _QUERIES + 1) if group % number == 0)

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
    """What is known of a block's queries: the largest product, the sum of exponentials, and the output times it."""

    most: Tile
    total: Tile
    output: Tile


@dataclass
class _OfWarps:
    """What every warp knows of the queries after some rounds.

    most, total   [warps, 8, 1]
    outputs       [warps, 16, 8] for every eighth column of 64, of p as it is rounded and of the rest
    """

    most: Tile
    total: Tile
    outputs: list[Tile]

    @staticmethod
    def of(tiles: Sequence[Tile]) -> _OfWarps:
        most, total, *outputs = tiles
        return _OfWarps(most, total, outputs)

    def tiles(self) -> list[Tile]:
        return [self.most, self.total, *self.outputs]


class _Block:
    """What one block does."""

    def __init__(self, p: Program, plan: AttentionPlan) -> None:
        self.p, self.plan, self.heads = p, plan, plan.heads
        columns = self.heads.columns
        self.sharing = max(1, columns // _COLUMNS)  # warps that have the same places, and columns of values each
        self.teams = _WARPS // self.sharing
        self.panels = columns // self.sharing // _LINE  # of a warp's values
        self.at_once = self.teams * _PLACES
        self.ahead = max(1, _AHEAD // max(columns, _COLUMNS))
        self.queries = plan.queries
        warps = spatial(_WARPS, 1, 1)
        self.scores = warps.local(1, 1, _PLACES // 8) * MMA_M16N8_D.unsqueeze(0)
        self.sums = warps * MMA_M16N8_D.unsqueeze(0)
        self.token, self.number, self.part = (p.block_id(axis) for axis in range(3))
        self.key = self.number // (self.heads.group // self.queries)

    def attend(self) -> None:
        combined = self._over_warps(self._rounds(self._operand(), *self._share()))
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
        lines = self.heads.columns // _LINE
        rows = THREADS // lines
        layout = local(max(1, self.at_once // rows), 1, 1).spatial(min(rows, self.at_once), lines, 1)
        layout = layout if layout.threads == THREADS else layout.replicated(THREADS // layout.threads)
        for ahead in range(self.ahead):
            for name in ("keys", "values"):
                view, row = self._view(name, (lines, _LINE), (_LINE, 1), first + ahead * self.at_once, end)
                self.p.prefetch(view, (row, 0, 0), layout, ("clamp", "none", "none"))

    def _share(self) -> tuple[Scalar, Scalar]:
        """Returns the first of the block's places, and their end."""
        p, step = self.p, self.plan.parts * _PLACES
        held = p.read_index(p.global_view(p["held"], "i32", (1,)), (0,))
        end = (held + self.token % p["tokens"] + 1).min(p["length"]).max(1)  # even for a guess from fresh memory
        share = (end + step - 1) // step * _PLACES
        first = (self.part * share).min(end)
        return first, (first + share).min(end)

    # -- operands

    def _operand(self) -> Tile:
        """Returns the block's queries as operand A [warps, 16, columns]; rows 8 to 15 are the same again."""
        p, columns = self.p, self.heads.columns
        row = self._row(0)
        shape, strides = self._columns()
        view = p.global_view(p["q"], self.plan.element, (-1, *shape), (columns, *strides), sizes=[row + self.queries])
        inner = self._fragments(8)
        layout = replicated(_WARPS, inner.rank) * inner
        q = p.load(view, (row, *(0 for _ in shape)), layout, ("zero", *("none" for _ in shape)))
        operand = spatial(_WARPS, 1, 1).local(1, 1, columns // 16) * MMA_M16N8K16_A.unsqueeze(0)
        whole = operand.reshape((_WARPS, 2, 8, columns))
        rows = p.view(q, self.plan.element, spatial(_WARPS, 1, 1, 1) * inner.reshape((1, 1, 8, columns)))
        return p.reshape(self._both(whole, rows, rows), operand.shape)

    def _columns(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the columns of a query or a key as steps of mma.sync take them, and strides: [32 columns, step,
        half of a step, lane, pair]."""
        return (self.heads.columns // 32, 2, 2, 4, 2), (32, 4, 2, 8, 1)

    def _fragments(self, rows: int) -> Layout:
        """Returns the layout of a warp's rows of queries or keys [rows, *columns]."""
        shape, _ = self._columns()
        return (
            local(rows // 8, *shape[:3], 1, 1)
            .spatial(8, 1, 1, 1, 1, 1)
            .spatial(1, 1, 1, 1, 4, 1)
            .local(1, 1, 1, 1, 1, 2)
        )

    def _both(self, layout: Layout, upper: Tile, lower: Tile) -> Tile:
        """Returns a tile of this layout, whose second dim says which of two tiles an element is of."""
        p = self.p
        return p.select(p.iota(1, layout) < 1, upper, lower)

    # -- places

    def _rounds(self, queries: Tile, first: Scalar, end: Scalar) -> _OfWarps:
        """Returns what each warp knows after the block's places.

        A round of the loop has `ahead` rounds of places, each with registers of its own: numbers on their way are not
        moved, which would be to wait for them. Keys and values are asked for when those before them have been used.
        """
        p, step, rounds, known = self.p, self.at_once, range(self.ahead), self._start()
        coming = [self._load(name, first + ahead * step, end) for ahead in rounds for name in ("keys", "values")]
        count = (end - first + len(rounds) * step - 1) // (len(rounds) * step)
        with p.loop(0, count, [*coming, *known.tiles()]) as loop:
            coming, known = loop.carried[: len(coming)], _OfWarps.of(loop.carried[len(coming) :])
            for ahead in rounds:
                here = first + (loop.index * len(rounds) + ahead) * step
                keys, values, *coming = coming
                products = self._products(queries, keys)
                coming.append(self._load("keys", here + len(rounds) * step, end))
                known = self._step(products, values, here, end, known)
                coming.append(self._load("values", here + len(rounds) * step, end))
            loop.results = [*coming, *known.tiles()]
        return _OfWarps.of(loop.carried[len(coming) :])

    def _start(self) -> _OfWarps:
        p, one = self.p, self._of_queries(self.scores).reduce((2,))
        outputs = [p.constant(0.0, "f32", self.sums) for _ in range(self.panels * _PIECE)]
        return _OfWarps(p.constant(_LEAST, "f32", one), p.constant(0.0, "f32", one), outputs)

    @staticmethod
    def _of_queries(fragments: Layout) -> Layout:
        """Returns the layout of the upper half of accumulators."""
        return fragments.restrict(1, 0, 8)[0]

    def _load(self, name: str, here: Scalar, end: Scalar) -> Tile:
        """Returns the keys or the values of a round; zeros beyond the end."""
        p = self.p
        shape, strides = self._columns() if name == "keys" else self._columns_of_values()
        view, row = self._view(name, shape, strides, here, end)
        layout = self._key_layout() if name == "keys" else self._value_layout()
        return p.load(view, (row, *(0 for _ in shape)), layout, ("zero", *("none" for _ in shape)))

    def _view(
        self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], here: Scalar, end: Scalar
    ) -> tuple[Memory, Scalar]:
        """Returns keys or values up to the end, and the row of a place in them. shape, strides: of columns."""
        p, columns = self.p, self.heads.columns
        base = (self.token // p["tokens"] * self.heads.keys + self.key) * p["length"]
        view = p.global_view(p[name], self.plan.element, (-1, *shape), (columns, *strides), sizes=[base + end])
        return view, base + here

    def _key_layout(self) -> Layout:
        inner = self._fragments(_PLACES)
        rank = inner.rank
        return spatial(self.teams, *(1 for _ in range(rank - 1))) * replicated(self.sharing, rank) * inner

    def _columns_of_values(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the columns of values: [warps that share places, panels of 64, lane, columns of a lane], strides."""
        panels = self.panels
        return (self.sharing, panels, 8, _PIECE), (panels * _LINE, _LINE, _PIECE, 1)

    def _value_layout(self) -> Layout:
        """Returns the layout of a round's values: a lane has the four places of an operand B, and 8 columns of each
        panel."""
        inner = local(_PLACES // 8, 1, 1, 1, 1).spatial(1, 1, 1, 8, 1).spatial(4, 1, 1, 1, 1).local(2, 1, 1, 1, 1)
        inner = inner.local(1, 1, self.panels, 1, _PIECE)
        return spatial(self.teams, 1, 1, 1, 1) * spatial(1, self.sharing, 1, 1, 1) * inner

    def _products(self, queries: Tile, keys: Tile) -> Tile:
        """Returns the products of a round [warps, 8, places]."""
        p = self.p
        operand = spatial(_WARPS, 1, 1).local(1, _PLACES // 8, self.heads.columns // 16)
        b = p.view(keys, self.plan.element, operand * MMA_M16N8K16_B_NK.unsqueeze(0))
        products = p.slice(p.mma(queries, b, p.constant(0.0, "f32", self.scores)), 1, 0, 8)
        products = p.mul(products, p.splat(p["scale"], "f32", products.layout))
        p.materialize(products)
        return products

    def _step(self, products: Tile, values: Tile, here: Scalar, end: Scalar, known: _OfWarps) -> _OfWarps:
        """Returns what a warp knows after another round."""
        p, seen, added = self.p, self._seen(here, end), self._added(here)
        products = self._capped(products) if self.plan.capped else products
        products = p.select(seen > 0.0, products if added is None else p.add(products, added), _LEAST)
        most = p.max(known.most, p.reduce(products, 2, "max"))
        before, weight = p.exp(known.most - most), p.mul(p.exp(products - most), seen)
        total = p.fma(known.total, before, p.reduce(weight, 2))
        operand = self._weights(weight)
        factor = p.reshape(before, (_WARPS, 1, 8, 1))
        outputs: list[Tile] = []
        for number, output in enumerate(known.outputs):
            scaled = p.mul(p.reshape(output, (_WARPS, 2, 8, 8)), factor)
            b = self._of_column(values, *divmod(number, _PIECE))
            outputs.append(p.mma(operand, b, p.reshape(scaled, (_WARPS, 16, 8))))
            p.materialize(outputs[-1])
        return _OfWarps(most, total, outputs)

    def _weights(self, weight: Tile) -> Tile:
        """Returns weights as operand A [warps, 16, places]: rounded, and what that takes away."""
        p, element = self.p, self.plan.element
        rest = p.sub(weight, p.cast(p.cast(weight, element), "f32"))
        upper, lower = (p.reshape(each, (_WARPS, 1, 8, _PLACES)) for each in (weight, rest))
        both = self._both(self.scores.reshape((_WARPS, 2, 8, _PLACES)), upper, lower)
        return p.reshape(p.cast(both, element), (_WARPS, 16, _PLACES))

    def _of_column(self, values: Tile, panel: int, column: int) -> Tile:
        """Returns one column of each lane's in a panel as operand B [warps, 8, places]."""
        p = self.p
        part = p.slice(p.slice(values, 2, panel, 1), 4, column, 1)
        return p.view(part, self.plan.element, spatial(_WARPS, 1, 1) * MMA_M16N8K16_B_NK.unsqueeze(0))

    @property
    def _places(self) -> Layout:
        """The layout of numbers of a round's places [places, 1], as scores have them."""
        inner = local(_PLACES // 8, 1).replicated(8).spatial(4, 1).local(2, 1)
        return spatial(self.teams, 1) * replicated(self.sharing, 2) * inner

    def _by_warp(self, numbers: Tile, element: str) -> Tile:
        """Returns numbers of places [warps, 1, places]."""
        return self.p.view(numbers, element, self._of_queries(self.scores).reduce((1,)))

    def _seen(self, here: Scalar, end: Scalar) -> Tile:
        """Tells which places of a round the token looks at [warps, 1, places]."""
        p, layout = self.p, self._places
        place = p.iota(0, layout) + p.splat(here, "i32", layout)
        inside = p.select(place < p.splat(end, "i32", layout), p.constant(1.0, "f32", layout), 0.0)
        if self.plan.masked and not self.plan.added:
            inside = p.mul(inside, p.cast(self._mask(here, "i8"), "f32", "unsigned"))
        return self._by_warp(inside, "f32")

    def _added(self, here: Scalar) -> Tile | None:
        """Returns what a mask adds to the products of a round [warps, 1, places]."""
        if not self.plan.added:
            return None
        return self._by_warp(self.p.cast(self._mask(here, self.plan.element), "f32"), "f32")

    def _mask(self, here: Scalar, element: str) -> Tile:
        """Returns a round's part of the mask."""
        p = self.p
        row = self.token // p["tokens"] * p["mask_rows"] + self.token % p["tokens"]
        base = row * p["length"]
        view = p.global_view(p["mask"], element, (-1, 1), sizes=[base + p["length"]])
        return p.load(view, (base + here, 0), self._places, ("zero", "none"))

    def _capped(self, products: Tile) -> Tile:
        """Returns cap * tanh(products / cap), by an exponential: `tanh.approx` is as exact as f16."""
        p = self.p
        inverse, cap = (p.splat(p[name], "f32", products.layout) for name in ("inverse_cap", "cap"))
        power = p.exp(p.mul(p.mul(products, inverse), 2.0))
        return p.mul(cap, p.sub(1.0, p.div(2.0, p.add(power, 1.0))))

    # -- warps

    def _over_warps(self, known: _OfWarps) -> _State:
        """Returns what the block knows of its queries: maxima and sums [queries, 1, 1], and outputs
        [queries, 1, columns]."""
        p, queries, teams, columns = self.p, self.queries, self.teams, self.heads.columns
        of_team = spatial(1, teams, 1).replicated(self.sharing).spatial(8, 1, 1).replicated(4)
        maxima, totals = (p.alloc_shared("f32", (queries, teams, 1)) for _ in range(2))
        for tile, target in ((known.most, maxima), (known.total, totals)):
            p.store(p.view(tile, "f32", of_team), target, (0, 0, 0), _WRITTEN)
        p.barrier()
        of_all = local(1, teams, 1).replicated(_WARPS).spatial(8, 1, 1).replicated(4)
        each = p.load(maxima, (0, 0, 0), of_all, _INSIDE)
        most = p.reshape(p.reduce(each, 1, "max"), (1, 8, 1))
        factor = p.reshape(p.exp(known.most - most), (_WARPS, 1, 8, 1))
        shape = (queries, teams, self.sharing, self.panels, 8, _PIECE)
        strides = (teams * columns + 8, columns, self.panels * _LINE, _LINE, 1, 8)  # lanes are in different banks
        outputs = p.alloc_shared("f32", shape, strides)
        of_lanes = spatial(1, teams, 1, 1, 1, 1) * spatial(1, 1, self.sharing, 1, 1, 1)
        of_lanes = of_lanes.spatial(8, 1, 1, 1, 1, 1).spatial(1, 1, 1, 1, 4, 1).local(1, 1, 1, 1, 2, 1)
        for number, output in enumerate(known.outputs):
            both = p.reduce(p.mul(p.reshape(output, (_WARPS, 2, 8, 8)), factor), 1)
            place = (0, 0, 0, number // _PIECE, 0, number % _PIECE)
            p.store(p.view(both, "f32", of_lanes), outputs, place, ("skip", *("none" for _ in shape[1:])))
        layout = self._rows(teams)
        each, sums = (p.load(memory, (0, 0, 0), layout.reduce((2,)), _INSIDE) for memory in (maxima, totals))
        most = p.reduce(each, 1, "max")
        total = p.reduce(p.mul(sums, p.exp(each - most)), 1)
        p.barrier()
        rows = layout.shape[0]
        boundary = "zero", *("none" for _ in shape[1:])
        every = p.load(outputs, (0,) * len(shape), layout.reshape((rows, *shape[1:])), boundary)
        return _State(most, total, p.reduce(p.reshape(every, (rows, teams, columns)), 1))

    def _rows(self, parts: int) -> Layout:
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
            layout = self._rows(parts)
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
