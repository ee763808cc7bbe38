"""The assembly form of the dialect: how its IR is printed, and read.

MLIR's bindings give operations that are defined in Python no assembly format of their own: MLIR prints and reads them
in its generic form, in which a tile program is hard to read. So what MLIR prints is rewritten as text, and what it
reads is rewritten back (`statement`); operations of other dialects stay as they are. Printed IR moreover has names for
values (`names`) and for types (`aliases`), and no long lines. All of it is IR that `parse_module` reads; the generic
form is, too, and both may stand in one text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowbit.dialect.assembly.aliases import with_aliases
from lowbit.dialect.assembly.lines import folded
from lowbit.dialect.assembly.names import name_values
from lowbit.dialect.assembly.numbers import FILE, without_locations
from lowbit.dialect.assembly.rewrite import to_generic, to_own
from lowbit.dialect.assembly.tokens import SyntaxFault
from lowbit.dialect.bindings import ir

__all__ = ["parse_module", "print_module", "print_numbered", "to_generic", "to_own"]


def print_module(module: ir.Module, debug_info: bool = False) -> str:
    """The text of a module in our assembly form, or MLIR's own if it has no operations of the dialect.

    With `debug_info` it has locations, and values have numbers.
    """
    operation: Any = module.operation
    if not debug_info:
        with module.context:
            operation = operation.clone()
            name_values(operation)
    text = operation.get_asm(enable_debug_info=debug_info, use_name_loc_as_prefix=not debug_info)
    own = to_own(text)
    return folded(with_aliases(own)) if own != text else text


def print_numbered(
    module: ir.Module, number_of: Callable[[Any], int | None]
) -> tuple[str, list[int | None]]:
    """The text of a valid module as `print_module` gives it, and for every line of it the number of its operation.

    number_of   the number of an operation, at least 1, by its location; None for one without
    """
    operation: Any = module.operation

    def place_of(op: Any) -> ir.Location:
        number = number_of(op.location)
        return ir.Location.file(FILE, number, 0) if number else ir.Location.unknown()

    with module.context:
        operation = operation.clone()
        name_values(operation, place_of)
    text = operation.get_asm(enable_debug_info=True, use_name_loc_as_prefix=True, assume_verified=True)
    own = to_own(text)
    has_own = own != text
    lines = without_locations(with_aliases(own) if has_own else text)
    parts = [(part, number) for line, number in lines for part in (folded(line) if has_own else line).split("\n")]
    return "\n".join(part for part, _ in parts), [number for _, number in parts]


def parse_module(text: str) -> ir.Module:
    """Reads a module, in our form or in the generic one, in the current context.

    Raises SyntaxFault, which has the place, for an operation of the dialect that is not written as it should be, and
    MLIRError for what MLIR refuses.
    """
    try:
        generic = to_generic(text)
    except SyntaxFault as fault:
        line, column = text.count("\n", 0, fault.position) + 1, fault.position - text.rfind("\n", 0, fault.position)
        fault.location = ir.Location.file("", line, column)
        raise
    return ir.Module.parse(generic)
