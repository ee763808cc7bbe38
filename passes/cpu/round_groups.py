"""Rounds a weight whose scales have one level, as a program of the host: from weights to codes, a tile at a time.

    for sixteen rows:
        find their root mean squares                                                                # _mean
        for each sixteen groups of these rows:
            bring their weights side by side, with how much squared errors count                    # _Tile
            search the scale, and the offset, of each group                                         # _parts, _ranges
            round every weight for its scale and offset, in the order of the weight                 # _write_codes

All numbers of a tile stay in the first level of a cache while they are searched. A weight that lies beyond both ends of
the levels has at least the error of the nearer end; where those of the two outermost weights alone are no less than the
least error so far, in each of the sixteen groups, a range is not looked at: more than half of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from math import gcd
from typing import NamedTuple

import numpy as np

from lowbit.dialect.bindings import arith, ir, scf, vector
from lowbit.passes.cpu.group_ops import (
    BYTES,
    LARGEST,
    Fitted,
    added,
    better,
    define_pieces,
    larger,
    least_squares,
    lesser,
    nearest,
    quotient,
    splat,
    whole,
)
from lowbit.passes.cpu.group_plans import Parts, Ranges, Round
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    add,
    at,
    broadcast,
    constant,
    constant_array,
    divmod_,
    f32,
    fma,
    i,
    i64,
    load,
    look_up,
    loop,
    mul,
    round_to,
    scalar_type,
    square_root,
    store,
    sum_of,
    vec,
)
from lowbit.passes.cpu.worker import Task

_SQUARE = 8  # rows and columns that are transposed at once
_UNROLLED = 8  # columns of a step of a loop: the end of so short a loop is predicted
_TRIED, _STEPS = "lowbit_tried", "lowbit_steps"
_LEAST_MEAN = 1e-36  # of the weights of a row: numbers in units of it stay within f32
_LEAST_SCALE = {"f16": 2.0**-24, "bf16": 2.0**-126, "f32": 2.0**-126}
_Ends = arith.CmpFPredicate


class _Span(NamedTuple):
    """The best range of each group so far: its scale, which part it is of the group's own, and its error."""

    scales: Value
    ratio: Value
    errors: Value


class _End(NamedTuple):
    """The least, or the largest, weight of each group, and how much its squared error counts."""

    weights: Value
    counts: Value


class _Tile:
    """Sixteen groups side by side, [size, 16] in scratch memory: weights, and how much their squared errors count.

    lanes       how many have a group of their own; all others have the last one, too
    low, high   the ends of each group
    """

    def __init__(self, plan: Round, task: Task, tile: Value) -> None:
        self.plan, self._task, self._first = plan, task, mul(tile, LANES)
        self._last = arith.subi(task.integer("count"), i64(1))
        self.lanes = arith.minsi(arith.subi(task.integer("count"), self._first), i64(LANES))
        self._weights = task.array("scratch")
        self._counts = at(self._weights, byte=plan.size * BYTES)
        self._transpose(task.array("x"), self.group, self._weights)
        if plan.has_importance:
            blocks = task.integer("blocks")
            self._transpose(task.array("importance"), lambda n: arith.remui(self.group(n), blocks), self._counts)
        self.low, self.high = self._count(load(vec(f32()), at(task.array("inverse"), mul(tile, BYTES))))

    def group(self, lane: Value) -> Value:
        """Returns the number of a lane's group."""
        return arith.minsi(arith.addi(self._first, lane), self._last)

    def numbers(self, column: Value) -> tuple[Value, Value]:
        """Returns the weights of a column, and how much they count."""
        place = mul(column, BYTES)
        weights, counts = (load(vec(f32()), at(base, place)) for base in (self._weights, self._counts))
        return weights, counts

    def sums(self, count: int, terms: Callable[[Value, Value, list[Value]], list[Value]]) -> list[Value]:
        """Returns so many sums over the columns; `terms` takes weights, counts and sums, and returns the next sums."""
        with loop(0, self.plan.size, _UNROLLED, carried=[splat(0.0)] * count) as column:
            for n in range(_UNROLLED):
                column.carried = terms(*self.numbers(add(column.index, n)), column.carried)
        return column.carried

    def errors(self, *scales: Value, offsets: Sequence[Value] = (), alike: bool = False) -> list[Value]:
        """Returns the squared errors with the nearest levels for each of some scales, with offsets or without.
        alike: all count 1."""
        plan = self.plan
        spans = list(zip_longest(scales, offsets))
        factors = [quotient(splat(1.0), each) for each in scales]

        def squares(w: Value, c: Value, sums: list[Value]) -> list[Value]:
            added_up: list[Value] = []
            for (scale, offset), factor, squares in zip(spans, factors, sums):
                rest = w if offset is None else arith.subf(w, offset)
                levels = nearest(arith.mulf(rest, factor), plan.least, plan.most)
                error = fma(levels, scale, arith.negf(rest))
                added_up.append(fma(error if alike else arith.mulf(error, c), error, squares))
            return added_up

        return self.sums(len(scales), squares)

    def shift(self, by: Value) -> None:
        """Subtracts a number of each group from its weights."""
        with loop(0, self.plan.size) as column:
            place = at(self._weights, mul(column.index, BYTES))
            store(arith.subf(load(vec(f32()), place), by), place)

    def _count(self, inverse: Value) -> tuple[_End, _End]:
        """Writes how much errors count, and returns the ends."""
        ends = [splat(LARGEST), splat(1.0), splat(-LARGEST), splat(1.0)]
        with loop(0, self.plan.size, carried=ends) as column:
            place = mul(column.index, BYTES)
            w = load(vec(f32()), at(self._weights, place))
            relative = arith.mulf(w, inverse)
            c = _power(fma(relative, relative, splat(1.0)), self.plan.power)
            if self.plan.has_importance:
                c = arith.mulf(c, load(vec(f32()), at(self._counts, place)))
            store(c, at(self._counts, place))
            low, of_low, high, of_high = column.carried
            less, more = arith.cmpf(_Ends.OLT, w, low), arith.cmpf(_Ends.OGT, w, high)
            column.carried = [
                *(arith.select(less, new, old) for new, old in ((w, low), (c, of_low))),
                *(arith.select(more, new, old) for new, old in ((w, high), (c, of_high))),
            ]
        return _End(*column.carried[:2]), _End(*column.carried[2:])

    def _transpose(self, source: Value, row: Callable[[Value], Value], target: Value) -> None:
        """Brings sixteen rows of a source side by side, eight rows and columns at a time."""
        for half in range(LANES // _SQUARE):
            rows = [at(source, mul(row(i64(half * _SQUARE + n)), 4 * self.plan.size)) for n in range(_SQUARE)]
            with loop(0, self.plan.size, _SQUARE) as column:
                byte = mul(column.index, 4)
                loaded = [load(vec(f32(), _SQUARE), at(each, byte)) for each in rows]
                to = at(target, mul(column.index, BYTES), half * BYTES // 2)
                for n, each in enumerate(_transposed(loaded)):
                    store(each, at(to, byte=n * BYTES))


class RoundProgram(Round):
    """The program of a plan."""

    def build(self) -> None:
        """Defines the program in the module at the insertion point."""
        tried = self.search.ratios if isinstance(self.search, Parts) else self.search.ranges
        constant_array(_TRIED, f32(), np.array(tried, np.float32))
        if isinstance(self.search, Parts) and self.search.steps:
            constant_array(_STEPS, f32(), np.array(self.search.steps, np.float32))
        define_pieces(self, self._rows)

    def _rows(self, task: Task, number: Value) -> None:
        blocks, count = task.integer("blocks"), task.integer("count")
        first = arith.muli(mul(number, LANES), blocks)
        end = arith.minsi(arith.addi(first, mul(blocks, LANES)), count)
        with loop(first, end, blocks) as row:
            inverse = self._inverse_mean(at(task.array("x"), mul(row.index, 4 * self.size)), mul(blocks, self.size))
            with loop(row.index, arith.addi(row.index, blocks)) as group:
                store(inverse, at(task.array("inverse"), mul(group.index, 4)))
        with loop(divmod_(first, LANES)[0], divmod_(add(end, LANES - 1), LANES)[0]) as tile:
            self._tile(task, tile.index)

    def _inverse_mean(self, row: Value, k: Value) -> Value:
        """Returns 1 / the root mean square of a row, whose squares alone may be beyond f32."""
        lanes = gcd(self.size, 4 * _SQUARE)  # more than a register has: several sums at a time
        kind = vec(f32(), lanes)

        def over(combine: Callable[[Value, Value], Value]) -> Value:
            with loop(0, k, lanes, carried=[constant(kind, 0.0)]) as column:
                column.carried = [combine(load(kind, at(row, mul(column.index, 4))), column.carried[0])]
            return column.carried[0]

        largest = over(lambda w, most: larger(larger(w, arith.negf(w)), most))
        largest = vector.reduction(f32(), vector.CombiningKind.MAXIMUMF, largest)
        bounded = arith.maximumf(largest, constant(f32(), _LEAST_MEAN))
        factor = broadcast(arith.divf(constant(f32(), 1.0), bounded), lanes)
        squares = over(lambda w, sums: fma(arith.mulf(w, factor), arith.mulf(w, factor), sums))
        mean = arith.divf(sum_of(squares), arith.sitofp(f32(), k))
        mean = arith.maximumf(arith.mulf(bounded, square_root(mean)), constant(f32(), _LEAST_MEAN))
        return arith.divf(constant(f32(), 1.0), mean)

    def _tile(self, task: Task, tile: Value) -> None:
        groups, place = _Tile(self, task, tile), mul(tile, BYTES)
        if isinstance(self.search, Parts):
            store(self._parts(groups, self.search), at(task.array("scales"), place))
        else:
            for name, values in zip(("scales", "offsets"), self._ranges(groups, self.search)):
                store(values, at(task.array(name), place))
        self._write_codes(task, groups, place)

    def _rounded(self, values: Value) -> Value:
        """Returns numbers rounded to the type of scales."""
        element = scalar_type(self.scale)
        return values if element == f32() else arith.extf(vec(f32()), round_to(values, element))

    # -- parts of ranges, without offsets

    def _parts(self, groups: _Tile, search: Parts) -> Value:
        """Returns the scales of the best parts of the groups' ranges."""
        reach = self._reach(groups.low.weights, groups.high.weights)
        turned = self._reach(arith.negf(groups.high.weights), arith.negf(groups.low.weights))
        one = splat(1.0)
        old = self._scales(one, reach, turned)
        (start,) = groups.errors(old)
        best = _Span(old, one, start)
        upwards = sum(ratio > 0 for ratio in search.ratios)
        for first, last in ((0, upwards), (upwards, len(search.ratios))):
            best = self._narrower(groups, best, first, last, lambda r: self._scales(r, reach, turned))
        if search.steps:
            with loop(0, len(search.steps), carried=list(best)) as each:
                best, step = _Span(*each.carried), broadcast(look_up(_STEPS, f32(), each.index))
                near = [arith.mulf(best.ratio, how(one, step)) for how in (arith.addf, arith.subf)]
                scales = [self._scales(ratio, reach, turned) for ratio in near]
                each.carried = list(self._visited(groups, best, scales, near))
            best = _Span(*each.carried)
        return best.scales if search.gain is None else self._worth_it(groups, search.gain, best, old, start)

    def _narrower(
        self, groups: _Tile, best: _Span, first: int, last: int, scales: Callable[[Value], Value]
    ) -> _Span:
        """Returns the best with some of the ratios among them, each narrower than the one before: behind one that is
        not looked at there is none that is."""
        with loop(first, last, carried=[*best, constant(i(1), 1)]) as each:
            *carried, is_on = each.carried
            best = _Span(*carried)

            def visit() -> list[Value]:
                ratio = broadcast(look_up(_TRIED, f32(), each.index))
                found = scales(ratio)
                may_be = _any(arith.cmpf(_Ends.OLT, self._of_ends(groups, found), best.errors))
                (errors,) = _either(may_be, lambda: groups.errors(found), [best.errors])
                return [*better(_Span(found, ratio, errors), best), may_be]

            each.carried = _either(is_on, visit, each.carried)
        return _Span(*each.carried[:3])

    def _reach(self, low: Value, high: Value) -> Value:
        """Returns the least scale with which no end is clipped."""
        reach = splat(0.0)
        for end, level in ((high, self.most), (low, self.least)):
            if level:
                reach = larger(arith.divf(end, splat(level)), reach)
        return reach

    def _scales(self, ratio: Value, reach: Value, turned: Value) -> Value:
        """Returns the scales for parts of the groups' ranges, rounded to their type."""
        below = arith.cmpf(_Ends.OLT, ratio, splat(0.0))
        part = arith.mulf(arith.select(below, arith.negf(ratio), ratio), arith.select(below, turned, reach))
        scales = self._rounded(larger(part, splat(_LEAST_SCALE[self.scale])))
        return arith.select(below, arith.negf(scales), scales)

    def _visited(self, groups: _Tile, best: _Span, scales: list[Value], ratios: list[Value]) -> _Span:
        """Returns the best with two others among them, which are only looked at where one of them may be better."""
        may_be = arith.ori(*(arith.cmpf(_Ends.OLT, self._of_ends(groups, each), best.errors) for each in scales))
        errors = _either(_any(may_be), lambda: groups.errors(*scales), [best.errors] * 2)
        for found in zip(scales, ratios, errors):
            best = better(_Span(*found), best)
        return best

    def _of_ends(self, groups: _Tile, scales: Value) -> Value:
        """Returns the errors of the outermost weights, as far as they are beyond all levels."""
        ends = [arith.mulf(scales, splat(level)) for level in (self.least, self.most)]
        zero = splat(0.0)
        below = lesser(arith.subf(groups.low.weights, lesser(*ends)), zero)
        above = larger(arith.subf(groups.high.weights, larger(*ends)), zero)
        of_low = arith.mulf(arith.mulf(below, below), groups.low.counts)
        return fma(arith.mulf(above, above), groups.high.counts, of_low)

    def _worth_it(self, groups: _Tile, gain: float, best: _Span, old: Value, start: Value) -> Value:
        """Returns the best scales where they are worth it, and those of whole ranges elsewhere."""
        less = arith.cmpf(_Ends.OLT, best.errors, arith.mulf(start, splat(1 - gain)))
        squares = groups.errors(best.scales, old, alike=True)
        return arith.select(arith.andi(less, arith.cmpf(_Ends.OLE, *squares)), best.scales, old)

    # -- scales and offsets

    def _ranges(self, groups: _Tile, search: Ranges) -> tuple[Value, Value]:
        """Returns the scales and offsets of least error.

        The search takes weights from the lower end of their group on, and levels from 0 on: no sum loses digits to an
        offset, and without clipping there is nothing to compare in ranges that are not wider than the levels.
        """
        low, levels = groups.low.weights, self.most - self.least
        width = arith.subf(groups.high.weights, low)
        old = self._stored(groups, arith.divf(width, splat(levels)), splat(0.0))
        groups.shift(low)
        weights, count = groups.sums(2, lambda w, c, sums: [fma(w, c, sums[0]), arith.addf(sums[1], c)])
        best = Fitted(splat(0.0), splat(0.0), splat(float("inf")))

        def improved(best: Fitted, x: Callable[[Value], Value], least: bool, most: bool) -> Fitted:
            sums = groups.sums(3, lambda w, c, sums: added(_bounded(x(w), levels, least, most), w, c, sums))
            return better(least_squares(sums, weights, count), best)

        inside = [each for each in search.ranges if each <= levels]
        bounds = (0, len(inside), len(search.ranges))
        for first, last, wider in zip(bounds, bounds[1:], (False, True)):
            with loop(first, last, carried=list(best)) as each:
                factor = quotient(broadcast(look_up(_TRIED, f32(), each.index)), width)
                onto = partial(arith.mulf, factor)
                each.carried = list(improved(Fitted(*each.carried), onto, False, wider))
            best = Fitted(*each.carried)
        with loop(0, search.rounds, carried=[*best, splat(float("inf"))]) as each:
            *carried, before = each.carried
            best = Fitted(*carried)
            factor = quotient(splat(1.0), best.scales)
            shift = arith.negf(arith.mulf(best.offsets, factor))
            again = partial(improved, best, lambda w: fma(w, factor, shift), True, True)
            is_moving = arith.cmpf(_Ends.OLT, best.errors, before)  # else levels stay as they are
            each.carried = [*_either(_any(is_moving), again, best), best.errors]
        best = Fitted(*each.carried[:3])
        new = self._stored(groups, best.scales, best.offsets)
        (s, o), (old_s, old_o) = new, old
        errors = groups.errors(s, old_s, offsets=[arith.subf(each, low) for each in (o, old_o)])
        less = arith.cmpf(_Ends.OLT, *errors)
        scales, offsets = (arith.select(less, *each) for each in zip(new, old))
        return scales, offsets

    def _stored(self, groups: _Tile, scales: Value, offsets: Value) -> tuple[Value, Value]:
        """Returns scales as they are stored, and offsets from the lower end on and for levels from 0 on as well."""
        offsets = fma(scales, splat(-self.least), arith.addf(offsets, groups.low.weights))
        return self._rounded(scales), self._rounded(offsets)

    # -- codes

    def _write_codes(self, task: Task, groups: _Tile, place: Value) -> None:
        """Writes the nearest codes for the scales and offsets of a tile."""
        has_offsets = isinstance(self.search, Ranges)
        lanes = LANES if self.size % LANES == 0 else _SQUARE
        names = ("scales", "offsets") if has_offsets else ("scales",)
        tables = [at(task.array(name), place) for name in names]
        with loop(0, groups.lanes) as lane:
            group = groups.group(lane.index)
            scale, *offset = (broadcast(load(f32(), at(each, mul(lane.index, 4))), lanes) for each in tables)
            source, target = (at(task.array(name), mul(group, self.size * size)) for name, size in (("x", 4), ("y", 1)))
            with loop(0, self.size, lanes) as column:
                w = load(vec(f32(), lanes), at(source, mul(column.index, 4)))
                x = quotient(arith.subf(w, offset[0]) if offset else w, scale)
                codes = arith.fptosi(vec(i(32), lanes), nearest(x, self.least, self.most))
                store(arith.trunci(vec(i(8), lanes), codes), at(target, column.index))


def _power(x: Value, power: float) -> Value:
    """Returns x to the power of 0, 1/2 or 3/4."""
    if power == 0:
        return splat(1.0)
    root = square_root(x)
    return root if power == 0.5 else arith.mulf(root, square_root(root))


def _any(lanes: Value) -> Value:
    """Tells whether one of sixteen conditions holds."""
    return vector.reduction(i(1), vector.CombiningKind.OR, lanes)


def _either(condition: Value, then: Callable[[], Sequence[Value]], otherwise: Sequence[Value]) -> list[Value]:
    """Returns some values where a condition holds, and else other ones, which are there."""
    branch = scf.IfOp(condition, [each.type for each in otherwise], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp(list(then()))
    with ir.InsertionPoint(branch.else_block):
        scf.YieldOp(list(otherwise))
    return list(branch.results)


def _bounded(x: Value, levels: float, least: bool, most: bool) -> Value:
    """Returns the nearest of the levels from 0 on; least, most: whether x may be below or above them."""
    x = larger(x, splat(0.0)) if least else x
    x = lesser(x, splat(levels)) if most else x
    return whole(x)


def _transposed(rows: list[Value]) -> list[Value]:
    """Returns the columns of eight vectors of eight: pairs, then fours, then halves change places."""
    for half in (1, 2, 4):
        low = [n + (0 if n & half == 0 else _SQUARE - half) for n in range(_SQUARE)]
        high = [n + half if n & half == 0 else n + _SQUARE for n in range(_SQUARE)]
        pairs = [n for n in range(_SQUARE) if n & half == 0]
        for n in pairs:
            a, b = rows[n], rows[n + half]
            rows[n], rows[n + half] = vector.shuffle(a, b, low), vector.shuffle(a, b, high)
    return rows
