"""The program that is being built: its module, its parameters, and its verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import ir
from lowbit.dialect.errors import PassError, SpecError
from lowbit.dialect.signature import PARAM_TYPES, parse_grid
from lowbit.dialect.types import grid_attr, ints, strings
from lowbit.passes.builder.accumulators import Accumulators
from lowbit.passes.builder.codes import Codes
from lowbit.passes.builder.control import Control
from lowbit.passes.builder.elementwise import Elementwise
from lowbit.passes.builder.integer_products import IntegerProducts
from lowbit.passes.builder.locations import named
from lowbit.passes.builder.memory import MemoryAccess
from lowbit.passes.builder.outliers import Outliers
from lowbit.passes.builder.products import Products
from lowbit.passes.builder.synchronization import Synchronization
from lowbit.passes.builder.tiles import Tiles
from lowbit.passes.builder.values import Scalar, i64, text


class Program(
    Control,
    MemoryAccess,
    Synchronization,
    Tiles,
    Elementwise,
    Codes,
    Products,
    Accumulators,
    IntegerProducts,
    Outliers,
):
    """Builds one `lowbit.program` in a module of its own. Enter it to build; leave it to have it verified.

    What a verifier finds then is a PassError with the line that made the operation.

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
        types: dict[str, str] = {**PARAM_TYPES}
        for parameter, kind in params.items():
            if kind not in types:
                allowed = ", ".join(types)
                raise PassError(f"{name}: parameter {parameter} is a {kind!r}; it must be one of {allowed}")
        try:
            extents = parse_grid(grid)
        except SpecError as error:
            raise PassError(f"{name}: {error}") from None
        self._name = name
        self._frames = ir.loc_tracebacks()
        self.module = ir.Module.create()
        with ir.loc_tracebacks(), ir.InsertionPoint(self.module.body):
            about = text(name), i64(threads), grid_attr(extents), strings(tuple(params)), i64(workspace)
            self.op = ops.ProgramOp(*about)
        if max_blocks:
            self.op.max_blocks = i64(max_blocks)
            self.op.fits_blocks = fits_blocks
        if cluster != (1, 1, 1):
            self.op.cluster = ints(cluster)
        block = self.op.body.blocks.append(*[ir.Type.parse(types[kind]) for kind in params.values()])
        self._arguments = dict(zip(params, block.arguments))
        self._point = ir.InsertionPoint(block)

    def __enter__(self) -> Program:
        self._frames.__enter__()
        self._point.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            ops.ReturnOp()
        self._point.__exit__(*error)
        self._frames.__exit__(*error)
        if error[0] is None:
            self._verify()

    def _verify(self) -> None:
        try:
            self.module.operation.verify()
        except ir.MLIRError as error:
            found = [named(d.location) + d.message for d in error.error_diagnostics]
            raise PassError(f"program {self._name} is wrong: " + "\n".join(found)) from None

    def __getitem__(self, name: str) -> Scalar:
        """A parameter."""
        if name not in self._arguments:
            raise PassError(f"{self._name} has no parameter {name!r}; it has {', '.join(self._arguments) or 'none'}")
        return Scalar(self._arguments[name])
