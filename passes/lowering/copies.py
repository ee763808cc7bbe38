"""Rules of `lower-tiles` for copies from device memory to shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm
from lowbit.dialect.errors import PassError
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import read_ints, read_layout, read_strings
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Access, NamedRows, Place
from lowbit.passes.lowering.context import LoweringContext, either, int_attr, when
from lowbit.passes.lowering.registry import lowers


@lowers(ops.CommitOp)
def commit(op: Any, c: LoweringContext) -> None:
    nvvm.cp_async_commit_group()


@lowers(ops.WaitOp)
def wait(op: Any, c: LoweringContext) -> None:
    nvvm.cp_async_wait_group(int_attr(op, "pending"))


def _whole(place: Place, layout: Layout, c: LoweringContext) -> Access:
    """Returns the access to a whole buffer."""
    zero = emit.constant(0)
    return Access(c.threads, place, layout, [zero] * layout.rank, ["none"] * layout.rank)


@lowers(ops.CopyAsyncOp)
def copy_async(op: Any, c: LoweringContext) -> None:
    layout, limit = read_layout(op.layout), read_ints(op.limit)
    source = Access(c.threads, c.places[op.source], layout, c.offsets(op), read_strings(op.boundary), limit)
    _copy(source, _whole(c.places[op.target], layout, c))


@lowers(ops.CopyRowsOp)
def copy_rows(op: Any, c: LoweringContext) -> None:
    layout, limit = read_layout(op.layout), read_ints(op.limit)
    source = NamedRows(
        c.threads,
        c.places[op.source],
        layout,
        c.offsets(op),
        read_strings(op.boundary),
        limit,
        rows=c.places[op.rows],
        dim=int_attr(op, "dim"),
    )
    _copy(source, _whole(c.places[op.target], layout, c))


def _copy(source: Access, target: Access) -> None:
    """Copies the elements of a tile that a thread has, as many at a time as lie side by side."""
    layout = source.layout
    length = min(a.vector_length(max(1, 16 // source.bytes)) for a in (source, target))
    size = length * source.bytes
    if size not in (4, 8, 16):
        raise PassError(f"lower-tiles: copy_async moves 4, 8 or 16 bytes per thread, not {size}; layout {layout}")
    first = source.first_replica()
    modifier = nvvm.LoadCacheModifierKind.CG if size == 16 else nvvm.LoadCacheModifierKind.CA
    for slot in range(0, layout.locals, length):
        inside = source.inside(slot, "zero")
        keep = Access.all([x for x in (first, source.inside(slot, "skip")) if x is not None])
        taken = None
        if inside is not None:
            taken = arith.select(inside, emit.constant(size), emit.constant(0))
        to, from_ = target.address(slot), source.address(slot)
        when(
            keep,
            lambda t=to, f=from_, n=taken: nvvm.cp_async_shared_global(t, f, size, modifier, cp_size=n),
        )


@lowers(ops.CopyPaddedOp)
def copy_padded(op: Any, c: LoweringContext) -> None:
    """Target dims are [steps, rows, columns]; a step's columns follow those of the step before."""
    layout = read_layout(op.layout)
    source = _PaddedRows(c.places[op.source], int_attr(op, "group"), int_attr(op, "padded"))
    target = _whole(c.places[op.target], layout, c)
    row_offset, step_offset = c.offsets(op)
    index = Access(c.threads, target.place, layout, [step_offset, row_offset, emit.constant(0)], ["none"] * 3)
    first = target.first_replica()
    for slot in range(layout.locals):
        step, row, column = (index.coordinate(d, slot) for d in range(3))
        column = arith.addi(arith.muli(step, emit.constant(layout.shape[2])), column)
        k, inside = source.column(column)
        row_inside = emit.below(row, source.place.sizes[0])
        address, to = source.address(row, k), target.address(slot)

        def copy(inside: Any = inside, address: Any = address, to: Any = to) -> None:
            llvm.store(source.element_or_zero(address, inside), to, alignment=2)

        when(Access.all([x for x in (first, row_inside) if x is not None]), copy)


@dataclass(frozen=True)
class _PaddedRows:
    """Rows of activations, whose groups of `group` columns are spread over `padded` columns each."""

    place: Place
    group: int
    padded: int

    def column(self, column: Any) -> tuple[Any, Any]:
        """Returns the column in memory of a column with padding, and whether there is one."""
        within = arith.remui(column, emit.constant(self.padded))
        k = arith.addi(arith.muli(arith.divui(column, emit.constant(self.padded)), emit.constant(self.group)), within)
        inside = arith.andi(emit.below(within, emit.constant(self.group)), emit.below(k, self.place.sizes[1]))
        return k, inside

    def address(self, row: Any, k: Any) -> Any:
        """Returns the address of an element of 16 bits."""
        wide = emit.integer(64)
        start = arith.muli(arith.extui(wide, row), emit.constant(self.place.type.strides[0], 64))
        element = arith.addi(start, arith.extui(wide, k))
        return emit.offset_bytes(self.place.base, dynamic=arith.muli(element, emit.constant(2, 64)))

    def element_or_zero(self, address: Any, inside: Any) -> Any:
        """Reads an element if a condition holds, else zero."""
        element = ir.Type.parse(str(self.place.type.element))
        (value,) = either(
            inside,
            [element],
            lambda: [llvm.load(element, address, alignment=2)],
            lambda: [emit.real(0.0, element)],
        )
        return value
