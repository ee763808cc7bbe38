"""Searches for scales and offsets of groups, as programs of the host. Each of sixteen lanes has a group of its own.

    for each range:                        # Fit
        q = nearest level of each weight
        s, o = least squares for these q
        keep s and o where their error is the least so far
    for each round: the same, with q nearest for s and o

Sums over a group are sums of vectors; nothing is added across lanes. The numbers of a tile are read again for each
range, out of the first level of a cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowbit.dialect.bindings import arith, ir, llvm
from lowbit.passes.cpu.group_plans import Errors, Fit, GroupPlan, Tiles
from lowbit.passes.cpu.task import Needs
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    at,
    broadcast,
    constant,
    constant_array,
    constants,
    f32,
    fma,
    gather,
    i,
    load,
    look_up,
    loop,
    mul,
    store,
    vec,
)
from lowbit.passes.cpu.worker import Task, define, take_pieces

_BYTES = 4 * LANES  # of a vector of f32
_RANGES = "lowbit_ranges"
_LARGEST = float(np.finfo(np.float32).max)
_Ends = arith.CmpFPredicate


class _Fitted(NamedTuple):
    """The best scales and offsets of a tile so far, and their errors, less what does not depend on levels."""

    scales: Value
    offsets: Value
    errors: Value


class _Tile:
    """The weights of sixteen groups, and how much their squared errors count."""

    def __init__(self, task: Task, tile: Value, size: int) -> None:
        first = mul(tile, size * _BYTES)
        self._weights, self._importance = (at(task.array(name), first) for name in ("x", "importance"))
        self._size = size

    def numbers(self, column: Value) -> tuple[Value, Value]:
        """Returns the weights of a column, and how much they count."""
        place = mul(column, _BYTES)
        weights, counts = (load(vec(f32()), at(base, place)) for base in (self._weights, self._importance))
        return weights, counts

    def columns(self, start: list[Value]) -> Any:
        """A loop over the columns that carries sums."""
        return loop(0, self._size, carried=start)


class _TilesProgram(Tiles):
    def build(self) -> None:
        """Defines the program in the module at the insertion point."""
        _define_tiles(self, self._tile)

    def _tile(self, task: Task, number: Value) -> None:
        first, place = mul(number, self.size * _BYTES), mul(number, _BYTES)
        source, target = (at(task.array(name), first) for name in ("x", "y"))
        lanes = constants(i(32), [self.size * lane for lane in range(LANES)])
        largest = _number(_LARGEST)
        with loop(0, self.size, carried=[largest, arith.negf(largest)]) as column:
            numbers = gather(at(source, mul(column.index, 4)), lanes)
            store(numbers, at(target, mul(column.index, _BYTES)))
            low, high = column.carried
            column.carried = [_lesser(numbers, low), _larger(numbers, high)]
        for name, ends in zip(self.words, column.carried):
            store(ends, at(task.array(name), place))


class _FitProgram(Fit):
    def build(self) -> None:
        """Defines the program in the module at the insertion point."""
        constant_array(_RANGES, f32(), np.array(self.ranges, np.float32))
        _define_tiles(self, self._tile)

    def _tile(self, task: Task, number: Value) -> None:
        tile = _Tile(task, number, self.size)
        place = mul(number, _BYTES)
        low, high = (load(vec(f32()), at(task.array(name), place)) for name in ("low", "high"))
        weights, count = self._sums(tile)
        best = _Fitted(_number(0.0), _number(0.0), _number(float("inf")))
        with loop(0, len(self.ranges), carried=list(best)) as each:
            levels = broadcast(look_up(_RANGES, f32(), each.index))
            factor, shift = self._onto(levels, low, high)
            each.carried = list(self._better(tile, factor, shift, weights, count, _Fitted(*each.carried)))
        with loop(0, self.rounds, carried=each.carried) as again:
            best = _Fitted(*again.carried)
            factor = _quotient(_number(1.0), best.scales)
            shift = arith.negf(arith.mulf(best.offsets, factor))
            again.carried = list(self._better(tile, factor, shift, weights, count, best))
        best = _Fitted(*again.carried)
        store(best.scales, at(task.array("y"), place))
        if self.has_offsets:
            store(best.offsets, at(task.array("offsets"), place))

    def _sums(self, tile: _Tile) -> tuple[Value, Value]:
        """Returns the sums of what weights count times these, and of the former alone."""
        with tile.columns([_number(0.0)] * 2) as column:
            w, c = tile.numbers(column.index)
            column.carried = [fma(w, c, column.carried[0]), arith.addf(column.carried[1], c)]
        weights, count = column.carried
        return weights, count

    def _onto(self, levels: Value, low: Value, high: Value) -> tuple[Value, Value]:
        """Returns the factor and the shift that bring weights onto the levels of a range."""
        zero = _number(0.0)
        if self.has_offsets:
            if not self.is_signed:
                low, high = _lesser(low, zero), _larger(high, zero)
            factor = _quotient(levels, arith.subf(high, low))
            return factor, arith.subf(_number(self.least), arith.mulf(low, factor))
        below = arith.cmpf(_Ends.OLT, high, arith.negf(low))
        factor = _quotient(levels, arith.select(below, low, high))
        return (factor if self.is_signed else _larger(factor, arith.negf(factor))), zero

    def _better(
        self, tile: _Tile, factor: Value, shift: Value, weights: Value, count: Value, best: _Fitted
    ) -> _Fitted:
        """Returns what fits the nearest levels, where that is better."""
        with tile.columns([_number(0.0)] * 3) as column:
            w, c = tile.numbers(column.index)
            levels = _nearest(fma(w, factor, shift), self.least, self.most)
            counted = arith.mulf(levels, c)
            products, sums, squares = column.carried
            column.carried = [fma(counted, w, products), arith.addf(sums, counted), fma(counted, levels, squares)]
        products, sums, squares = column.carried
        found = self._least_squares(products, sums, squares, weights, count)
        better = arith.cmpf(_Ends.OLT, found.errors, best.errors)
        return _Fitted(*(arith.select(better, new, old) for new, old in zip(found, best)))

    def _least_squares(self, products: Value, sums: Value, squares: Value, weights: Value, count: Value) -> _Fitted:
        """Returns the scales and offsets with which levels have the least error.

        products, sums, squares   the sums over a group of what weights count times q w, q and q^2
        weights, count            the same of w and 1
        """
        times, zero = arith.mulf, _number(0.0)
        scales, offsets = self._allowed(_quotient(products, squares)), zero
        if self.has_offsets:
            determinant = _difference(count, squares, sums, sums)
            s = _quotient(_difference(count, products, sums, weights), determinant)
            o = _quotient(_difference(squares, weights, sums, products), determinant)
            allowed = arith.cmpf(_Ends.OGT, determinant, zero)
            if not self.is_signed:
                for limit, value in ((_Ends.OLE, o), (_Ends.OGE, s)):
                    allowed = arith.andi(allowed, arith.cmpf(limit, value, zero))
            scales, offsets = arith.select(allowed, s, scales), arith.select(allowed, o, zero)
        rest = fma(offsets, sums, arith.negf(products))  # of the products, less what offsets make up for
        errors = times(scales, fma(scales, squares, arith.addf(rest, arith.subf(times(offsets, sums), products))))
        return _Fitted(scales, offsets, fma(offsets, fma(offsets, count, times(weights, _number(-2.0))), errors))

    def _allowed(self, scales: Value) -> Value:
        return scales if self.is_signed else _larger(scales, _number(0.0))


class _ErrorsProgram(Errors):
    def build(self) -> None:
        """Defines the program in the module at the insertion point."""
        _define_tiles(self, self._tile)

    def _tile(self, task: Task, number: Value) -> None:
        tile, place = _Tile(task, number, self.size), mul(number, _BYTES)
        scales, offsets = load(vec(f32()), at(task.array("scales"), place)), _number(0.0)
        if self.has_offsets:
            offsets = load(vec(f32()), at(task.array("offsets"), place))
        factor = _quotient(_number(1.0), scales)
        shift = arith.negf(arith.mulf(offsets, factor))
        with tile.columns([_number(0.0)]) as column:
            w, c = tile.numbers(column.index)
            levels = _nearest(fma(w, factor, shift), self.least, self.most)
            error = arith.subf(fma(levels, scales, offsets), w)
            column.carried = [fma(arith.mulf(error, error), c, column.carried[0])]
        store(column.carried[0], at(task.array("y"), place))


_PROGRAMS: dict[type[GroupPlan], Any] = {Tiles: _TilesProgram, Fit: _FitProgram, Errors: _ErrorsProgram}


def build_group_program(plan: GroupPlan) -> ir.Module:
    """A program in the func, scf, arith, vector and llvm dialects. Needs a context."""
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        _PROGRAMS[type(plan)](**vars(plan)).build()
    return module


def _define_tiles(plan: GroupPlan, tile: Any) -> None:
    def run(base: Value) -> None:
        task = Task(base, Needs(), plan.words)
        take_pieces(task, lambda number: tile(task, number))

    define(run)


def _number(value: float) -> Value:
    return constant(vec(f32()), float(value))


def _quotient(x: Value, y: Value) -> Value:
    """x / y, and 0 where y is 0."""
    is_zero = arith.cmpf(_Ends.OEQ, y, _number(0.0))
    return arith.divf(x, arith.select(is_zero, _number(float("inf")), y))


def _difference(a: Value, b: Value, c: Value, d: Value) -> Value:
    """a b - c d."""
    return fma(a, b, arith.negf(arith.mulf(c, d)))


def _larger(a: Value, b: Value) -> Value:
    """The larger of two numbers; b where a is none."""
    return arith.select(arith.cmpf(_Ends.OGT, a, b), a, b)


def _lesser(a: Value, b: Value) -> Value:
    """The lesser of two numbers; b where a is none."""
    return arith.select(arith.cmpf(_Ends.OLT, a, b), a, b)


def _nearest(x: Value, least: float, most: float) -> Value:
    """The nearest whole number between two; ties go to the even one."""
    bounded = _lesser(_larger(x, _number(least)), _number(most))
    return llvm.call_intrinsic(vec(f32()), "llvm.rint.v16f32", [bounded], [], [])
