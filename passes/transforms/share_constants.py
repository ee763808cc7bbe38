"""share-constants: leaves one of equal constants in a program, at its start.

Builders and passes write a constant wherever they need one, so that a program has hundreds of zeros. None of them
costs an instruction, but each costs the passes that follow time, and the reader a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.passes.base import each_op

_CONSTANTS = ("arith.constant", "lowbit.constant")


@dataclass(frozen=True)
class ShareConstants:
    """Keep one of equal constants of every lowbit.program, at its start."""

    name: ClassVar[str] = "share-constants"

    def run(self, module: ir.Module) -> None:
        for program in each_op(module, ops.ProgramOp):
            start = program.body.blocks[0].operations[0].operation
            kept: dict[Any, Any] = {}
            for constant in _constants(program):
                first = kept.setdefault(_key(constant), constant)
                if first is not constant:
                    constant.result.replace_all_uses_with(first.result)
                    constant.erase()
                elif constant != start:
                    constant.move_before(start)


def _constants(program: Any) -> list[Any]:
    """Returns the constants of a program in order."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name in _CONSTANTS:
            found.append(op)
        return ir.WalkResult.ADVANCE

    program.operation.walk(visit)
    return found


def _key(constant: Any) -> tuple[Any, ...]:
    """Returns what equal constants have in common: their kind, their type and their attributes."""
    return constant.name, constant.result.type, *((name, constant.attributes[name]) for name in constant.attributes)
