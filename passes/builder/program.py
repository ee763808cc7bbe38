"""The program that is being built: its module, its parameters, and its verification."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from keyword import iskeyword
from typing import Any, Literal

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir, new_context
from lowbit.dialect.errors import PassError, SpecError
from lowbit.dialect.signature import PARAM_TYPES, Grid, parse_grid
from lowbit.dialect.types import grid_attr, ints, strings
from lowbit.passes.builder.accumulators import Accumulators
from lowbit.passes.builder.codes import Codes
from lowbit.passes.builder.control import Control
from lowbit.passes.builder.elementwise import Elementwise
from lowbit.passes.builder.locations import caller, named, tracebacks
from lowbit.passes.builder.memory import MemoryAccess
from lowbit.passes.builder.outliers import Outliers
from lowbit.passes.builder.products import Products
from lowbit.passes.builder.scope import Scope, building, check_kinds, users_line
from lowbit.passes.builder.synchronization import Synchronization
from lowbit.passes.builder.tiles import Tiles
from lowbit.passes.builder.values import Scalar, i64, text

_LONGEST = 128
_NAME = rf"[A-Za-z_][A-Za-z0-9_]{{0,{_LONGEST - 1}}}"
_RESERVED = ("shared_memory",)  # what the compiler itself calls something
State = Literal["new", "open", "built", "failed"]
_WHY_NOT: dict[State, str] = {
    "new": "is empty; write its operations inside `with p:`",
    "open": "is still being built; compile it after `with p:`",
    "failed": "had an error; build it anew",
}
_TYPES: dict[str, str] = {**PARAM_TYPES}
_verified_later: ContextVar[bool] = ContextVar("verified_later", default=False)


@contextmanager
def verified_later() -> Generator[None]:
    """Within it, programs are not verified when they are left: whoever takes them verifies them."""
    token = _verified_later.set(True)
    try:
        yield
    finally:
        _verified_later.reset(token)


class Program(
    Control,
    MemoryAccess,
    Synchronization,
    Tiles,
    Elementwise,
    Codes,
    Products,
    Accumulators,
    Outliers,
):
    """Builds one `lowbit.program` in a module of its own, anywhere. Enter it to build; leave it to have it verified.

    What a verifier finds then is a PassError with the line that made the operation. So is an operation outside of the
    `with`, and one with a value of another program, or of a loop, condition or pipeline that has ended.

    params: name -> "pointer" (to device memory), "i32", "f32" or "tensor_map" (128 bytes by value). threads per block;
    grid in blocks along three axes, each a number, "ceil(m / 16)" (m: any i32 parameter) or "sm_count * 2". workspace
    in bytes, at the pointer "workspace"; max_blocks on a multiprocessor at a time (0: as many as fit), by claiming
    shared memory; fits_blocks: they take so few registers that so many fit. cluster: blocks along each axis of the grid
    that can read each other's shared memory (sm_90; PTX ISA 5.2.2).
    """

    def __init__(
        self,
        name: str,
        threads: int,
        grid: tuple[int | str, ...],
        params: Mapping[str, str],
        workspace: int = 0,
        max_blocks: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        fits_blocks: bool = False,
    ) -> None:
        about = (name, threads, grid, params, workspace, max_blocks, cluster, fits_blocks)
        with users_line("Program"):
            check_kinds(Program.__init__, (self, *about), {})
            _check_names(name, params)
            extents = _extents(name, grid)
        self.name, self.scope = name, Scope(name)
        self.state: State = "new"
        self._open = ExitStack()
        self._context = ir.Context.current or _new_context()
        with self._context, ir.Location.unknown(), tracebacks(), users_line("Program"):
            self._module = ir.Module.create()
            with ir.InsertionPoint(self._module.body):
                attributes = text(name), i64(threads), grid_attr(extents), strings(tuple(params)), i64(workspace)
                self.op = ops.ProgramOp(*attributes)
            if max_blocks:
                self.op.max_blocks = i64(max_blocks)
                self.op.fits_blocks = fits_blocks
            if cluster != (1, 1, 1):
                self.op.cluster = ints(cluster)
            block = self.op.body.blocks.append(*[ir.Type.parse(_TYPES[kind]) for kind in params.values()])
        self._block, self._arguments = block, dict(zip(params, block.arguments))

    def __enter__(self) -> Program:
        if self.state != "new":
            raise PassError(f"{caller()}program {self.name} has been entered before; make another Program")
        self.state = "open"
        with ExitStack() as stack:
            stack.enter_context(self._context)
            stack.enter_context(ir.Location.unknown())
            stack.enter_context(tracebacks())
            stack.enter_context(building(self.scope, self._block))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            ops.ReturnOp()
        self._open.close()
        self.state = "failed"
        if error[0] is None:
            self.scope.check_entered()
            if not _verified_later.get():
                self._verify()
            self.state = "built"

    @property
    def module(self) -> ir.Module:
        """The module of the program, which `with p:` fills. Raises PassError before it, and after an error in it."""
        if self.state in ("new", "failed"):
            raise PassError(f"{caller()}program {self.name} {_WHY_NOT[self.state]}")
        return self._module

    def _verify(self) -> None:
        try:
            self._module.operation.verify()
        except ir.MLIRError as error:
            found = [named(d.location) + d.message for d in error.error_diagnostics]
            raise PassError(f"program {self.name} is wrong: " + "\n".join(found)) from None

    def __getitem__(self, name: str) -> Scalar:
        """A parameter."""
        if name not in self._arguments:
            has = ", ".join(self._arguments) or "none"
            raise PassError(f"{caller()}{self.name} has no parameter {name!r}; it has {has}")
        return Scalar(self._arguments[name])


def built_module(program: object) -> ir.Module:
    """The module of a built `Program`, or one that is given. Raises PassError for anything else."""
    if isinstance(program, Program):
        if program.state in _WHY_NOT:
            raise PassError(f"program {program.name} {_WHY_NOT[program.state]}")
        return program.module
    if not isinstance(program, ir.Module):
        what = "build must return a Program, or its module `p.module`"
        raise PassError(f"{what}, not {type(program).__name__}; end the function with `return p`")
    return program


def _new_context() -> ir.Context:
    """A context that knows our operations, for a program that is built by itself."""
    context = new_context()
    ops.register(context)
    return context


def _check_names(name: str, params: Mapping[str, str]) -> None:
    """Raises PassError for names that PTX, or a call with arguments by name, can't take, and for unknown kinds."""
    if not re.fullmatch(_NAME, name):
        raise PassError(f"name {name!r}: expected ASCII letters, digits and _, a letter or _ first, at most {_LONGEST}")
    if name in _RESERVED:
        raise PassError(f"name {name!r} is one of the compiler's own; choose another")
    for parameter, kind in params.items():
        if not parameter.isidentifier() or iskeyword(parameter):
            fix = "expected a name that Python takes for an argument"
            raise PassError(f"{name}: parameter {parameter!r}: {fix}, as the kernel is called with it")
        if kind not in _TYPES:
            raise PassError(f"{name}: parameter {parameter} is a {kind!r}; it must be one of {', '.join(_TYPES)}")


def _extents(name: str, grid: tuple[int | str, ...]) -> Grid:
    try:
        return parse_grid(grid)
    except SpecError as error:
        raise PassError(f"{name}: {error}") from None
