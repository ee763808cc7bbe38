"""Arithmetic of the programs that search in groups (`groups`, `round_groups`), on vectors of sixteen lanes in f32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lowbit.dialect.bindings import arith, ir, llvm
from lowbit.passes.cpu.group_plans import GroupPlan
from lowbit.passes.cpu.task import Needs
from lowbit.passes.cpu.vector_ops import LANES, Value, constant, f32, fma, vec
from lowbit.passes.cpu.worker import Task, define, take_pieces

BYTES = 4 * LANES  # of a vector of f32
LARGEST = float(np.finfo(np.float32).max)
_Ends = arith.CmpFPredicate


class Fitted(NamedTuple):
    """The best scales and offsets of a tile so far, and their errors, less what does not depend on levels."""

    scales: Value
    offsets: Value
    errors: Value


def define_pieces(plan: GroupPlan, piece: Callable[[Task, Value], None]) -> None:
    """Defines a program; `piece` emits a piece of its work, and takes the task and the piece's number."""

    def run(base: Value) -> None:
        task = Task(base, Needs(), plan.words)
        take_pieces(task, lambda number: piece(task, number))

    define(run)


def splat(value: float) -> Value:
    """A number in all lanes."""
    return constant(vec(f32()), float(value))


def quotient(x: Value, y: Value) -> Value:
    """x / y, and 0 where y is 0."""
    is_zero = arith.cmpf(_Ends.OEQ, y, constant(y.type, 0.0))
    return arith.divf(x, arith.select(is_zero, constant(y.type, float("inf")), y))


def difference(a: Value, b: Value, c: Value, d: Value) -> Value:
    """a b - c d."""
    return fma(a, b, arith.negf(arith.mulf(c, d)))


def larger(a: Value, b: Value) -> Value:
    """The larger of two numbers; b where a is none."""
    return arith.select(arith.cmpf(_Ends.OGT, a, b), a, b)


def lesser(a: Value, b: Value) -> Value:
    """The lesser of two numbers; b where a is none."""
    return arith.select(arith.cmpf(_Ends.OLT, a, b), a, b)


def nearest(x: Value, least: float, most: float) -> Value:
    """The nearest whole number between two; ties go to the even one."""
    return whole(lesser(larger(x, constant(x.type, least)), constant(x.type, most)))


def whole(x: Value) -> Value:
    """The nearest whole number; ties go to the even one."""
    return llvm.call_intrinsic(x.type, f"llvm.rint.v{ir.VectorType(x.type).shape[0]}f32", [x], [], [])


def added(levels: Value, w: Value, c: Value, sums: Sequence[Value]) -> list[Value]:
    """The sums of q w, q and q^2, as often as each counts, with those of a column: weights, and how much they count."""
    counted = arith.mulf(levels, c)
    products, of_levels, squares = sums
    return [fma(counted, w, products), arith.addf(of_levels, counted), fma(counted, levels, squares)]


def least_squares(
    sums: Sequence[Value], weights: Value, count: Value, has_offsets: bool = True, is_signed: bool = True
) -> Fitted:
    """The scales and offsets with which levels have the least error.

    sums             those of `added` over a group
    weights, count   the sums of w and of 1, as often as each counts
    is_signed        whether scales may be below 0 and offsets above
    """
    (products, of_levels, squares), times, zero = sums, arith.mulf, splat(0.0)
    alone = quotient(products, squares)
    scales, offsets = alone if is_signed else larger(alone, zero), zero
    if has_offsets:
        determinant = difference(count, squares, of_levels, of_levels)
        s = quotient(difference(count, products, of_levels, weights), determinant)
        o = quotient(difference(squares, weights, of_levels, products), determinant)
        allowed = arith.cmpf(_Ends.OGT, determinant, zero)
        if not is_signed:
            for limit, value in ((_Ends.OLE, o), (_Ends.OGE, s)):
                allowed = arith.andi(allowed, arith.cmpf(limit, value, zero))
        scales, offsets = arith.select(allowed, s, scales), arith.select(allowed, o, zero)
    rest = fma(offsets, of_levels, arith.negf(products))  # of the products, less what offsets make up for
    errors = times(scales, fma(scales, squares, arith.addf(rest, arith.subf(times(offsets, of_levels), products))))
    return Fitted(scales, offsets, fma(offsets, fma(offsets, count, times(weights, splat(-2.0))), errors))


def better(new: Any, old: Any) -> Any:
    """Of two tuples that have `errors`, the one with less in each lane."""
    less = arith.cmpf(_Ends.OLT, new.errors, old.errors)
    return type(old)(*(arith.select(less, *each) for each in zip(new, old)))
