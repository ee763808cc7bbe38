"""What the assembly form of an operation follows from: the declaration of its class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from lowbit.dialect import ops
from lowbit.dialect.bindings import ext, ir, irdl, new_context

_ext: Any = ext  # whose type stubs have no more than what declares operations

OFFSETS, BOUNDARY, SYMBOL, PARAMS = "offsets", "boundary", "sym_name", "params"
_ADDRESSED = ("source", "map", "target")  # the first of these operands that there is has the offsets


@dataclass(frozen=True)
class Declaration:
    """Operands, results and attributes of a class of operations, as far as the assembly form depends on them.

    singles and variadic are the names of operands; `variadic` comes behind `before` of the single ones. Behind all are
    `absent` more variadic ones: an operation that has some of these is printed in the generic form. Of operands and
    results, `fixed` has the types that the declaration leaves no choice of. `defaults` are texts of attributes.
    """

    name: str
    singles: tuple[str, ...]
    variadic: str | None
    before: int
    absent: int
    results: tuple[str, ...]
    fixed: dict[str, str]
    defaults: dict[str, str]
    has_boundary: bool
    has_symbol: bool
    has_params: bool
    has_region: bool

    @property
    def addressed(self) -> str | None:
        """The operand behind which offsets are written, in square brackets."""
        return next((name for name in _ADDRESSED if name in self.singles), None) if self.variadic == OFFSETS else None

    def operands(self, count: int) -> list[str]:
        """The name of each of `count` operands, in the order of the generic form."""
        many = [self.variadic or ""] * (count - len(self.singles))
        return [*self.singles[: self.before], *many, *self.singles[self.before :]]

    def segments(self, count: int) -> str | None:
        """The attribute that says how many operands are in each part; None where no part has a choice."""
        if self.variadic is None:
            return None
        sizes = ["1"] * len(self.singles)
        sizes.insert(self.before, str(count - len(self.singles)))
        return f"array<i32: {', '.join(sizes + ['0'] * self.absent)}>"


@cache
def declarations() -> dict[str, Declaration]:
    """All operations of the dialect by name."""
    with new_context():
        return {operation.OPERATION_NAME: _declaration(operation) for operation in ops.Lowbit.operations}


def _declaration(operation: Any) -> Declaration:
    fields: list[Any] = list(operation._fields)
    operands = [field for field in fields if isinstance(field, _ext.OperandDef)]
    results = [field for field in fields if isinstance(field, _ext.ResultDef)]
    attributes = {field.name: field for field in fields if isinstance(field, _ext.AttributeDef)}
    many = [i for i, field in enumerate(operands) if field.variadicity != irdl.Variadicity.single]
    factories: dict[str, Any] = {name: field.default_factory for name, field in attributes.items()}
    return Declaration(
        operation.OPERATION_NAME,
        tuple(field.name for i, field in enumerate(operands) if i not in many),
        operands[many[0]].name if many else None,
        many[0] if many else len(operands),
        max(len(many) - 1, 0),
        tuple(field.name for field in results),
        {field.name: text for field in operands + results if (text := _fixed(field.constraint))},
        {name: str(factory()) for name, factory in factories.items() if factory},
        BOUNDARY in attributes,
        SYMBOL in attributes,
        PARAMS in attributes,
        any(isinstance(field, _ext.RegionDef) for field in fields),
    )


def _fixed(constraint: Any) -> str | None:
    """The only type that a constraint admits, if it is one of an integer's."""
    origin = get_origin(constraint)
    return str(_ext.construct_instance(origin, get_args(constraint))) if origin is ir.IntegerType else None
