"""Operators of Python that the values of a program don't have: each says which ones there are."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from lowbit.dialect.errors import PassError
from lowbit.passes.builder.scope import users_line


def _refused(symbol: str) -> Any:
    def operator(self: NoOperators, *others: object) -> NoReturn:
        with users_line(symbol):
            raise PassError(f"{self.operators}; there is no {symbol}")

    return operator


class NoOperators:
    """The base of values with operators: those that a class does not define raise PassError with the user's line.

    operators   what there is, for the error
    """

    operators: ClassVar[str]

    __truediv__ = __rtruediv__ = _refused("/")
    __floordiv__ = __rfloordiv__ = _refused("//")
    __mod__ = __rmod__ = _refused("%")
    __pow__ = __rpow__ = _refused("**")
    __matmul__ = __rmatmul__ = _refused("@")
    __and__ = __rand__ = _refused("&")
    __or__ = __ror__ = _refused("|")
    __xor__ = __rxor__ = _refused("^")
    __lshift__ = __rlshift__ = _refused("<<")
    __rshift__ = __rrshift__ = _refused(">>")
    __invert__ = _refused("~")
    __abs__ = _refused("abs()")
    __getitem__ = _refused("[ ]")
