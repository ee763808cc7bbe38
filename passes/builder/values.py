"""What a tile program computes with beside tiles: scalars and memory; and how Python's values become attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Global, Shared, strings


@dataclass(frozen=True)
class Scalar:
    """A number that is the same for all threads, an i32, a condition, or a parameter. Arithmetic is for i32."""

    value: Any

    def _binary(self, make: Any, other: Scalar | int) -> Scalar:
        return Scalar(make(self.value, as_i32(other)))

    def __add__(self, other: Scalar | int) -> Scalar:
        return self if other == 0 else self._binary(arith.addi, other)

    def __radd__(self, other: int) -> Scalar:
        return self + other

    def __sub__(self, other: Scalar | int) -> Scalar:
        return self if other == 0 else self._binary(arith.subi, other)

    def __mul__(self, other: Scalar | int) -> Scalar:
        return self if other == 1 else self._binary(arith.muli, other)

    def __rmul__(self, other: int) -> Scalar:
        return self * other

    def __floordiv__(self, other: Scalar | int) -> Scalar:
        return self if other == 1 else self._binary(arith.divui, other)

    def __mod__(self, other: Scalar | int) -> Scalar:
        return self._binary(arith.remui, other)

    def __lt__(self, other: Scalar | int) -> Scalar:
        return Scalar(arith.cmpi(arith.CmpIPredicate.slt, self.value, as_i32(other)))

    def min(self, other: Scalar | int) -> Scalar:
        return self._binary(arith.minsi, other)

    def max(self, other: Scalar | int) -> Scalar:
        return self._binary(arith.maxsi, other)

    def __or__(self, other: Scalar) -> Scalar:
        """Whether one of two conditions holds."""
        return Scalar(arith.ori(self.value, other.value))

    def __invert__(self) -> Scalar:
        """Whether a condition does not hold."""
        return Scalar(arith.xori(self.value, arith.constant(ir.IntegerType.get_signless(1), 1)))

    @staticmethod
    def of(number: int) -> Scalar:
        """A number that is known."""
        return Scalar(as_i32(number))

    def select(self, a: Scalar | int, b: Scalar | int) -> Scalar:
        """a where this condition holds, else b."""
        return Scalar(arith.select(self.value, as_i32(a), as_i32(b)))


Index = Scalar | int


def as_i32(x: Index) -> Any:
    """The SSA value of an index."""
    if isinstance(x, Scalar):
        return x.value
    return arith.constant(ir.IntegerType.get_signless(32), x)


@dataclass(frozen=True)
class Memory:
    """A view of device memory or a buffer in shared memory."""

    value: Any
    type: Global | Shared


def indices(offsets: Sequence[Index]) -> list[Any]:
    """The SSA values of the indices of one element."""
    return [as_i32(offset) for offset in offsets]


def i64(number: int) -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)


def text(words: str) -> ir.StringAttr:
    return ir.StringAttr.get(words)


def boundary_of(boundary: Sequence[str] | None, layout: Layout) -> ir.ArrayAttr:
    """Returns what happens beyond the edge along each dim of a tile; by default no access is there."""
    return strings(tuple(boundary or ("none",) * layout.rank))
