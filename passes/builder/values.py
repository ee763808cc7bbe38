"""What a tile program computes with beside tiles: scalars and memory; and how Python's values become attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Global, Shared, strings
from lowbit.passes.builder.scope import check_values, users_line

_MOST = 1 << 63  # of an attribute, which has 64 bits


@dataclass(frozen=True)
class Scalar:
    """A number that is the same for all threads, an i32, a condition, or a parameter. Arithmetic is for i32."""

    value: Any

    def _binary(self, make: Any, other: Scalar | int) -> Scalar:
        return self._made(make.__name__, lambda: make(self.value, as_i32(other)), other)

    def _made(self, name: str, make: Callable[[], Any], *others: object) -> Scalar:
        """What an operation makes of this scalar, which must be an i32, or a condition if `others` say so."""
        with users_line(f"arithmetic on scalars ({name})"):
            check_values(None, (self, *others))
            return Scalar(make())

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
        return self._made("cmpi", lambda: arith.cmpi(arith.CmpIPredicate.slt, self.value, as_i32(other)), other)

    def min(self, other: Scalar | int) -> Scalar:
        return self._binary(arith.minsi, other)

    def max(self, other: Scalar | int) -> Scalar:
        return self._binary(arith.maxsi, other)

    def __or__(self, other: Scalar) -> Scalar:
        """Whether one of two conditions holds."""
        return self._made("ori", lambda: arith.ori(self.value, other.value), other)

    def __invert__(self) -> Scalar:
        """Whether a condition does not hold."""
        return self._made("xori", lambda: arith.xori(self.value, arith.constant(ir.IntegerType.get_signless(1), 1)))

    @staticmethod
    def of(number: int) -> Scalar:
        """A number that is known."""
        return Scalar(as_i32(number))

    def select(self, a: Scalar | int, b: Scalar | int) -> Scalar:
        """a where this condition holds, else b."""
        return self._made("select", lambda: arith.select(self.value, as_i32(a), as_i32(b)), a, b)


Index = Scalar | int


def as_i32(x: Index) -> Any:
    """The SSA value of an index. Raises PassError for what is neither a scalar nor an int of 32 bits."""
    if isinstance(x, Scalar):
        return x.value
    with users_line(f"index {x!r}"):
        if not isinstance(cast(object, x), int) or not -(1 << 31) <= x < 1 << 31:
            raise PassError("expected a Scalar or an int of 32 bits")
        check_values(None, ())
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
    """A number as an attribute. Raises PassError for one of more than 64 bits."""
    if not -_MOST <= number < _MOST:
        raise PassError(f"expected a number of 64 bits, got {number}")
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)


def text(words: str) -> ir.StringAttr:
    return ir.StringAttr.get(words)


def boundary_of(boundary: Sequence[str] | None, layout: Layout) -> ir.ArrayAttr:
    """Returns what happens beyond the edge along each dim of a tile; by default no access is there."""
    return strings(tuple(boundary or ("none",) * layout.rank))
