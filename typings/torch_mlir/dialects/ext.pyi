"""Dialects defined in Python (upstream ``mlir/python/mlir/dialects/ext.py``)."""

from collections.abc import Callable, Sequence
from typing import Any

from torch_mlir import ir

Operand = ir.Value
Result = ir.OpResult
Region = ir.Region

class DialectAlreadyLoadedError(RuntimeError): ...

class Pure:
    @staticmethod
    def attach(op_name: str) -> None: ...

class AttributeDef:
    name: str

class OperandDef:
    name: str
    variadicity: Any

class ResultDef:
    name: str
    variadicity: Any

class Operation(ir.OpView):
    OPERATION_NAME: str
    verify_invariants: Any
    Adaptor: type[ir.OpAdaptor]
    def __init_subclass__(
        cls,
        *,
        name: str | None = ...,
        dialect: type[Dialect] | None = ...,
        traits: Sequence[Any] | None = ...,
    ) -> None: ...
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

class Type(ir.DynamicType):
    def __init_subclass__(cls, *, name: str | None = ..., dialect: type[Dialect] | None = ...) -> None: ...
    @classmethod
    def get(cls, *args: Any, context: ir.Context | None = ...) -> Any: ...

class Attribute(ir.DynamicAttr):
    def __init_subclass__(cls, *, name: str | None = ..., dialect: type[Dialect] | None = ...) -> None: ...
    @classmethod
    def get(cls, *args: Any, context: ir.Context | None = ...) -> Any: ...

_Operation = Operation
_Type = Type
_Attribute = Attribute

class Dialect(ir.Dialect):
    DIALECT_NAMESPACE: str
    name: str
    operations: list[type[_Operation]]
    types: list[type[_Type]]
    attributes: list[type[_Attribute]]
    class Operation(_Operation): ...
    class Type(_Type): ...
    class Attribute(_Attribute): ...

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None: ...
    @classmethod
    def load(cls, *, reload: bool = ...) -> None: ...
    @classmethod
    def _emit_module(cls) -> ir.Module: ...

def result(*, default_factory: Callable[[], Any] | None = ..., kw_only: bool = ...) -> Any: ...
def infer_result() -> Any: ...
def operand(*, kw_only: bool = ...) -> Any: ...
def attribute(*, default_factory: Callable[[], Any] | None = ..., kw_only: bool = ...) -> Any: ...
