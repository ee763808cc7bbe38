"""Rules of `lower-tiles` for the place of a block in its grid, loops and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, gpu, ir, nvvm, scf
from lowbit.dialect.errors import PassError
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import LoweringContext, int_attr
from lowbit.passes.lowering.fragment import Fragment, kind_of
from lowbit.passes.lowering.registry import lower_block, lowers

_AXES = (gpu.Dimension.x, gpu.Dimension.y, gpu.Dimension.z)


@lowers(ops.BlockIdOp)
def block_id(op: Any, c: LoweringContext) -> None:
    c.scalars[op.result] = arith.index_cast(emit.integer(), gpu.block_id(_AXES[int_attr(op, "axis")]))


@lowers(ops.BlockCountOp)
def block_count(op: Any, c: LoweringContext) -> None:
    c.scalars[op.result] = arith.index_cast(emit.integer(), gpu.grid_dim(_AXES[int_attr(op, "axis")]))


@lowers(ops.GridWaitOp)
def grid_wait(op: Any, c: LoweringContext) -> None:
    _grid_control(c, nvvm.GridDepActionKind.wait)


@lowers(ops.GridLaunchOp)
def grid_launch_dependents(op: Any, c: LoweringContext) -> None:
    _grid_control(c, nvvm.GridDepActionKind.launch_dependents)


def _grid_control(c: LoweringContext, kind: Any) -> None:
    c.pending.finish_reads()
    if c.target.has_clusters:  # kernels do not overlap on older targets
        nvvm.griddepcontrol(kind)


@lowers(ops.ReturnOp, scf.YieldOp)
def end_block(op: Any, c: LoweringContext) -> None:
    """The operation around a block ends it."""


@lowers(scf.ForOp)
def for_loop(op: Any, c: LoweringContext) -> None:
    """A loop that carries scalars and the registers of tiles."""
    _enter(op, c)
    lower, upper, step, *carried = op.operation.operands
    if any(value in c.places for value in carried):
        raise PassError("lower-tiles: a loop cannot carry views or buffers, only tiles and scalars")
    start = [_kept(c.carried(value)) for value in carried]
    flat = [register for value in start for register in _registers(value, value)]
    loop = scf.ForOp(*(c.scalars[value] for value in (lower, upper, step)), flat)
    loop.operation.attributes["loop_annotation"] = ir.Attribute.parse(
        "#llvm.loop_annotation<unroll = <disable = true>>"
    )
    old = op.operation.regions[0].blocks[0]
    c.scalars[old.arguments[0]] = loop.induction_variable
    _bind(c, old.arguments[1:], start, loop.inner_iter_args)
    with ir.InsertionPoint(loop.body):
        lower_block(old, c)
        yielded = old.operations[len(old.operations) - 1].operands
        results = [register for value, like in zip(yielded, start) for register in _registers(c.carried(value), like)]
        c.pending.finish_reads()  # after the results, which took what they need in their own order
        scf.YieldOp(results)
    _bind(c, op.operation.results, start, loop.results)


_MANY = 32


def _kept(value: Any) -> Any:
    """Returns a tile of many numbers of 16 bits in pairs, which take half as many registers; anything else as it is."""
    if not isinstance(value, Fragment) or value.kind != "scalar" or value.reg.layout.locals < _MANY:
        return value
    kind = kind_of(value.reg)
    return Fragment(value.reg, kind, value.registers(kind).__getitem__)


def _registers(value: Any, like: Any) -> list[Any]:
    """The registers of a tile, of the kind that `like` has; or a scalar."""
    return value.registers(like.kind) if isinstance(value, Fragment) else [value]


def _bind(c: LoweringContext, names: Sequence[Any], like: Sequence[Any], registers: Sequence[Any]) -> None:
    """Spreads a flat list of registers over values that are shaped as `like`."""
    rest = list(registers)
    for name, value in zip(names, like):
        if isinstance(value, Fragment):
            mine, rest = rest[: value.count], rest[value.count :]
            c.tiles[name] = Fragment(value.reg, value.kind, mine.__getitem__)
        else:
            c.scalars[name], *rest = rest


@lowers(scf.IfOp)
def branch(op: Any, c: LoweringContext) -> None:
    """A branch without results."""
    if len(op.operation.results) or len(op.operation.regions[1].blocks):
        raise PassError("lower-tiles: an scf.if in a program has no results and no else")
    _enter(op, c)
    new = scf.IfOp(c.scalars[op.operation.operands[0]])
    with ir.InsertionPoint(new.then_block):
        lower_block(op.operation.regions[0].blocks[0], c)
        c.pending.finish_reads()
        scf.YieldOp([])


@lowers(ops.ConcurrentOp)
def concurrent(op: Any, c: LoweringContext) -> None:
    """A branch that leaves the last product under way."""
    c.pending.begin_product()
    new = scf.IfOp(c.scalars[op.condition])
    with ir.InsertionPoint(new.then_block):
        lower_block(op.body.blocks[0], c)
        scf.YieldOp([])


def _enter(op: Any, c: LoweringContext) -> None:
    """Writes down what a region uses from outside: registers that it wrote would not be there after it."""
    c.pending.finish_reads()
    seen: set[Any] = set()

    def visit(inner: Any) -> Any:
        for operand in inner.operands:
            if operand in c.tiles and operand not in seen:
                seen.add(operand)
                c.tiles[operand].force()
        return ir.WalkResult.ADVANCE

    op.operation.walk(visit)
