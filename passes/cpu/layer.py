"""What stands between the matmuls of a layer that decodes, as programs of the host, and the program that runs them all.

Arithmetic is in f32, and results are rounded to the activation's type once. Attention scores sixteen places at a time.
Scores lie in the task's scratch memory until the largest is known; then they become weights, by which the values of all
places are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowbit.dialect.bindings import arith, ir, llvm, vector
from lowbit.dialect.elements import ELEMENTS
from lowbit.passes.cpu.decode import Isa
from lowbit.passes.cpu.epilogue import exponential
from lowbit.passes.cpu.layer_plans import STEP_WORDS, Attend, Chain, LayerPlan, Norm, Rope
from lowbit.passes.cpu.task import WORDS, Needs
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    add,
    at,
    broadcast,
    constant,
    constants,
    divmod_,
    f32,
    fma,
    i,
    i64,
    less,
    load,
    loop,
    mul,
    pointer,
    round_to,
    scalar_type,
    square_root,
    store,
    sum_each,
    sum_of,
    vec,
    when,
)
from lowbit.passes.cpu.worker import Task, define, take_pieces, wait_until_done

_BYTES = 4 * LANES  # of a vector of f32
_LEAST = -3.0e38  # a score of a place that is not looked at; no infinity, whose difference from itself is no number
_TINY = 1e-30  # sums of weights are at least this: those of a token that looks at no place are 0


class _NormProgram(Norm):
    def build(self, isa: Isa) -> None:
        """Defines the program in the module at the insertion point."""
        _define_pieces(self.words, self._token)

    def _token(self, task: Task, token: Value) -> None:
        row = mul(token, self.hidden * ELEMENTS[self.act].bytes)
        x, y, residual = (at(task.array(name), row) for name in ("x", "y", "residual"))
        factor = broadcast(_norm_factor(_Numbers(self.act, x), self.hidden, self.eps))
        gain = _Numbers(self.act, task.array("gain"))
        with loop(0, self.hidden, LANES) as column:
            number = arith.mulf(_Numbers(self.act, x).load(column.index), factor)
            number = arith.mulf(number, _shifted(gain.load(column.index), self.shift))
            if self.residual:  # the sum is of numbers as a tensor holds them
                number = _as_stored(self.act, number)
                number = arith.addf(number, _Numbers(self.act, residual).load(column.index))
            _Numbers(self.act, y).store(number, column.index)


class _RopeProgram(Rope):
    def build(self, isa: Isa) -> None:
        """Defines the program in the module at the insertion point."""
        _define_pieces(self.words, self._head)

    def _head(self, task: Task, piece: Value) -> None:
        token, head = divmod_(piece, self.heads)
        turning = self.queries + self.keys
        nbytes = self.columns * ELEMENTS[self.act].bytes
        batch, place = (each(token, task.integer("tokens")) for each in (arith.divui, arith.remui))

        def source(name: str, first: int) -> Value:
            row = arith.muli(token, task.integer(f"{name}_row"))
            return at(at(task.array(name), row), mul(arith.subi(head, i64(first)), nbytes))

        def cached(short: str, name: str, first: int) -> Value:
            of_batch = arith.muli(batch, task.integer(f"{name}_batch"))
            of_head = arith.muli(arith.subi(head, i64(first)), task.integer(f"{name}_head"))
            return at(at(task.array(f"{short}_out"), add(of_batch, of_head)), mul(place, nbytes))

        with when(less(head, i64(turning))):
            is_query = less(head, i64(self.queries))
            x = arith.select(is_query, source("q", 0), source("k", self.queries))
            q_out = at(task.array("q_out"), add(mul(token, self.queries * nbytes), mul(head, nbytes)))
            y = arith.select(is_query, q_out, cached("k", "key", self.queries))
            gain = arith.select(is_query, task.array("q_gain"), task.array("k_gain"))
            turns = [_Numbers(self.act, at(task.array(name), mul(token, nbytes))) for name in ("cos", "sin")]
            self._rotate(_Numbers(self.act, x), _Numbers(self.act, y), _Numbers(self.act, gain), turns)
        with when(less(i64(turning - 1), head)):
            x, y = source("v", turning), cached("v", "value", turning)
            with loop(0, nbytes, 2 * LANES) as byte:
                store(load(vec(i(8), 2 * LANES), at(x, byte.index)), at(y, byte.index))

    def _rotate(self, x: _Numbers, y: _Numbers, gain: _Numbers, turns: Sequence[_Numbers]) -> None:
        factor = broadcast(_norm_factor(x, self.columns, self.eps)) if self.normed else None
        half = self.columns // 2

        def numbers(column: Value) -> Value:
            if factor is None:
                return x.load(column)
            return arith.mulf(arith.mulf(x.load(column), factor), _shifted(gain.load(column), self.shift))

        with loop(0, half, LANES) as column:
            low, high = column.index, add(column.index, half)
            a, b = numbers(low), numbers(high)
            cos, sin = turns
            y.store(arith.subf(arith.mulf(a, cos.load(low)), arith.mulf(b, sin.load(low))), low)
            y.store(fma(b, cos.load(high), arith.mulf(a, sin.load(high))), high)


class _AttendProgram(Attend):
    def build(self, isa: Isa) -> None:
        """Defines the program in the module at the insertion point."""
        _define_pieces(self.words, self._head)

    def _head(self, task: Task, piece: Value) -> None:
        token, head = divmod_(piece, self.queries)
        nbytes = self.columns * ELEMENTS[self.act].bytes
        batch = arith.divui(token, task.integer("tokens"))
        shared = arith.divui(head, i64(self.queries // self.keys))

        def cached(name: str) -> Value:
            of_batch = arith.muli(batch, task.integer(f"{name}_batch"))
            return at(task.array(f"{name}s"), add(of_batch, arith.muli(shared, task.integer(f"{name}_head"))))

        length = task.integer("length")
        blocks = arith.divui(add(length, LANES - 1), i64(LANES))
        scores = at(task.array("scratch"), mul(arith.muli(piece, blocks), _BYTES))
        x, y = (_Numbers(self.act, at(task.array(name), mul(piece, nbytes))) for name in ("x", "y"))
        mask = self._row_of_mask(task, token, batch) if self.masked else None
        largest = self._score(x, cached("key"), mask, scores, length, blocks)
        total = _weigh(scores, largest, blocks)
        self._add_up(cached("value"), scores, total, length, y)

    def _row_of_mask(self, task: Task, token: Value, batch: Value) -> Value:
        own = arith.remui(token, task.integer("tokens"))
        of_batch = arith.muli(batch, task.integer("mask_batch"))
        return at(task.array("mask"), add(of_batch, arith.muli(own, task.integer("mask_row"))))

    def _score(
        self, q: _Numbers, keys: Value, mask: Value | None, scores: Value, length: Value, blocks: Value
    ) -> Value:
        """Writes the scores of all places, and returns the largest; those beyond the last have the least there is."""
        row = self.columns * ELEMENTS[self.act].bytes
        last = arith.subi(length, i64(1))
        with loop(0, blocks, carried=[constant(vec(f32()), _LEAST)]) as block:
            first = mul(block.index, LANES)
            places = [arith.minsi(add(first, n), last) for n in range(LANES)]
            each = [_Numbers(self.act, at(keys, mul(place, row))) for place in places]
            with loop(0, self.columns, LANES, carried=[constant(vec(f32()), 0.0)] * LANES) as column:
                of_q = q.load(column.index)
                column.carried = [fma(of_q, k.load(column.index), s) for k, s in zip(each, column.carried)]
            found = arith.mulf(sum_each(column.carried), constant(vec(f32()), self.scale))
            seen = _lanes_below(arith.subi(length, first))
            if mask is not None:
                seen = arith.andi(seen, _bytes_at(mask, places))
            found = arith.select(seen, found, constant(vec(f32()), _LEAST))
            store(found, at(scores, mul(block.index, _BYTES)))
            block.carried = [arith.maximumf(block.carried[0], found)]
        return vector.reduction(f32(), vector.CombiningKind.MAXIMUMF, block.carried[0])

    def _add_up(self, values: Value, weights: Value, total: Value, length: Value, y: _Numbers) -> None:
        """Stores the sum of values times weights, divided by the sum of the weights; 0 where all of these are."""
        row, vectors = self.columns * ELEMENTS[self.act].bytes, self.columns // LANES
        with loop(0, length, carried=[constant(vec(f32()), 0.0)] * vectors) as place:
            weight = broadcast(load(f32(), at(weights, mul(place.index, 4))))
            v = _Numbers(self.act, at(values, mul(place.index, row)))
            place.carried = [fma(weight, v.load(i64(LANES * n)), s) for n, s in enumerate(place.carried)]
        inverse = broadcast(arith.divf(constant(f32(), 1.0), arith.maximumf(total, constant(f32(), _TINY))))
        for n, each in enumerate(place.carried):
            y.store(arith.mulf(each, inverse), i64(LANES * n))


class _ChainProgram(Chain):
    def build(self, isa: Isa) -> None:
        """Defines the program in the module at the insertion point."""

        def run(base: Value) -> None:
            with loop(0, load(i(64), base)) as step:
                entry = at(base, mul(step.index, 8 * STEP_WORDS), 8)
                function = load(pointer(), entry)
                task = at(base, load(i(64), at(entry, byte=8)))
                llvm.call(None, [function, task], [], [])
                wait_until_done(at(task, byte=8 * WORDS.index("done")), load(i(64), at(entry, byte=16)), isa)

        define(run)


_PROGRAMS: dict[type[LayerPlan], Any] = {
    Norm: _NormProgram,
    Rope: _RopeProgram,
    Attend: _AttendProgram,
    Chain: _ChainProgram,
}


def build_layer_program(plan: LayerPlan, isa: Isa = "generic") -> ir.Module:
    """A program in the func, scf, arith, vector and llvm dialects. Needs a context."""
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        _PROGRAMS[type(plan)](**vars(plan)).build(isa)
    return module


class _Numbers:
    """Numbers of an activation's type in memory, sixteen of which are read and written at a time, as f32."""

    def __init__(self, act: str, base: Value) -> None:
        self._element, self._bytes, self._base = scalar_type(act), ELEMENTS[act].bytes, base

    def load(self, column: Value) -> Value:
        """Returns the numbers from a column on."""
        return arith.extf(vec(f32()), load(vec(self._element), at(self._base, mul(column, self._bytes))))

    def store(self, numbers: Value, column: Value) -> None:
        """Rounds numbers, and stores them from a column on."""
        store(round_to(numbers, self._element), at(self._base, mul(column, self._bytes)))


def _define_pieces(words: Sequence[str], piece: Callable[[Task, Value], None]) -> None:
    """Defines a program that has pieces alone."""

    def run(base: Value) -> None:
        task = Task(base, Needs(), words)
        take_pieces(task, lambda number: piece(task, number))

    define(run)


def _norm_factor(x: _Numbers, count: int, eps: float) -> Value:
    """Returns 1 / sqrt(mean of x^2 + eps)."""
    with loop(0, count, LANES, carried=[constant(vec(f32()), 0.0)]) as column:
        numbers = x.load(column.index)
        column.carried = [fma(numbers, numbers, column.carried[0])]
    mean = arith.mulf(sum_of(column.carried[0]), constant(f32(), 1.0 / count))
    return arith.divf(constant(f32(), 1.0), square_root(arith.addf(mean, constant(f32(), eps))))


def _shifted(gain: Value, shift: float) -> Value:
    return arith.addf(gain, constant(gain.type, shift)) if shift else gain


def _as_stored(act: str, numbers: Value) -> Value:
    return arith.extf(vec(f32()), round_to(numbers, scalar_type(act)))


def _lanes_below(count: Value) -> Value:
    """Returns which of sixteen lanes have a number below a count."""
    few = arith.trunci(i(32), arith.minsi(count, i64(LANES)))
    lanes = constants(i(32), range(LANES))
    return arith.cmpi(arith.CmpIPredicate.slt, lanes, broadcast(few))


def _bytes_at(mask: Value, places: Sequence[Value]) -> Value:
    """Returns which bytes at some places are not 0."""
    found = vector.from_elements(vec(i(8), len(places)), [load(i(8), at(mask, place)) for place in places])
    return arith.cmpi(arith.CmpIPredicate.ne, found, constant(found.type, 0))


def _weigh(scores: Value, largest: Value, blocks: Value) -> Value:
    """Makes weights of scores, e^(score - largest), and returns their sum; places that nobody looks at have 0."""
    most = broadcast(largest)
    with loop(0, blocks, carried=[constant(vec(f32()), 0.0)]) as block:
        place = at(scores, mul(block.index, _BYTES))
        found = load(vec(f32()), place)
        seen = arith.cmpf(arith.CmpFPredicate.OGT, found, constant(found.type, _LEAST))
        weights = arith.select(seen, exponential(arith.subf(found, most)), constant(found.type, 0.0))
        store(weights, place)
        block.carried = [arith.addf(block.carried[0], weights)]
    return sum_of(block.carried[0])
