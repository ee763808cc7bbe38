"""Arithmetic on tiles, element by element. Tiles know + - * / and comparisons, too."""

from __future__ import annotations

from lowbit.dialect import ops
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.tile import Operand, Tile, compare, elementwise, select


class Elementwise(Operations):
    """Arithmetic, comparisons and functions of each element."""

    def add(self, a: Operand, b: Operand) -> Tile:
        """a + b, rounded to nearest even."""
        return elementwise(ops.AddOp, a, b)

    def sub(self, a: Operand, b: Operand) -> Tile:
        """a - b, rounded to nearest even."""
        return elementwise(ops.SubOp, a, b)

    def mul(self, a: Operand, b: Operand) -> Tile:
        """a * b, rounded to nearest even."""
        return elementwise(ops.MulOp, a, b)

    def div(self, a: Operand, b: Operand) -> Tile:
        """a / b, at most 2 ulps of f32 off."""
        return elementwise(ops.DivOp, a, b)

    def quotient(self, a: Operand, b: Operand) -> Tile:
        """a / b of integers (i32) without a sign, rounded down."""
        return elementwise(ops.QuotientOp, a, b)

    def max(self, a: Operand, b: Operand) -> Tile:
        """The larger of each two, NaN if one of them is."""
        return elementwise(ops.MaxOp, a, b)

    def min(self, a: Operand, b: Operand) -> Tile:
        """The smaller of each two, NaN if one of them is."""
        return elementwise(ops.MinOp, a, b)

    def fma(self, a: Operand, b: Operand, c: Operand) -> Tile:
        """a * b + c, rounded once; of integers (i32) the lowest 32 bits."""
        return elementwise(ops.FmaOp, a, b, c)

    def neg(self, a: Tile) -> Tile:
        """-a."""
        return elementwise(ops.NegOp, a)

    def abs(self, a: Tile) -> Tile:
        """|a|."""
        return elementwise(ops.AbsOp, a)

    def reciprocal(self, a: Tile) -> Tile:
        """1 / a in f32, rounded to nearest even."""
        return elementwise(ops.ReciprocalOp, a)

    def exp(self, a: Tile) -> Tile:
        """e^a, at most 2 + |1.173 a| ulps of f32 off."""
        return elementwise(ops.ExpOp, a)

    def tanh(self, a: Tile) -> Tile:
        """The hyperbolic tangent, with a relative error of at most 2^-11."""
        return elementwise(ops.TanhOp, a)

    def sqrt(self, a: Tile) -> Tile:
        """The square root of a, rounded to nearest even."""
        return elementwise(ops.SqrtOp, a)

    def compare(self, a: Operand, predicate: str, b: Operand) -> Tile:
        """Whether a is "lt", "le", "eq", "ne", "gt" or "ge" b, for `select`."""
        return compare(a, predicate, b)

    def select(self, condition: Tile, a: Operand, b: Operand) -> Tile:
        """a where the condition holds, else b."""
        return select(condition, a, b)
