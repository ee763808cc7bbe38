"""Rules of `lower-tiles` for tiles in registers: constants, views and sums.

Each notes how to make the registers of its result, and makes none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from functools import reduce as fold
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.mixed_radix import Digit
from lowbit.dialect.types import Reg, element_bits
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import LoweringContext, int_attr
from lowbit.passes.lowering.fragment import Fragment, kind_of
from lowbit.passes.lowering.registry import lowers


@lowers(ops.ConstantOp)
def constant(op: Any, c: LoweringContext) -> None:
    reg = Reg.of(op.result.type)
    value = float(ir.FloatAttr(op.value).value)
    if reg.element == "i32":
        c.tiles[op.result] = Fragment(reg, "scalar", lambda i: emit.constant(int(value)))
        return
    fragment = Fragment(reg, kind_of(reg), lambda i: emit.real(value, fragment.type()))
    if op.lower is not None:
        lower = float(ir.FloatAttr(op.lower).value)
        below = reg.layout.table()[..., -2] // (ROWS // 2) % 2
        if (below != below[0]).any():
            raise PassError("lower-tiles: a constant with another value below needs eight rows to a register")
        fragment = Fragment(reg, "scalar", lambda i: emit.real(lower if below[0, i] else value, fragment.type()))
    c.tiles[op.result] = fragment


@lowers(ops.SplatOp)
def splat(op: Any, c: LoweringContext) -> None:
    reg, value = Reg.of(op.result.type), c.scalars[op.value]
    if reg.element not in ("f32", "i32"):
        value = arith.truncf(ir.Type.parse(str(reg.element)), value)
    c.tiles[op.result] = Fragment(reg, "scalar", lambda i: value)


@lowers(ops.IotaOp)
def iota(op: Any, c: LoweringContext) -> None:
    """A base for each thread, and a constant for each slot."""
    reg, dim = Reg.of(op.result.type), int_attr(op, "dim")
    layout = reg.layout
    local = layout.table()[0, :, dim]

    @cache
    def base() -> Any:
        parts = [
            arith.muli(c.threads.digit(size, divisor, layout.threads), emit.constant(stride))
            for size, divisor, d, stride in layout.thread_digits()
            if d == dim
        ]
        return fold(arith.addi, parts, emit.constant(0))

    c.tiles[op.result] = Fragment(reg, "scalar", lambda slot: arith.addi(base(), emit.constant(int(local[slot]))))


@lowers(ops.ViewOp)
def view(op: Any, c: LoweringContext) -> None:
    source, reg = c.tiles[op.source], Reg.of(op.result.type)
    if isinstance(reg.element, DType) and source.kind != "word":
        raise PassError(f"lower-tiles: only words can be viewed as {reg.element}, not {source.reg.element}")
    if source.kind != "word" and source.reg.element != reg.element:
        raise PassError(f"lower-tiles: no view of {source.reg.element} as {reg.element}")
    c.tiles[op.result] = Fragment(reg, source.kind, source.register)


@lowers(ops.MaterializeOp)
def materialize(op: Any, c: LoweringContext) -> None:
    tile = c.tiles[op.source]
    tile.force()
    if op.by_all:
        kept = [emit.kept(x) for x in tile.registers("scalar")]
        c.tiles[op.source] = Fragment(tile.reg, "scalar", kept.__getitem__)


@lowers(ops.SliceOp)
def slice_dim(op: Any, c: LoweringContext) -> None:
    source, reg = c.tiles[op.source], Reg.of(op.result.type)
    dim = int_attr(op, "dim")
    _, slots = source.reg.layout.restrict(dim, int_attr(op, "start"), reg.shape[dim])
    c.tiles[op.result] = _picked(source, reg, slots)


def _picked(source: Fragment, reg: Reg, slots: Sequence[int]) -> Fragment:
    """Returns the tile whose slot i is the source's slots[i]; pairs stay pairs where they stay together."""
    paired = source.kind == "pair" and all(
        a % 2 == 0 and b == a + 1 for a, b in zip(slots[::2], slots[1::2], strict=True)
    )
    if paired:
        return Fragment(reg, "pair", lambda i: source.register(slots[2 * i] // 2))
    if source.kind == "word":
        per_word = 32 // element_bits(reg.element)
        return Fragment(reg, "word", lambda i: source.register(slots[per_word * i] // per_word))
    return Fragment(reg, "scalar", lambda i: source.scalar(slots[i]))


@lowers(ops.ReshapeOp)
def reshape(op: Any, c: LoweringContext) -> None:
    source = c.tiles[op.source]
    c.tiles[op.result] = Fragment(Reg.of(op.result.type), source.kind, source.register)


@lowers(ops.ReduceOp)
def reduce(op: Any, c: LoweringContext) -> None:
    source, reg = c.tiles[op.source], Reg.of(op.result.type)
    of_reals, of_integers = {"sum": (arith.addf, arith.addi), "max": (arith.maximumf, arith.maxsi)}[op.combine]
    combine = of_integers if reg.element == "i32" else of_reals
    members: dict[int, list[int]] = {}
    for slot, into in enumerate(reg.layout.slots_for(source.reg.layout)):
        members.setdefault(into, []).append(slot)

    def make(i: int) -> Any:
        total = source.scalar(members[i][0])
        for slot in members[i][1:]:
            total = combine(total, source.scalar(slot))
        return total

    lanes = [digit for digit in source.reg.layout.thread_digits() if digit.dim == int_attr(op, "dim")]
    if not lanes:
        c.tiles[op.result] = Fragment(reg, "scalar", make)
        return
    reduced = Fragment(reg, "scalar", lambda i: _over_lanes(make(i), lanes, combine))
    reduced.force()  # here, where all lanes are: they shuffle
    c.tiles[op.result] = reduced


def _over_lanes(value: Any, digits: Sequence[Digit], combine: Callable[[Any, Any], Any]) -> Any:
    """Combines the values of all lanes that differ in these digits of the thread index, as a butterfly."""
    for digit in digits:
        distance = digit.divisor
        while distance < digit.divisor * digit.size:
            value = combine(value, emit.from_lane_beside(value, distance))
            distance *= 2
    return value
