"""Functions whose results torch.compile takes for constants, in place of tracing into them.

`torch.compiler.assume_constant_result` imports all of torch.compile, which takes as long as torch itself: two seconds
before the first layer, in every program, whether it compiles anything or not. So functions are marked once something
else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import assume_constant_result

from lowbit.lazily import when_imported

F = TypeVar("F", bound=Callable[..., Any])
_COMPILER = "torch._dynamo"
_constants: list[Callable[..., Any]] = []


def constant(function: F) -> F:
    """Returns the function, of which torch.compile assumes that it gives the same for the same arguments: it calls it
    once, and has the result in the graph."""
    _constants.append(function)  # first: another thread may be importing torch.compile
    if _COMPILER in sys.modules:
        assume_constant_result(function)
    return function


def _mark() -> None:
    for function in _constants:
        assume_constant_result(function)


when_imported(_COMPILER, _mark)
