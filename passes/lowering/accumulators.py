"""Rules of `lower-tiles` for sums by wgmma that stay in place; `passes.lowering.warpgroup` writes the instructions.

The sums are registers of PTX that LLVM never sees until they are read, and every fragment of a is a new register; so
the compilers have nothing to move between a product and the wait for it.
"""

from __future__ import annotations

from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.types import Reg
from lowbit.passes.lowering import warpgroup
from lowbit.passes.lowering.context import WGMMA, LoweringContext, int_attr
from lowbit.passes.lowering.fragment import Fragment, fragment_blocks
from lowbit.passes.lowering.registry import lowers


class Accumulator(Fragment):
    """Registers of an `accumulator`: a row of fragments after the other, from number `first` on."""

    def __init__(self, reg: Reg, first: int) -> None:
        self.first = first
        self.held: dict[int, list[warpgroup.Term]] = {}  # by row: what is issued with the next part of a product
        self.places = fragment_blocks(reg.layout, MMA_M16N8_D)
        self.rows = 1 + max(row for row, _ in self.places)
        self.columns = 8 * (1 + max(column for _, column in self.places))
        super().__init__(reg, "scalar", self._unread)

    @property
    def per_row(self) -> int:
        """Registers of a row of fragments."""
        return self.columns // 2

    def _unread(self, i: int) -> Any:
        raise PassError("lower-tiles: sums of an accumulator are used by accumulate and read_accumulator alone")

    def force(self) -> None:
        """Does nothing: the values are in registers already."""

    def names(self, row: int) -> list[str]:
        return warpgroup.sum_names(str(self.reg.element), self.first + row * self.per_row, self.per_row)


@lowers(ops.AccumulatorOp, needs=WGMMA)
def accumulator(op: Any, c: LoweringContext) -> None:
    made = [tile for tile in c.tiles.values() if isinstance(tile, Accumulator)]
    first = warpgroup.FIRST_ACCUMULATOR + sum(tile.rows * tile.per_row for tile in made)
    c.tiles[op.result] = Accumulator(Reg.of(op.result.type), first)


def _of(value: Any, c: LoweringContext) -> Accumulator:
    sums = c.tiles[value]
    if not isinstance(sums, Accumulator):
        raise PassError("lower-tiles: sums must be the result of lowbit.accumulator")
    return sums


@lowers(ops.ClearAccumulatorOp, needs=WGMMA)
def clear_accumulator(op: Any, c: LoweringContext) -> None:
    sums = _of(op.sums, c)
    for row in range(sums.rows):
        warpgroup.clear(str(sums.reg.element), sums.names(row))


@lowers(ops.AccumulateOp, needs=WGMMA)
def accumulate(op: Any, c: LoweringContext) -> None:
    """Row by row of fragments: the next is decoded while the tensor core works on the last.

    Parts that are held are issued with the one behind them. With a fence for each, the assembler makes a group of each,
    and a wait for all but the last product becomes one for all but the last part.
    """
    a, b, sums = c.tiles[op.a], c.places[op.b], _of(op.sums, c)
    descriptor = warpgroup.descriptor(c.threads, b, sums.reg)
    blocks = range(sums.rows) if op.block is None else [int_attr(op, "block")]
    for row in blocks:
        row_of_b = 0 if op.row is None else int_attr(op, "row")
        terms = [*sums.held.pop(row, []), *warpgroup.terms_of(a, b, int_attr(op, "start"), row, row_of_b)]
        if op.held:
            sums.held[row] = terms
            continue
        first = sums.first + row * sums.per_row
        instructions = warpgroup.Instructions(descriptor, sums.columns, str(a.reg.element), str(b.type.element), first)
        commit = row == blocks[-1] and not op.more
        instructions.issue_onto(terms, commit, bool(op.fresh))
    if op.pending is not None:
        warpgroup.wait(int_attr(op, "pending"))


@lowers(ops.AwaitProductsOp, needs=WGMMA)
def await_products(op: Any, c: LoweringContext) -> None:
    c.pending.finish_reads()  # what is on its way meanwhile
    warpgroup.wait(int_attr(op, "pending"))


@lowers(ops.AddScaledOp, needs=WGMMA)
def add_scaled(op: Any, c: LoweringContext) -> None:
    product, sums = _of(op.product, c), _of(op.sums, c)
    c.pending.finish_reads()
    for row in range(sums.rows):
        scales = _scalars_of_row(c.tiles[op.scale[0]], sums, row) if op.scale else []
        outer = [_scalars_of_row(c.tiles[tile], sums, row) for tile in (*op.column, *op.row)]
        names = product.names(row), scales, sums.names(row)
        warpgroup.add_scaled(str(product.reg.element), *names, int_attr(op, "pending"), list(zip(*outer)))


@lowers(ops.AddOuterOp, needs=WGMMA)
def add_outer(op: Any, c: LoweringContext) -> None:
    sums = _of(op.sums, c)
    for row in range(sums.rows):
        columns, rows = (_scalars_of_row(c.tiles[tile], sums, row) for tile in (op.column, op.row))
        warpgroup.add_products(columns, rows, sums.names(row))


def _scalars_of_row(tile: Fragment, sums: Accumulator, row: int) -> list[Any]:
    """Returns the number of a tile, of columns or of rows, that belongs to every register of a row of fragments."""
    slots = tile.reg.layout.slots_for(sums.reg.layout)
    ordered = sorted((column, i) for i, (r, column) in enumerate(sums.places) if r == row)
    return [tile.scalar(slots[4 * i + j]) for _, i in ordered for j in range(4)]


@lowers(ops.ReadAccumulatorOp, needs=WGMMA)
def read_accumulator(op: Any, c: LoweringContext) -> None:
    sums = _of(op.sums, c)
    first, element = [warpgroup.waiting(0)], str(sums.reg.element)
    read = [warpgroup.read(element, sums.names(row), first) for row in range(sums.rows)]

    def register(i: int) -> Any:
        row, column = sums.places[i // 4]
        return read[row][4 * column + i % 4]

    c.tiles[op.result] = Fragment(sums.reg, "scalar", register)
