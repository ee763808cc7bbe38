"""Finds in the source of a `forward` which layers share their input, and rewrites it to call one layer for them.

    q = self.q_proj(x).view(shape)          q_proj, k_proj = self.q_k_proj(x).split((4096, 1024), -1)
    k = self.k_proj(x).view(shape)    ->    q = q_proj.view(shape)
                                            k = k_proj.view(shape)

Only what is sure is rewritten: calls in one block of statements, none of them conditional, between which nothing can
change x. A rewritten module keeps no state between calls, so it is compiled, exported and traced as it was before.
Decorators stay around it, if each is a function that holds the one it was given (`functools.wraps`).
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import NamedTuple, cast

from lowbit.dialect.errors import QuantizeError

CONDITIONAL = (
    ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.stmt
)  # fmt: skip
"""Nodes whose parts may be evaluated never, or more than once."""
SIMPLE = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
HARMLESS = ("shape", "dtype", "device", "ndim")
"""Attributes of x that may be read between two calls."""
FUTURES = 0x1FE0000  # what `from __future__ import` sets in the flags of a code object


class Group(NamedTuple):
    """Layers that become one.

    name    of the layer that takes their place
    parts   their names, in the order of the calls
    sizes   their numbers of outputs
    """

    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass
class _Siblings:
    """Calls of layers with one x, in the statements `first` to `last` of a block."""

    block: list[ast.stmt]
    first: int
    last: int
    calls: list[ast.Call]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(cast(ast.Attribute, call.func).attr for call in self.calls)


def siblings(cls: type, layers: Collection[str], linears: Collection[str]) -> list[tuple[str, ...]]:
    """Returns the names of layers that the forward of a class calls with the same x, in groups of two and more.

    layers    the attributes that may be fused
    linears   these and all others that are linear layers: they leave x as it is

    Raises QuantizeError that says why the forward can't be read.
    """
    definition = _definition(cls)
    return [found.names for found in _find(definition, _used_once(cls, definition, layers), linears)]


def rewritten(cls: type, groups: Sequence[Group], linears: Collection[str]) -> FunctionType:
    """Returns the forward of a class with one call for each group. Raises QuantizeError where this is not certain."""
    definition = _definition(cls)
    for group in groups:
        found = _find(definition, _used_once(cls, definition, group.parts), linears)
        if [each.names for each in found] != [group.parts]:
            raise QuantizeError(f"{cls.__name__}.forward does not call {', '.join(group.parts)} with the same value")
        _rewrite(found[0], group)
    *wrappers, function = _functions(cls)
    return functools.reduce(_rewrapped, reversed(wrappers), _compiled(definition, function))


# -- reading


def _definition(cls: type) -> ast.FunctionDef:
    """Returns the syntax tree of a class's forward, without decorators. It is sure to be that of the code that runs."""
    *wrappers, function = _functions(cls)
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        raise QuantizeError(f"{cls.__name__}.forward has no source to read") from None
    if not isinstance(definition, ast.FunctionDef) or len(definition.decorator_list) != len(wrappers):
        raise QuantizeError(f"{cls.__name__}.forward is decorated, or no function")
    definition.decorator_list = []
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    if _instructions(_compiled(definition, function)) != _instructions(function):
        raise QuantizeError(f"the source of {cls.__name__}.forward is not that of the code that runs")
    return definition


def _functions(cls: type) -> list[FunctionType]:
    """Returns the forward of a class, and what its decorators were given: the last function has the body."""
    functions = [inspect.getattr_static(cls, "forward", None)]
    while isinstance(functions[-1], FunctionType) and any(_holds_wrapped(functions[-1])):
        functions.append(functions[-1].__wrapped__)
    body = functions[-1]
    if not isinstance(body, FunctionType) or body.__closure__ or hasattr(body, "__wrapped__"):
        raise QuantizeError(f"{cls.__name__}.forward is decorated, or uses super()")
    return functions


def _holds_wrapped(wrapper: FunctionType) -> list[bool]:
    """Tells of each cell of a function whether it holds the function that this one was wrapped around."""
    cells, empty = (wrapper.__closure__ or ()) if hasattr(wrapper, "__wrapped__") else (), CellType()
    return [cell != empty and cell.cell_contents is wrapper.__wrapped__ for cell in cells]


def _rewrapped(function: FunctionType, wrapper: FunctionType) -> FunctionType:
    """Returns a decorator's function around another one than it was given."""
    held = zip(wrapper.__closure__ or (), _holds_wrapped(wrapper))
    cells = tuple(CellType(function) if holds else cell for cell, holds in held)
    made = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, cells)
    made.__kwdefaults__ = wrapper.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


def _compiled(definition: ast.FunctionDef, function: FunctionType) -> FunctionType:
    """Returns a function with the body of a definition, and all else of another function."""
    args = definition.args
    for each in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if each is not None:
            each.annotation = None
    args.defaults, args.kw_defaults, definition.returns = [], [None] * len(args.kwonlyargs), None
    code = function.__code__
    module = compile(ast.Module([definition], []), code.co_filename, "exec", code.co_flags & FUTURES, dont_inherit=True)
    body = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    made = FunctionType(body, function.__globals__, function.__name__, function.__defaults__)
    made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
    made.__doc__, made.__module__, made.__qualname__ = function.__doc__, function.__module__, function.__qualname__
    return made


def _instructions(function: FunctionType) -> list[tuple[str, object]]:
    """Returns what a function does, without details that depend on the module around it: how methods are looked up
    (imported names are taken for modules), and so how far jumps go."""
    found: list[tuple[str, object]] = []
    for each in dis.get_instructions(function):
        is_jump = each.opcode in dis.hasjrel or each.opcode in dis.hasjabs
        argument = None if is_jump or isinstance(each.argval, CodeType) else each.argval
        if each.opname not in ("PUSH_NULL", "EXTENDED_ARG", "NOP"):
            found.append((each.opname.replace("METHOD", "ATTR"), argument))
    return found


def _used_once(cls: type, definition: ast.FunctionDef, layers: Collection[str]) -> set[str]:
    """Returns the layers whose names stand in the forward once, and in no other method of the class."""
    words = [node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
    words += [node.value for node in ast.walk(definition) if isinstance(node, ast.Constant) and node.value in layers]
    elsewhere = set[object]()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "torch":
            methods = [value for name, value in vars(base).items() if name not in ("__init__", "forward")]
            bodies = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
            elsewhere.update(word for body in bodies for word in _words(body))
    return {name for name in layers if words.count(name) == 1 and name not in elsewhere}


def _words(code: CodeType | None) -> Iterator[object]:
    """Yields names and constants of a code object and of those inside."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _words(constant)
            elif isinstance(constant, str):
                yield constant


# -- finding siblings


def _find(definition: ast.FunctionDef, layers: Collection[str], linears: Collection[str]) -> list[_Siblings]:
    """Returns groups of two and more calls, those of the outermost block first."""
    owner = definition.args.args[0].arg if definition.args.args else ""
    found: list[_Siblings] = []
    for block in _blocks(definition):
        found += _in_block(block, owner, layers, linears)
    return [each for each in found if len(each.calls) > 1]


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yields the lists of statements of a function, without those of functions inside."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield cast(list[ast.stmt], block)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler) and not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _blocks(child)


def _in_block(
    block: list[ast.stmt], owner: str, layers: Collection[str], linears: Collection[str]
) -> Iterator[_Siblings]:
    """Yields the calls in a block, those with the same x together as long as nothing can change it between them."""
    open_: dict[str, _Siblings] = {}
    for at, statement in enumerate(block):
        if not isinstance(statement, SIMPLE):
            continue
        for call in _unconditional(statement):
            x = _argument(call, owner, layers)
            if x is None:
                continue
            last = open_.get(x)
            if last and _is_kept(x, block[last.first : at + 1], owner, linears):
                last.last = at
                last.calls.append(call)
            else:
                open_[x] = _Siblings(block, at, at, [call])
                yield open_[x]


def _unconditional(node: ast.AST) -> Iterator[ast.Call]:
    """Yields the calls that are made once whenever a statement is run, in the order of their places."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, CONDITIONAL):
            yield from _unconditional(child)
    if isinstance(node, ast.Call):
        yield node


def _argument(call: ast.AST, owner: str, names: Collection[str]) -> str | None:
    """Returns x if a node is `self.name(x)` with one of these names."""
    if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1:
        return None
    function, argument = call.func, call.args[0]
    if not isinstance(function, ast.Attribute) or function.attr not in names or not isinstance(argument, ast.Name):
        return None
    return argument.id if isinstance(function.value, ast.Name) and function.value.id == owner else None


def _is_kept(x: str, statements: Sequence[ast.stmt], owner: str, linears: Collection[str]) -> bool:
    """Tells whether x is the same, with the same values, at all unconditional calls of some statements.

    A statement binds its targets last, so the last of them may give x a new value.
    """
    nodes = [node for statement in statements for node in ast.walk(statement)]
    if any(_may_write(node) for node in nodes):
        return False
    earlier = (node for statement in statements[:-1] for node in ast.walk(statement))
    bound = {node.id for node in earlier if isinstance(node, ast.Name) and _is_stored(node)}
    if bound & {x, owner}:
        return False
    safe = {id(node.args[0]) for node in nodes if isinstance(node, ast.Call) and _argument(node, owner, linears) == x}
    safe |= {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in HARMLESS}
    return all(id(node) in safe or _is_stored(node) for node in nodes if isinstance(node, ast.Name) and node.id == x)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def _may_write(node: ast.AST) -> bool:
    """Tells whether a node may write to the memory of a tensor, or give a name a value inside of an expression."""
    if isinstance(node, ast.AugAssign | ast.NamedExpr | ast.Global | ast.Nonlocal | ast.Yield | ast.Await):
        return True
    if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in ("out", "inplace")
    return isinstance(node, ast.Attribute) and node.attr.endswith("_")


# -- rewriting


def _rewrite(found: _Siblings, group: Group) -> None:
    """Put one call before the first statement of siblings, and its parts where they were called."""
    first = found.block[found.first]
    parts = [f"_fused_{name}" for name in group.parts]
    owner = cast(ast.Attribute, found.calls[0].func).value
    call = ast.Call(ast.Attribute(owner, group.name, ast.Load()), found.calls[0].args, [])
    sizes = ast.Tuple([ast.Constant(size) for size in group.sizes], ast.Load())
    split = ast.Call(ast.Attribute(call, "split", ast.Load()), [sizes, ast.Constant(-1)], [])
    targets = ast.Tuple([ast.Name(part, ast.Store()) for part in parts], ast.Store())
    replaced = _Replaced({id(call): part for call, part in zip(found.calls, parts)})
    for at in range(found.first, found.last + 1):
        found.block[at] = cast(ast.stmt, replaced.visit(found.block[at]))
    inserted = ast.copy_location(ast.Assign([targets], split), first)
    found.block.insert(found.first, ast.fix_missing_locations(inserted))


class _Replaced(ast.NodeTransformer):
    """Puts names in the place of calls, which are given by their identity."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if id(node) in self.names:
            return ast.copy_location(ast.Name(self.names[id(node)], ast.Load()), node)
        return self.generic_visit(node)
