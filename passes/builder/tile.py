"""Tiles as values of a program that is being built: arithmetic between them, and with Python numbers.

    silu = gate / (1.0 + p.exp(-gate))

A number stands for a tile of that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import CONDITION, Reg
from lowbit.passes.builder.operators import NoOperators
from lowbit.passes.builder.scope import check_values, users_line


@dataclass(frozen=True, eq=False)
class Tile(NoOperators):
    """A tile in registers. Operators are of elements; comparisons, `==` and `!=` too, make a tile for
    `Program.select`."""

    value: Any

    operators = "a tile has + - * / // abs() and comparisons, with tiles and numbers, and what Program has"
    __hash__ = object.__hash__

    @property
    def reg(self) -> Reg:
        return Reg.of(self.value.type)

    @property
    def layout(self) -> Layout:
        return self.reg.layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.reg.shape

    def __bool__(self) -> bool:
        with users_line("if, and, or, not, in, min or max of Python"):
            raise PassError("a tile is neither true nor false, its elements are; choose with Program.select")

    def __add__(self, other: Operand) -> Tile:
        return elementwise(ops.AddOp, self, other)

    def __radd__(self, other: float) -> Tile:
        return elementwise(ops.AddOp, other, self)

    def __sub__(self, other: Operand) -> Tile:
        return elementwise(ops.SubOp, self, other)

    def __rsub__(self, other: float) -> Tile:
        return elementwise(ops.SubOp, other, self)

    def __mul__(self, other: Operand) -> Tile:
        return elementwise(ops.MulOp, self, other)

    def __rmul__(self, other: float) -> Tile:
        return elementwise(ops.MulOp, other, self)

    def __truediv__(self, other: Operand) -> Tile:
        return elementwise(ops.DivOp, self, other)

    def __rtruediv__(self, other: float) -> Tile:
        return elementwise(ops.DivOp, other, self)

    def __floordiv__(self, other: Operand) -> Tile:
        return elementwise(ops.QuotientOp, self, other)

    def __rfloordiv__(self, other: int) -> Tile:
        return elementwise(ops.QuotientOp, other, self)

    def __neg__(self) -> Tile:
        return elementwise(ops.NegOp, self)

    def __abs__(self) -> Tile:
        return elementwise(ops.AbsOp, self)

    def __lt__(self, other: Operand) -> Tile:
        return compare(self, "lt", other)

    def __le__(self, other: Operand) -> Tile:
        return compare(self, "le", other)

    def __gt__(self, other: Operand) -> Tile:
        return compare(self, "gt", other)

    def __ge__(self, other: Operand) -> Tile:
        return compare(self, "ge", other)

    def __eq__(self, other: Operand) -> Tile:  # type: ignore[override]
        return compare(self, "eq", other)

    def __ne__(self, other: Operand) -> Tile:  # type: ignore[override]
        return compare(self, "ne", other)


Operand = Tile | float


def elementwise(operation: Any, *operands: Operand) -> Tile:
    """Writes an operation whose result has the element of its operands, and the shape of the largest."""
    with users_line(f"arithmetic on tiles ({operation.OPERATION_NAME})"):
        reg = _larger(*operands)
        return Tile(operation(*_values(operands, reg), reg.type).result)


def compare(a: Operand, predicate: str, b: Operand) -> Tile:
    """Writes a comparison of each two elements."""
    with users_line("comparison of tiles (lowbit.compare)"):
        reg = _larger(a, b)
        values, condition = _values((a, b), reg), Reg(CONDITION, reg.layout)
        return Tile(ops.CompareOp(*values, ir.StringAttr.get(predicate), condition.type).result)


def select(condition: Tile, a: Operand, b: Operand) -> Tile:
    """Writes a choice between each two elements."""
    element = _larger(a, b).element
    reg = Reg(element, _larger(condition, a, b).layout)
    return Tile(ops.SelectOp(condition.value, *_values((a, b), reg), reg.type).result)


def _larger(*operands: Operand) -> Reg:
    """Returns the type of the largest tile. Raises PassError where there is none, and for what can't be used here."""
    for operand in operands:
        if not isinstance(cast(object, operand), Tile | int | float):
            raise PassError(f"an operand must be a Tile or a number, not {type(operand).__name__}")
    check_values(None, operands)
    tiles = [operand.reg for operand in operands if isinstance(operand, Tile)]
    if not tiles:
        raise PassError(f"arithmetic on {operands}: at least one operand must be a tile; use Program.constant for one")
    return max(tiles, key=lambda reg: reg.layout.size)


def _values(operands: tuple[Operand, ...], reg: Reg) -> list[Any]:
    """Returns the SSA values of operands of a result; numbers become constants of its type."""
    return [operand.value if isinstance(operand, Tile) else _constant(operand, reg) for operand in operands]


def _constant(number: float, reg: Reg) -> Any:
    kind = ir.F64Type if reg.element == "i32" else ir.F32Type  # f32 has not every integer of 32 bits
    return ops.ConstantOp(ir.FloatAttr.get(kind.get(), float(number)), reg.type).result
