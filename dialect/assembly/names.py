"""Names of values in printed IR: what belongs to a parameter is called after it, all else after its operation.

    %x_shared    the buffer to which x is copied       %x_tile       what is loaded from it
    %x_global    x as an array in device memory        %decode       the result of a lowbit.decode
    %x_stage     a stage of a buffer                   %i, %carried  what a loop counts, and hands to its next round

Names follow from the IR alone, so they are the same when it has been printed and read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowbit.dialect.bindings import ir
from lowbit.dialect.types import read_strings

_SUFFIXES = {"global_view": "global", "alloc_shared": "shared", "stage": "stage", "peer": "peer"} | dict.fromkeys(
    ("load", "load_matrix", "gather"), "tile"
)
_SOURCES = ("pointer", "source", "buffer")  # operands that a name is passed on from
_COPIED = ("source", "outliers", "map")  # operands of copies
_PREFIX = "lowbit."


def name_values(module: Any, place_of: Callable[[Any], ir.Location] | None = None) -> None:
    """Writes names into the locations of operations and arguments, in place of what is there.

    The printer takes names from there; and it would take those of the Python functions that a program was built by.

    place_of   of an operation the location that its name stands in front of; by default none
    """
    unknown = ir.Location.unknown()

    def visit(op: Any) -> Any:
        place = place_of(op) if place_of else unknown
        has_name = op.name.startswith(_PREFIX) and len(op.results)
        op.location = ir.Location.name(_name(op), place) if has_name else place
        for name, argument in _arguments(op):
            argument.set_location(ir.Location.name(name) if name else unknown)
        return ir.WalkResult.ADVANCE

    module.walk(visit, ir.WalkOrder.PRE_ORDER)


def _arguments(op: Any) -> list[tuple[str, Any]]:
    """The arguments of an operation's regions with their names; an empty one for those that get none."""
    if op.name == "lowbit.program":
        return _parameters(op)
    arguments = [argument for region in op.regions for block in region for argument in block.arguments]
    names = ["i", *("carried" for _ in arguments)] if op.name == "scf.for" else ["" for _ in arguments]
    return list(zip(names, arguments))


def _parameters(program: Any) -> list[tuple[str, Any]]:
    return list(zip(read_strings(program.attributes["params"]), program.regions[0].blocks[0].arguments))


def _name(op: Any) -> str:
    """The name of an operation's results."""
    kind = op.name.removeprefix(_PREFIX)
    suffix = _SUFFIXES.get(kind)
    if suffix is None:
        return kind
    owner = _filled_with(op.results[0]) if kind == "alloc_shared" else _passed_on(op, _SOURCES)
    return f"{owner}_{suffix}" if owner else suffix


def _passed_on(op: Any, operands: tuple[str, ...]) -> str | None:
    """The parameter that the first of these operands belongs to that belongs to one."""
    values = (getattr(op.opview, name, None) for name in operands)
    return next((name for value in values if value is not None and (name := _parameter(value))), None)


def _parameter(value: Any) -> str | None:
    """The parameter that a pointer or a piece of memory belongs to."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):
        program: Any = owner.owner.operation
        is_program = program.name == "lowbit.program"
        return _parameters(program)[ir.BlockArgument(value).arg_number][0] if is_program else None
    kind = owner.name.removeprefix(_PREFIX)
    if kind == "alloc_shared":
        return _filled_with(value)
    return _passed_on(owner, _SOURCES) if _SUFFIXES.get(kind, "tile") != "tile" else None


def _filled_with(buffer: Any) -> str | None:
    """The parameter of which a buffer in shared memory gets a copy."""
    for use in buffer.uses:
        op: Any = use.owner
        found = None
        if op.name == "lowbit.stage":
            found = _filled_with(op.results[0])
        elif op.name.startswith("lowbit.copy_"):
            found = _passed_on(op, _COPIED)
        if found:
            return found
    return None
