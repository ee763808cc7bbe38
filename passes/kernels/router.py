"""The kernel of a router: which experts a token goes to, and with which weights.

    logits = weight x + bias
    score  = softmax over the experts of logits, or 1 / (1 + exp(-logits)) of each
    chosen = the top_k largest of score + correction
    y      = score[chosen], divided by their sum if they are renormalized, times scale

A block has some experts and some tokens, and writes their logits. The last block of its tokens chooses: the place of an
expert among those that are chosen is how many are before it, so each is counted by itself, and no order of threads or
blocks changes the result. Of equal numbers the first is before; a logit that is no number is before all others.

    for each token:    values, choices = scores of experts, and what is compared
                       rank[i] = #{j: choice[j] > choice[i]} + #{j < i: choice[j] == choice[i]}
                       ids[rank], weights[rank] = i, values[i]     where rank < top_k

The weight is prefetched before the kernel in front has ended, and read after.

Shared memory: sums of warps [tokens * experts of a block, warps]; values and choices of all experts; what is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from lowbit.dialect.layouts.layout import Layout, local, spatial
from lowbit.dialect.signature import WORKSPACE
from lowbit.passes.launch import COUNTERS

if TYPE_CHECKING:  # a plan needs no MLIR
    from lowbit.passes.builder import Memory, Program, Scalar, Tile

MOST_TOKENS = 64  # of a launch
THREADS = 256
_WARP = 32
_COLUMNS = 8  # that a thread reads at once
_ROWS = 4  # experts of a block
_AT_ONCE = 32  # experts with which a thread compares its own
_VECTOR = 4  # numbers of 32 bits that a thread reads at once
TINY = 1e-20  # added to a sum of sigmoids, which may all be 0, as models do it


@dataclass(frozen=True)
class RouterPlan:
    """What a kernel of a router is made for.

    element       the type of x: "f16", "bf16" or "f32"
    weight        the type of the weight and of the bias
    logits        the type of the logits that are written
    scores        the type of the weights of tokens that are written
    softmax       whether scores are softmax over all experts, or sigmoids
    renormalized  whether those of a token are divided by their sum
    biased        whether there is a bias
    corrected     whether there is a correction
    tokens        how many a block has
    """

    hidden: int
    experts: int
    top_k: int
    element: str
    weight: str
    logits: str
    scores: str
    softmax: bool = True
    renormalized: bool = True
    biased: bool = False
    corrected: bool = False
    tokens: int = 1

    @property
    def blocks(self) -> int:
        """Returns how many blocks have a token's experts."""
        return -(-self.experts // _ROWS)

    @property
    def lanes(self) -> int:
        """Returns how many threads of a warp count for one expert."""
        return min(_WARP, max(1, THREADS // _power_of_two(self.experts)))

    @property
    def width(self) -> int:
        """Returns how many numbers are in shared memory: those of experts, and -inf up to what the threads cover."""
        return max(_power_of_two(self.experts), THREADS // self.lanes, self.lanes)

    @property
    def first_row(self) -> int:
        """Returns the row of the first token's logits in the workspace, behind the counters."""
        return COUNTERS // self.experts + 1

    @property
    def workspace(self) -> int:
        """Returns bytes of counters and logits."""
        return 4 * self.experts * (self.first_row + MOST_TOKENS)


def router_program(plan: RouterPlan) -> Program:
    """Returns the program.

    Parameters: x [m, hidden]; weight [experts, hidden]; logits [m, experts]; scores [m, top_k], the weights of tokens;
    ids, i64 [m, top_k]; with a bias and a correction these [experts], the latter in f32; m, up to `MOST_TOKENS`; scale.
    """
    from lowbit.passes.builder import Program

    pointers = ["x", "weight", "logits", "scores", "ids", *["bias"] * plan.biased, *["correction"] * plan.corrected]
    names = dict.fromkeys(pointers, "pointer") | {"m": "i32", "scale": "f32", WORKSPACE: "pointer"}
    grid = (f"ceil(m / {plan.tokens})", plan.blocks, 1)
    p = Program("router", THREADS, grid, names, workspace=plan.workspace)
    with p:
        p.grid_launch_dependents()
        block = _Block(p, plan)
        block.prefetch()
        p.grid_wait()
        block.write_logits()
        counters = p.global_view(p[WORKSPACE], "i32", (COUNTERS,))
        is_last = p.last_arrival(counters, p.block_id(0), plan.blocks)
        with p.when(is_last), p.loop(0, plan.tokens) as loop:
            block.choose(block.token + loop.index)
    return p


class _Block:
    """What one block does for its tokens and experts."""

    def __init__(self, p: Program, plan: RouterPlan) -> None:
        self.p, self.plan = p, plan
        self.token, self.expert = p.block_id(0) * plan.tokens, p.block_id(1) * _ROWS
        self.pieces = -(-plan.hidden // (THREADS * _COLUMNS))
        self.of_rows = self._columns(_ROWS)
        self.beyond = "none" if self.of_rows.shape[1] == plan.hidden else "zero"
        self.weight = p.global_view(p["weight"], plan.weight, (plan.experts, plan.hidden))
        self.memory = p.global_view(p[WORKSPACE], "f32", (-1, plan.experts), sizes=[p["m"] + plan.first_row])

    def _columns(self, rows: int) -> Layout:
        return local(rows, self.pieces).spatial(1, THREADS).local(1, _COLUMNS)

    # -- logits

    def prefetch(self) -> None:
        self.p.prefetch(self.weight, (self.expert, 0), self.of_rows, ("clamp", "clamp"))

    def write_logits(self) -> None:
        """Writes the logits of the block's tokens and experts, to the workspace in f32."""
        p, plan = self.p, self.plan
        logits = self._products()
        if plan.biased:
            bias = p.global_view(p["bias"], plan.weight, (1, plan.experts))
            row = p.load(bias, (0, self.expert), logits.layout.reduce((0,)), ("none", "zero"))
            logits = logits + p.cast(row, "f32")
        given = p.global_view(p["logits"], plan.logits, (-1, plan.experts), sizes=[p["m"]])
        p.store(logits, self.memory, (self.token + plan.first_row, self.expert), ("skip", "skip"))
        p.store(p.cast(logits, plan.logits), given, (self.token, self.expert), ("skip", "skip"))

    def _products(self) -> Tile:
        """Returns the products of tokens and experts [tokens, experts of a block]."""
        p, plan, warps = self.p, self.plan, THREADS // _WARP
        x = p.global_view(p["x"], plan.element, (-1, plan.hidden), sizes=[p["m"]])
        weight = p.load(self.weight, (self.expert, 0), self.of_rows, ("clamp", self.beyond))
        tokens = [p.load(x, (self.token + t, 0), self._columns(1), ("clamp", self.beyond)) for t in range(plan.tokens)]
        sums = p.alloc_shared("f32", (plan.tokens * _ROWS, 1, warps))
        numbers = p.cast(weight, "f32")
        for t, token in enumerate(tokens):
            products = p.mul(numbers, p.cast(token, "f32"))
            parts = p.reshape(products, (_ROWS, self.pieces, warps, _WARP * _COLUMNS))
            each = p.reduce(p.reduce(parts, 1), 3)
            p.store(p.reshape(each, (_ROWS, 1, warps)), sums, (t * _ROWS, 0, 0))
        p.barrier()
        count = plan.tokens * _ROWS
        layout = spatial(count, 1, 1).local(1, 1, warps) * local(1, 1, 1).replicated(THREADS // count)
        return p.reshape(p.reduce(p.load(sums, (0, 0, 0), layout), 2), (plan.tokens, _ROWS))

    # -- choice

    def choose(self, token: Scalar) -> None:
        """Writes the experts of a token, and their weights."""
        p, plan = self.p, self.plan
        values, choices = (p.alloc_shared("f32", (1, plan.width)) for _ in range(2))
        self._compare(token, values, choices)
        p.barrier()
        mine = self._cube(1).reduce((1,))
        expert = p.iota(0, mine)
        rank = self._rank(choices, expert)
        size = -(-plan.top_k // _VECTOR) * _VECTOR  # all of what a load may touch is written
        place = p.select(rank < size, rank, -1)
        chosen, ids = p.alloc_shared("f32", (size,)), p.alloc_shared("i32", (size,))
        p.scatter(p.gather(values, (0,), expert), chosen, (), place)
        p.scatter(expert, ids, (), place)
        p.barrier()
        self._store(token, p.load(chosen, (0,), self._of_chosen()), p.load(ids, (0,), self._of_chosen()), values)
        p.barrier()
        p.free_shared(values, choices, chosen, ids)

    def _of_chosen(self) -> Layout:
        return local(self.plan.top_k).replicated(THREADS)

    def _cube(self, columns: int) -> Layout:
        """Returns the layout of experts and others [width, lanes * columns]."""
        lanes = self.plan.lanes
        rows = THREADS // lanes
        return local(self.plan.width // rows, 1).spatial(rows, lanes).local(1, columns)

    def _compare(self, token: Scalar, values: Memory, choices: Memory) -> None:
        """Writes the scores of all experts, and what is compared: numbers, -inf behind the last."""
        p, plan = self.p, self.plan
        layout = local(1, -(-plan.width // THREADS)).spatial(1, THREADS)
        inside = p.iota(1, layout) < plan.experts
        value = p.load(self.memory, (token + plan.first_row, 0), layout, ("clamp", "zero"))
        if not plan.softmax:
            value = p.reciprocal(p.exp(-value) + 1.0)
        value = p.select(inside, value, -inf)
        choice = value
        if plan.corrected:
            correction = p.global_view(p["correction"], "f32", (1, plan.experts))
            choice = value + p.load(correction, (0, 0), layout, ("none", "zero"))
        choice = p.select(choice == choice, choice, inf)
        for tile, memory in ((value, values), (choice, choices)):
            p.store(tile, memory, (0, 0), ("none", "skip"))

    def _rank(self, choices: Memory, expert: Tile) -> Tile:
        """Returns how many experts are before each [width, 1]."""
        p, plan = self.p, self.plan
        cube = self._cube(min(_AT_ONCE, plan.width // plan.lanes))
        own = p.constant(0.0, "f32", cube) + p.gather(choices, (0,), expert)
        rank, one = p.constant(0, "i32", expert.layout), p.constant(1, "i32", cube)
        with p.loop(0, plan.width // cube.shape[1], [rank]) as loop:
            start = loop.index * cube.shape[1]
            others = p.constant(0.0, "f32", cube) + p.load(choices, (0, start), cube.reduce((0,)))
            number = p.iota(1, cube) + p.splat(start, "i32", cube)
            first = p.select(number < expert, one, 0)
            before = p.select(others > own, one, p.select(others == own, first, 0))
            loop.results = [loop.carried[0] + p.reduce(before, 1)]
        return loop.carried[0]

    def _store(self, token: Scalar, chosen: Tile, ids: Tile, values: Memory) -> None:
        """Writes the weights of a token and the experts that they are of."""
        p, plan = self.p, self.plan
        weights = self._weights(chosen, values) * p.splat(p["scale"], "f32", chosen.layout)
        given = p.global_view(p["scores"], plan.scores, (-1, plan.top_k), sizes=[p["m"]])
        p.store(p.reshape(p.cast(weights, plan.scores), (1, plan.top_k)), given, (token, 0), ("skip", "none"))
        words = p.global_view(p["ids"], "i32", (-1, plan.top_k, 2), sizes=[p["m"]])
        low = p.reshape(ids, (1, plan.top_k, 1))
        for word, tile in enumerate((low, p.constant(0, "i32", low.layout))):
            p.store(tile, words, (token, 0, word), ("skip", "none", "none"))

    def _weights(self, chosen: Tile, values: Memory) -> Tile:
        """Returns the weights [top_k] of a token's experts."""
        p, plan = self.p, self.plan
        if not plan.softmax:
            return p.div(chosen, p.reduce(chosen, 0) + TINY) if plan.renormalized else chosen
        most = p.reduce(chosen, 0, "max")
        parts = p.exp(chosen - most)
        if plan.renormalized:
            return p.div(parts, p.reduce(parts, 0))
        layout = local(-(-plan.width // _WARP)).replicated(THREADS // _WARP).spatial(_WARP)
        every = p.reshape(p.load(values, (0, 0), layout.reshape((1, layout.shape[0])), ("none", "zero")), layout.shape)
        inside = p.iota(0, layout) < plan.experts
        return p.div(parts, p.reduce(p.select(inside, p.exp(every - most), 0.0), 0))


def _power_of_two(number: int) -> int:
    """Returns the least power of two that is at least so large."""
    return 1 << (number - 1).bit_length()
