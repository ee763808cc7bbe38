"""Attributes that an operation may have or not, declared in its class:

    class BarrierOp(Lowbit.Operation, name="barrier"):
        scope: ir.StringAttr
        async_proxy = Flag()

`op.async_proxy` reads the attribute and an assignment writes it. The bindings' dialect builder makes required
attributes of annotations (`scope`) and knows no optional ones, and MLIR lets any attribute be on any operation. So what
is declared here is checked by the verifier that every operation has (`dialect.checks.verifier`), which refuses all
other names.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from lowbit.dialect.bindings import ir


class Optional:
    """An attribute of some kind; None where an operation has none. `words` says what it holds."""

    def __init__(self, kind: type[ir.Attribute], words: str) -> None:
        self.kind, self.words = kind, words

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, op: Any, owner: type | None = None) -> Any:
        if op is None:
            return self
        return op.operation.attributes.get(self.name)

    def __set__(self, op: Any, value: Any) -> None:
        if value is not None:
            op.operation.attributes[self.name] = value
        elif self.name in op.operation.attributes:
            del op.operation.attributes[self.name]

    def accepts(self, attribute: ir.Attribute) -> bool:
        """Whether an attribute is of the kind."""
        return isinstance(attribute, self.kind)


class Flag(Optional):
    """A unit attribute, read and written as a bool."""

    def __init__(self) -> None:
        super().__init__(ir.UnitAttr, "a unit attribute")

    def __get__(self, op: Any, owner: type | None = None) -> Any:
        return self if op is None else self.name in op.operation.attributes

    def __set__(self, op: Any, value: Any) -> None:
        super().__set__(op, ir.UnitAttr.get() if value else None)


class Choice(Optional):
    """One of some words, read and written as a str; the first where an operation has no such attribute."""

    def __init__(self, *choices: str) -> None:
        super().__init__(ir.StringAttr, "one of " + ", ".join(f'"{word}"' for word in choices))
        self._choices = choices

    def __get__(self, op: Any, owner: type | None = None) -> Any:
        if op is None:
            return self
        attribute = super().__get__(op, owner)
        return self._choices[0] if attribute is None else ir.StringAttr(attribute).value

    def __set__(self, op: Any, value: Any) -> None:
        super().__set__(op, ir.StringAttr.get(value) if value != self._choices[0] else None)

    def accepts(self, attribute: ir.Attribute) -> bool:
        return super().accepts(attribute) and ir.StringAttr(attribute).value in self._choices


@lru_cache(maxsize=None)
def optional_attributes(operation: type) -> dict[str, Optional]:
    """Returns the optional attributes of a class by name."""
    return {name: value for name, value in vars(operation).items() if isinstance(value, Optional)}
