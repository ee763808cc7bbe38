"""What a pass is, and how passes walk the IR."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import LowbitError


class Pass(Protocol):
    """A frozen dataclass whose fields are its options; `name` is how `lowbit opt` calls it."""

    name: ClassVar[str]

    def run(self, module: ir.Module) -> None:
        """Rewrite the module in place. Raises PassError for what it cannot lower."""
        ...


def each_op(module: ir.Module, *kinds: type) -> Iterator[Any]:
    """All operations of some classes, in program order; they may be erased on the way."""
    found: list[Any] = []
    wanted: dict[str, bool] = {}  # by name, which says the class: most operations need no view

    def visit(op: Any) -> Any:
        name = op.name
        if name not in wanted:
            wanted[name] = isinstance(op.opview, kinds)
        if wanted[name]:
            found.append(op.opview)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    yield from found


def each_function(module: ir.Module, kind: type) -> Iterator[Any]:
    """All functions of one class: they are at the top of the module, or of a gpu.module in it."""
    for op in module.body.operations:
        inner = op.operation.regions[0].blocks[0].operations if op.operation.name == "gpu.module" else (op,)
        yield from (each for each in inner if isinstance(each, kind))


def enclosing(op: Any, *names: str) -> Any:
    """The innermost operation with one of these names around another."""
    parent = op.operation.parent
    while parent.operation.name not in names:
        parent = parent.operation.parent
    return parent.operation


@contextmanager
def at(op: Any) -> Generator[None]:
    """New operations get the location of `op`, and so does what goes wrong in the body."""
    with op.location:
        try:
            yield
        except LowbitError as error:
            error.location = error.location or op.location
            raise
