"""What a tile program computes with beside tiles: scalars and memory; and how Python's values become attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Global, Shared, strings
from lowbit.passes.builder.operators import NoOperators
from lowbit.passes.builder.scope import check_values, users_line

_MOST = 1 << 63  # of an attribute, which has 64 bits


@dataclass(frozen=True, eq=False)
class Scalar(NoOperators):
    """A number that is the same for all threads: an i32, a condition, or a parameter.

    Arithmetic is for i32, modulo 2^32. `//` and `%` take both sides as numbers without a sign, so they are not Python's
    where a scalar is below zero. Comparisons, `==` and `!=` too, are of numbers with a sign; they make conditions, for
    `Program.when` and `select`. `&` and `|` join two conditions, or the bits of two numbers.
    """

    value: Any

    operators = "a scalar has + - * // % & | ~ and comparisons, with scalars and ints"
    __hash__ = object.__hash__

    def _binary(self, make: Any, other: Index) -> Scalar:
        return self._made(make.__name__, lambda: make(self.value, as_i32(other)), other)

    def _compared(self, predicate: str, other: Index) -> Scalar:
        kind = getattr(arith.CmpIPredicate, predicate)
        return self._made("cmpi", lambda: arith.cmpi(kind, self.value, as_i32(other)), other)

    def _made(self, name: str, make: Callable[[], Any], *others: object) -> Scalar:
        """What an operation makes of this scalar, which must be an i32, or a condition if `others` say so."""
        with users_line(f"arithmetic on scalars ({name})"):
            check_values(None, (self, *others))
            return Scalar(make())

    def __bool__(self) -> bool:
        with users_line("if, and, or, not, in, min or max of Python"):
            raise PassError(
                "a scalar is neither true nor false before the program runs; branch with Program.when, choose with "
                "Scalar.select, Scalar.min or Scalar.max, join conditions with & and |"
            )

    def __add__(self, other: Index) -> Scalar:
        return self if _is(other, 0) else self._binary(arith.addi, other)

    def __radd__(self, other: int) -> Scalar:
        return self + other

    def __sub__(self, other: Index) -> Scalar:
        return self if _is(other, 0) else self._binary(arith.subi, other)

    def __rsub__(self, other: int) -> Scalar:
        return Scalar.of(other) - self

    def __neg__(self) -> Scalar:
        return 0 - self

    def __mul__(self, other: Index) -> Scalar:
        return self if _is(other, 1) else self._binary(arith.muli, other)

    def __rmul__(self, other: int) -> Scalar:
        return self * other

    def __floordiv__(self, other: Index) -> Scalar:
        """The quotient of two numbers without a sign, rounded down. Raises PassError for an int below 1."""
        return self if _is(other, 1) else self._binary(arith.divui, _divisor(other))

    def __rfloordiv__(self, other: int) -> Scalar:
        return Scalar.of(_dividend(other)) // self

    def __mod__(self, other: Index) -> Scalar:
        """The remainder of the quotient of two numbers without a sign. Raises PassError for an int below 1."""
        return self._binary(arith.remui, _divisor(other))

    def __rmod__(self, other: int) -> Scalar:
        return Scalar.of(_dividend(other)) % self

    def __lt__(self, other: Index) -> Scalar:
        return self._compared("slt", other)

    def __le__(self, other: Index) -> Scalar:
        return self._compared("sle", other)

    def __gt__(self, other: Index) -> Scalar:
        return self._compared("sgt", other)

    def __ge__(self, other: Index) -> Scalar:
        return self._compared("sge", other)

    def __eq__(self, other: Index) -> Scalar:  # type: ignore[override]
        return self._compared("eq", other)

    def __ne__(self, other: Index) -> Scalar:  # type: ignore[override]
        return self._compared("ne", other)

    def min(self, other: Index) -> Scalar:
        return self._binary(arith.minsi, other)

    def max(self, other: Index) -> Scalar:
        return self._binary(arith.maxsi, other)

    def __and__(self, other: Index) -> Scalar:
        """Whether both of two conditions hold."""
        return self._binary(arith.andi, other)

    def __or__(self, other: Index) -> Scalar:
        """Whether one of two conditions holds."""
        return self._binary(arith.ori, other)

    def __invert__(self) -> Scalar:
        """Whether a condition does not hold."""
        return self._made("xori", lambda: arith.xori(self.value, arith.constant(ir.IntegerType.get_signless(1), 1)))

    @staticmethod
    def of(number: int) -> Scalar:
        """A number that is known."""
        return Scalar(as_i32(number))

    def select(self, a: Index, b: Index) -> Scalar:
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


def _is(x: object, number: int) -> bool:
    """Whether x is an int that is known to be this number: `==` of a scalar is a condition."""
    return isinstance(x, int) and x == number


def _divisor(x: Index) -> Index:
    return _at_least(1, x, "the divisor")


def _dividend(x: int) -> int:
    return _at_least(0, x, "the dividend")


def _at_least(least: int, x: Any, name: str) -> Any:
    """Returns x. Raises PassError for an int that numbers without a sign can't be divided by, or are no dividend."""
    with users_line("// or % of scalars"):
        if isinstance(x, int) and x < least:
            raise PassError(f"{name} is {x}, but scalars are divided without a sign: expected {least} or more")
    return x


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
