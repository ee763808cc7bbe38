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

from typing import Any

import numpy as np

from lowbit.dialect.bindings import arith, ir
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
)
from lowbit.passes.cpu.group_plans import Errors, Fit, GroupPlan, Round, Tiles
from lowbit.passes.cpu.round_groups import RoundProgram
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    at,
    broadcast,
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
from lowbit.passes.cpu.worker import Task

_RANGES = "lowbit_ranges"
_Ends = arith.CmpFPredicate


class _Tile:
    """The weights of sixteen groups, and how much their squared errors count."""

    def __init__(self, task: Task, tile: Value, size: int) -> None:
        first = mul(tile, size * BYTES)
        self._weights, self._importance = (at(task.array(name), first) for name in ("x", "importance"))
        self._size = size

    def numbers(self, column: Value) -> tuple[Value, Value]:
        """Returns the weights of a column, and how much they count."""
        place = mul(column, BYTES)
        weights, counts = (load(vec(f32()), at(base, place)) for base in (self._weights, self._importance))
        return weights, counts

    def columns(self, start: list[Value]) -> Any:
        """A loop over the columns that carries sums."""
        return loop(0, self._size, carried=start)


class _TilesProgram(Tiles):
    def build(self) -> None:
        """Defines the program in the module at the insertion point."""
        define_pieces(self, self._tile)

    def _tile(self, task: Task, number: Value) -> None:
        first, place = mul(number, self.size * BYTES), mul(number, BYTES)
        source, target = (at(task.array(name), first) for name in ("x", "y"))
        lanes = constants(i(32), [self.size * lane for lane in range(LANES)])
        largest = splat(LARGEST)
        with loop(0, self.size, carried=[largest, arith.negf(largest)]) as column:
            numbers = gather(at(source, mul(column.index, 4)), lanes)
            store(numbers, at(target, mul(column.index, BYTES)))
            low, high = column.carried
            column.carried = [lesser(numbers, low), larger(numbers, high)]
        for name, ends in zip(self.words, column.carried):
            store(ends, at(task.array(name), place))


class _FitProgram(Fit):
    def build(self) -> None:
        """Defines the program in the module at the insertion point."""
        constant_array(_RANGES, f32(), np.array(self.ranges, np.float32))
        define_pieces(self, self._tile)

    def _tile(self, task: Task, number: Value) -> None:
        tile = _Tile(task, number, self.size)
        place = mul(number, BYTES)
        low, high = (load(vec(f32()), at(task.array(name), place)) for name in ("low", "high"))
        weights, count = self._sums(tile)
        best = Fitted(splat(0.0), splat(0.0), splat(float("inf")))
        with loop(0, len(self.ranges), carried=list(best)) as each:
            levels = broadcast(look_up(_RANGES, f32(), each.index))
            factor, shift = self._onto(levels, low, high)
            each.carried = list(self._better(tile, factor, shift, weights, count, Fitted(*each.carried)))
        with loop(0, self.rounds, carried=each.carried) as again:
            best = Fitted(*again.carried)
            factor = quotient(splat(1.0), best.scales)
            shift = arith.negf(arith.mulf(best.offsets, factor))
            again.carried = list(self._better(tile, factor, shift, weights, count, best))
        best = Fitted(*again.carried)
        store(best.scales, at(task.array("y"), place))
        if self.has_offsets:
            store(best.offsets, at(task.array("offsets"), place))

    def _sums(self, tile: _Tile) -> tuple[Value, Value]:
        """Returns the sums of what weights count times these, and of the former alone."""
        with tile.columns([splat(0.0)] * 2) as column:
            w, c = tile.numbers(column.index)
            column.carried = [fma(w, c, column.carried[0]), arith.addf(column.carried[1], c)]
        weights, count = column.carried
        return weights, count

    def _onto(self, levels: Value, low: Value, high: Value) -> tuple[Value, Value]:
        """Returns the factor and the shift that bring weights onto the levels of a range."""
        zero = splat(0.0)
        if self.has_offsets:
            if not self.is_signed:
                low, high = lesser(low, zero), larger(high, zero)
            factor = quotient(levels, arith.subf(high, low))
            return factor, arith.subf(splat(self.least), arith.mulf(low, factor))
        below = arith.cmpf(_Ends.OLT, high, arith.negf(low))
        factor = quotient(levels, arith.select(below, low, high))
        return (factor if self.is_signed else larger(factor, arith.negf(factor))), zero

    def _better(
        self, tile: _Tile, factor: Value, shift: Value, weights: Value, count: Value, best: Fitted
    ) -> Fitted:
        """Returns what fits the nearest levels, where that is better."""
        with tile.columns([splat(0.0)] * 3) as column:
            w, c = tile.numbers(column.index)
            levels = nearest(fma(w, factor, shift), self.least, self.most)
            column.carried = added(levels, w, c, column.carried)
        return better(least_squares(column.carried, weights, count, self.has_offsets, self.is_signed), best)


class _ErrorsProgram(Errors):
    def build(self) -> None:
        """Defines the program in the module at the insertion point."""
        define_pieces(self, self._tile)

    def _tile(self, task: Task, number: Value) -> None:
        tile, place = _Tile(task, number, self.size), mul(number, BYTES)
        scales, offsets = load(vec(f32()), at(task.array("scales"), place)), splat(0.0)
        if self.has_offsets:
            offsets = load(vec(f32()), at(task.array("offsets"), place))
        factor = quotient(splat(1.0), scales)
        shift = arith.negf(arith.mulf(offsets, factor))
        with tile.columns([splat(0.0)]) as column:
            w, c = tile.numbers(column.index)
            levels = nearest(fma(w, factor, shift), self.least, self.most)
            error = arith.subf(fma(levels, scales, offsets), w)
            column.carried = [fma(arith.mulf(error, error), c, column.carried[0])]
        store(column.carried[0], at(task.array("y"), place))


_PROGRAMS: dict[type[GroupPlan], Any] = {
    Tiles: _TilesProgram, Fit: _FitProgram, Errors: _ErrorsProgram, Round: RoundProgram,
}  # fmt: skip


def build_group_program(plan: GroupPlan) -> ir.Module:
    """A program in the func, scf, arith, vector and llvm dialects. Needs a context."""
    module = ir.Module.create()
    with ir.InsertionPoint(module.body):
        _PROGRAMS[type(plan)](**vars(plan)).build()
    return module
