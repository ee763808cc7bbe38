"""What one block does: the program around tiles, its place in the grid, and views of device memory."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
import math
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ISOLATED_FROM_ABOVE, ext, ir
from lowbit.dialect.checks import Mismatch, expect, in_range, verifier
from lowbit.dialect.errors import LowbitError
from lowbit.dialect.ops.common import I32
from lowbit.dialect.optional import Flag, Optional
from lowbit.dialect.signature import WORKSPACE, Grid
from lowbit.dialect.types import (
    Global,
    GlobalType,
    Lowbit,
    RegType,
    param_kind,
    read_grid,
    read_ints,
    read_layout,
    read_strings,
)

MOST_BLOCKS = 8  # of a cluster, on any GPU that has them (CUDA C++ Programming Guide, "Thread Block Clusters")
MOST_LOCALS = 1 << 14  # elements of a tile in one thread, each of which becomes instructions of its own


class ProgramOp(Lowbit.Operation, name="program", traits=ISOLATED_FROM_ABOVE):
    """One block's program. The region's arguments are the kernel's parameters, named by `params`.

    A parameter is a pointer to device memory (!llvm.ptr<1>), an i32, an f32, or a tensor map, which is passed by value
    and seen by its address (!llvm.ptr). `grid` has three extents as `dialect.signature` describes them.

    `cluster` is how many blocks along each axis of the grid run side by side and see each other's shared memory (PTX
    ISA 5.2.2), `max_blocks` how many blocks at most are to run on a multiprocessor; with
    `fits_blocks` the assembler takes so few registers that so many fit.
    """

    sym_name: ir.StringAttr
    threads: ir.IntegerAttr
    grid: ir.ArrayAttr
    params: ir.ArrayAttr
    workspace: ir.IntegerAttr
    cluster = Optional(ir.ArrayAttr, "three sizes")
    max_blocks = Optional(ir.IntegerAttr, "an integer")
    fits_blocks = Flag()
    body: ext.Region

    @verifier
    def verify_invariants(op: Any) -> None:
        threads = in_range(op.threads, "threads", 32, 1024)
        expect(threads % 32 == 0, "threads", "a multiple of 32", threads)
        grid = read_grid(op.grid)
        if op.cluster is not None:
            _check_cluster(read_ints(op.cluster), grid)
        if op.max_blocks is not None:
            in_range(op.max_blocks, "max_blocks", 1)
        expect(op.max_blocks is not None or not op.fits_blocks, "fits_blocks", "max_blocks as well", "none")
        workspace = in_range(op.workspace, "workspace", 0)
        expect(len(op.body.blocks) == 1, "body", "one block", len(op.body.blocks))
        _check_params(op, grid, workspace)
        _check_threads(op, threads)


def _check_cluster(cluster: tuple[int, ...], grid: Grid) -> None:
    """A grid must consist of whole clusters, whatever its arguments are."""
    written = [extent.written for extent in grid]
    whole = len(cluster) == 3 and min(cluster) >= 1 and all(n.is_multiple_of(c) for n, c in zip(grid, cluster))
    expect(whole, "cluster", f"three divisors of the grid's {written}", list(cluster))
    expect(math.prod(cluster) <= MOST_BLOCKS, "cluster", f"at most {MOST_BLOCKS} blocks", math.prod(cluster))


def _check_params(program: Any, grid: Grid, workspace: int) -> None:
    """Every argument of the body must have a name of its own and a kind, and what the grid divides must be an i32."""
    names, arguments = read_strings(program.params), program.body.blocks[0].arguments
    expect(len(names) == len(arguments), "params", f"names of {len(arguments)} arguments", len(names))
    expect(len(set(names)) == len(names), "params", "different names", ", ".join(names))
    kinds = {name: param_kind(argument.type, name) for name, argument in zip(names, arguments)}
    for extent in grid:
        known = extent.rule != "ceil" or kinds.get(extent.param) == "i32"
        expect(known, "grid", "the name of an i32 parameter", extent.written)
    pointed = not workspace or kinds.get(WORKSPACE) == "pointer"
    expect(pointed, "workspace", f"a pointer parameter called {WORKSPACE!r}", ", ".join(names) or "none")


def _check_threads(program: Any, threads: int) -> None:
    """All tiles must be spread over the threads of the block, whose warps its barriers divide."""
    wrong: list[Mismatch] = []

    def visit(op: Any) -> Any:
        texts = [RegType(r.type).params[2] for r in op.results if isinstance(r.type, RegType)]
        texts += [a for a in (op.attributes.get("layout"),) if isinstance(a, ir.StringAttr)]
        try:
            for layout in map(read_layout, texts):
                what = f"layout {layout} in {op.name}"
                expect(layout.threads == threads, what, f"{threads} threads", layout.threads)
                expect(layout.locals <= MOST_LOCALS, what, f"at most {MOST_LOCALS} elements in a thread", layout.locals)
            if op.name in ("lowbit.barrier", "lowbit.pipeline") and "warps" in op.attributes:
                warps = in_range(op.attributes["warps"], "warps", 1)
                expect(threads // 32 % warps == 0, f"warps of {op.name}", f"a divisor of {threads // 32}", warps)
        except Mismatch as error:
            error.location = op.location
            wrong.append(error)
        except LowbitError:
            pass  # the operation's own verifier says it better
        return ir.WalkResult.INTERRUPT if wrong else ir.WalkResult.ADVANCE

    program.operation.walk(visit)
    for error in wrong:
        raise error


class ReturnOp(Lowbit.Operation, name="return", traits=[ir.IsTerminatorTrait]):
    """Ends a program."""


class BlockIdOp(Lowbit.Operation, name="block_id", traits=[ext.Pure]):
    """Index of this block along grid axis 0, 1 or 2."""

    axis: ir.IntegerAttr
    result: ext.Result[I32] = ext.infer_result()

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.axis, "axis", 0, 2)


class BlockCountOp(Lowbit.Operation, name="block_count", traits=[ext.Pure]):
    """The number of blocks along grid axis 0, 1 or 2."""

    axis: ir.IntegerAttr
    result: ext.Result[I32] = ext.infer_result()

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.axis, "axis", 0, 2)


class GridWaitOp(Lowbit.Operation, name="grid_wait"):
    """Waits until the kernel before this one has ended and its writes are visible (griddepcontrol.wait)."""


class GridLaunchOp(Lowbit.Operation, name="grid_launch_dependents"):
    """Lets the next kernel start its blocks where there is room (griddepcontrol.launch_dependents)."""


class GlobalViewOp(Lowbit.Operation, name="global_view", traits=[ext.Pure]):
    """Device memory at a pointer as an array; `sizes` gives the dims that the type writes as -1."""

    pointer: ext.Operand[Any]
    sizes: Sequence[ext.Operand[I32]]
    result: ext.Result[GlobalType]

    @verifier
    def verify_invariants(op: Any) -> None:
        expect(str(op.pointer.type) == "!llvm.ptr<1>", "pointer", "!llvm.ptr<1>", op.pointer.type)
        dynamic = Global.of(op.result.type).shape.count(-1)
        expect(len(op.sizes) == dynamic, "sizes", f"one per dynamic dim ({dynamic})", len(op.sizes))
