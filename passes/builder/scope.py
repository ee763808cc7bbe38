"""Where operations may be written, and what they may use: the one place that every operation of the builder comes by.

MLIR takes an operation anywhere, and one that belongs to no block, or uses a value of another program, corrupts memory.
So a thread has a stack of the programs that are open in it, and a program a stack of the blocks that are: an operation
goes to the innermost, and the values that it uses must be of one of these blocks. Errors begin with the user's line.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache, wraps
from itertools import count
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import LowbitError, PassError
from lowbit.passes.builder.locations import caller, located

_numbers = count()
_BUILDER = str(Path(__file__).parent)  # whose methods call each other unchecked


@dataclass
class Scope:
    """A program that is being built: its name, the blocks that are open, the innermost last, and what was called to
    open a block, but not entered yet: what it is called and its line, by its number."""

    program: str
    blocks: list[ir.Block] = field(default_factory=list[ir.Block])
    unentered: dict[int, str] = field(default_factory=dict[int, str])

    def check_entered(self) -> None:
        """Raises PassError for a loop, condition or pipeline without a `with`, which would do nothing."""
        for place in self.unentered.values():
            raise PassError(f"{place}: nothing is in it; write `with p...:` and its body")


class _OpenPrograms(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []


_open = _OpenPrograms()


@contextmanager
def building(scope: Scope, block: ir.Block) -> Generator[None]:
    """Within it, operations go to a block of a program."""
    _open.scopes.append(scope)
    try:
        with inside(block):
            yield
    finally:
        _open.scopes.pop()


@contextmanager
def inside(block: ir.Block) -> Generator[None]:
    """Within it, operations go to a block of the innermost program. What it makes is not to be used afterwards."""
    blocks = _open.scopes[-1].blocks
    blocks.append(block)
    try:
        with ir.InsertionPoint(block):
            yield
    finally:
        blocks.pop()


@contextmanager
def users_line(operation: str) -> Generator[None]:
    """Names the line of the user's program, and the operation, in front of what goes wrong within. The line is the
    location of operations that are made within.
    """
    try:
        with located():
            yield
    except LowbitError as error:
        line = caller()
        if not str(error).startswith(line):
            error.args = (f"{line}{operation}: {error}",)
        raise


def check_values(scope: Scope | None, values: Any) -> None:
    """Raises PassError unless the program of `scope`, or any if None, is the innermost that is open, and each of the
    values, scalars, tiles and memory, in lists or alone, is one that can be used there."""
    current = _open.scopes[-1] if _open.scopes else None
    if current is None or scope not in (None, current):
        name = f"program {scope.program}" if scope else "its program"
        raise PassError(f"{name} is not being built here; operations belong inside `with p:` of their own program")
    for value in _ir_values(values):
        if not any(_block_of(value) == block for block in current.blocks):
            raise PassError(_why_not(value, current))


def _ir_values(given: Any) -> Iterator[ir.Value]:
    if isinstance(given, list | tuple):
        for each in cast(Sequence[Any], given):
            yield from _ir_values(each)
    elif isinstance(given, ir.Value):
        yield given
    else:  # Scalar, Tile, Memory, or a few of them
        for name in _fields_of(type(cast(object, given))):
            yield from _ir_values(getattr(given, name))


@lru_cache(maxsize=None)
def _fields_of(kind: type) -> tuple[str, ...]:
    """Returns the names of a dataclass's fields; nothing else has any."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else ()


def _block_of(value: ir.Value) -> ir.Block:
    owner = value.owner
    return owner if isinstance(owner, ir.Block) else owner.operation.block


def _why_not(value: ir.Value, scope: Scope) -> str:
    """Returns what is wrong with a value that can't be used in a scope."""
    program = _program_of(_block_of(value))
    if program == _program_of(scope.blocks[0]):
        return (
            "a value that was made in a loop, a condition or a pipeline is used outside of it, in program "
            f"{scope.program}; carry tiles out of a loop with `loop.results`, and make other values in front of it"
        )
    name = ir.StringAttr(program.attributes["sym_name"]).value
    return f"a value of program {name} is used in program {scope.program}; make it there again"


def _program_of(block: ir.Block) -> Any:
    operation: Any = block.owner
    while operation.operation.name != "lowbit.program":
        operation = operation.operation.parent
    return operation.operation


class Operations:
    """The base of classes whose public methods write operations of a program. All of these check where they are called,
    and what with, by their annotations: in place of what MLIR would do about it."""

    scope: Scope

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, _checked(method))


def _checked(method: FunctionType) -> Callable[..., Any]:
    plain: Any = inspect.unwrap(method)
    name = f"Program.{method.__name__}"

    def check(program: Operations, *arguments: Any, **named: Any) -> None:
        check_kinds(plain, (program, *arguments), named)
        check_values(program.scope, (*arguments, *named.values()))

    @wraps(method)
    def operation(program: Operations, *arguments: Any, **named: Any) -> Any:
        frame = inspect.currentframe()
        if frame and frame.f_back and frame.f_back.f_code.co_filename.startswith(_BUILDER):
            return method(program, *arguments, **named)
        with users_line(name):
            check(program, *arguments, **named)
            return method(program, *arguments, **named)

    @contextmanager
    def entered(number: int, program: Operations, *arguments: Any, **named: Any) -> Generator[Any]:
        with users_line(name):
            check_values(program.scope, (*arguments, *named.values()))
        program.scope.unentered.pop(number, None)
        with located(), method(program, *arguments, **named) as inside:
            yield inside

    @wraps(method)
    def region(program: Operations, *arguments: Any, **named: Any) -> Any:
        with users_line(name):
            check(program, *arguments, **named)
        number = next(_numbers)
        program.scope.unentered[number] = f"{caller()}{name}"
        return entered(number, program, *arguments, **named)

    return region if inspect.isgeneratorfunction(plain) else operation


def check_kinds(function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Raises PassError for an argument that is not what the function's annotation says."""
    signature, hints, fits = _annotations(function)
    for name, value in signature.bind(*arguments, **named).arguments.items():
        if name in fits:
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for each in value if several else [value]:
                if not fits[name](each):
                    raise PassError(f"{name} must be {_words(hints[name])}, not {_given(each)}")


_Fits = Callable[[Any], bool]


@lru_cache(maxsize=None)
def _annotations(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any], dict[str, _Fits]]:
    """Returns a function's signature, its annotations, and what tells whether a value is as they say."""
    hints = get_type_hints(function)
    return inspect.signature(function), hints, {name: _fits(hint) for name, hint in hints.items()}


@lru_cache(maxsize=None)
def _fits(hint: Any) -> _Fits:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin in (Union, UnionType):
        choices = [_fits(each) for each in inner]
        return lambda value: any(fits(value) for fits in choices)
    if origin in (tuple, Sequence):
        each = _fits(inner[0])
        return lambda value: isinstance(value, list | tuple) and all(map(each, cast(Sequence[Any], value)))
    if origin is Mapping:
        key, item = map(_fits, inner)
        return lambda value: isinstance(value, Mapping) and all(
            key(k) and item(v) for k, v in cast(Mapping[Any, Any], value).items()
        )
    kind = (int, float) if hint is float else hint
    return lambda value: isinstance(value, kind)


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(each) for each in inner)
    if origin in (tuple, Sequence):
        return f"a list of {_words(inner[0])}"
    if origin is Mapping:
        return f"a mapping from {_words(inner[0])} to {_words(inner[1])}"
    return "None" if hint is NoneType else getattr(hint, "__name__", str(hint))


def _given(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_given, cast(Sequence[Any], value)))}]"
    plain = value is None or isinstance(value, str | int | float)
    return repr(value) if plain else type(value).__name__
