"""Which function lowers which operation in `lower-tiles`. Rules register themselves:

    @lowers(ops.PeerOp, needs=CLUSTERS)
    def peer(op: Any, c: LoweringContext) -> None:
        ...

A rule writes the operations of one thread at the current insertion point and records in the context what the results
of its operation have become. A new operation needs its class in `dialect.ops`, a rule in one of the files beside this
one, and a method of `passes.builder.Program` where kernels are to use it; no table lists the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from lowbit.dialect.errors import PassError
from lowbit.passes import lowering
from lowbit.passes.base import at
from lowbit.passes.lowering.context import Feature, LoweringContext

Rule = Callable[[Any, LoweringContext], None]

RULES: dict[str, Rule] = {}
"""Rules by the name of their operation."""


def lowers(*operations: Any, needs: Feature | None = None) -> Callable[[Rule], Rule]:
    """Registers a rule for operations, on targets that have the feature it needs."""

    def register(rule: Rule) -> Rule:
        for operation in operations:
            name = operation.OPERATION_NAME
            RULES[name] = rule if needs is None else _only_with(needs, name, rule)
        return rule

    return register


def _only_with(feature: Feature, name: str, rule: Rule) -> Rule:
    def guarded(op: Any, c: LoweringContext) -> None:
        c.require(feature, name)
        rule(op, c)

    return guarded


def import_rules() -> None:
    """Imports the files beside this one, whose rules register themselves."""
    for file in iter_modules(lowering.__path__):
        import_module(f"{lowering.__name__}.{file.name}")


def lower_block(block: Any, c: LoweringContext) -> None:
    """Lowers the operations of a block in program order. Raises PassError for one without a rule."""
    for op in block.operations:
        with at(op):
            name = op.operation.name
            if name in RULES:
                RULES[name](op, c)
            elif name.startswith("arith."):
                _copy_scalar(op, c)
            else:
                raise PassError(f"lower-tiles: no rule for '{name}' in a program")


def _copy_scalar(op: Any, c: LoweringContext) -> None:
    """Scalars of a program are those of every thread."""
    clone = op.operation.clone()
    for i, operand in enumerate(op.operation.operands):
        clone.operands[i] = c.scalars[operand]
    c.scalars.update(zip(op.operation.results, clone.results))
