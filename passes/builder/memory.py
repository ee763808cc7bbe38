"""Views of device memory, buffers in shared memory, and copies from one to the other."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.dialect import ops
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import Element, Global, Shared, format_attr, ints, row_major
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Index, Memory, Scalar, as_i32, boundary_of, i64, indices, text


class MemoryAccess(Operations):
    """Views, buffers, and the copies that fill them."""

    def global_view(
        self,
        pointer: Scalar,
        element: Element,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        divisors: tuple[int, ...] | None = None,
        sizes: Sequence[Scalar] = (),
    ) -> Memory:
        """Device memory as an array: strides in elements (dense by default), -1 for the sizes given in `sizes`."""
        type_ = Global(element, shape, strides or row_major(shape), divisors or (1,) * len(shape))
        return Memory(ops.GlobalViewOp(pointer.value, [s.value for s in sizes], type_.type).result, type_)

    def alloc_shared(
        self, element: Element, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, swizzle: int = 0
    ) -> Memory:
        """Returns a buffer in shared memory, dense by default, for the rest of the program or until `free_shared`.

        strides: in elements. swizzle: 128 for rows of 128 bytes in the order in which wgmma reads them, else 0.
        """
        type_ = Shared(element, shape, strides or row_major(shape), swizzle)
        return Memory(ops.AllocSharedOp(type_.type).result, type_)

    def free_shared(self, *buffers: Memory) -> None:
        """Gives buffers back: what is allocated later may take their place. Put a barrier before it."""
        for buffer in buffers:
            ops.FreeSharedOp(buffer.value)

    def stage(self, buffer: Memory, index: Index) -> Memory:
        """buffer[index]"""
        whole = Shared.of(buffer.value.type)
        part = Shared(whole.element, whole.shape[1:], whole.strides[1:], whole.swizzle)
        return Memory(ops.StageOp(buffer.value, as_i32(index), part.type).result, part)

    def peer(self, buffer: Memory, rank: Index) -> Memory:
        """The same buffer of another block of the cluster."""
        return Memory(ops.PeerOp(buffer.value, as_i32(rank), buffer.value.type).result, buffer.type)

    def send(
        self, tile: Tile, target: Memory, rank: Index, signals: Memory, index: Index, offsets: Sequence[Index]
    ) -> None:
        """Starts to write a tile to the same buffer of another block of the cluster, whose signal counts its bytes."""
        ops.SendOp(tile.value, target.value, as_i32(rank), signals.value, as_i32(index), indices(offsets))

    def fill_table(self, buffer: Memory, format: DType, element: str, exponent: int = 0) -> None:
        """Fills a buffer, `DecodeTable(format, element).shape` in i32, with the numbers of the codes of a format, as
        `element` and times 2^-exponent. All threads of the block take part, and may `lookup` afterwards."""
        ops.FillTableOp(buffer.value, format_attr(format), text(element), i64(exponent))

    def copy_async(
        self,
        source: Memory,
        target: Memory,
        offsets: Sequence[Index],
        layout: Layout,
        boundary: Sequence[str] | None = None,
        limit: Sequence[int] = (),
    ) -> None:
        """Starts to copy source[offsets + index] to target[index] for each element of a tile with this layout; `commit`
        and `wait` tell when it is there.

        source: device memory. boundary: for each dim what is read beyond its end: nothing is there ("none", the
        default), the last element ("clamp"), zero ("zero"), or no copy takes place ("skip"). limit: [c0, c1, .., end],
        by which elements are zero where c0 * (offsets + index)_0 + c1 * .. is `end` or more: the end of a dim that the
        view cuts in two.
        """
        ops.CopyAsyncOp(
            source.value,
            target.value,
            indices(offsets),
            text(str(layout)),
            boundary_of(boundary, layout),
            limit=ints(tuple(limit)),
        )

    def copy_rows(
        self,
        source: Memory,
        rows: Memory,
        target: Memory,
        offsets: Sequence[Index],
        dim: int,
        layout: Layout,
        boundary: Sequence[str],
        limit: Sequence[int] = (),
    ) -> None:
        """Starts to copy rows that a list names, as `copy_async` copies those side by side.

        rows: i32 [count] in device memory; along dim `dim`, offset + index is a place in it, and where there is none
        zeros are copied (`boundary` "zero") or nothing is ("skip"). All rows named must be there. The layout may be of
        the first part of the target.
        """
        ops.CopyRowsOp(
            source.value,
            rows.value,
            target.value,
            indices(offsets),
            i64(dim),
            text(str(layout)),
            boundary_of(boundary, layout),
            limit=ints(tuple(limit)),
        )

    def copy_padded(
        self,
        source: Memory,
        target: Memory,
        offsets: Sequence[Index],
        layout: Layout,
        group: int,
        padded: int,
    ) -> None:
        """Copies rows of x, f16 or bf16, to shared memory, where every `group` columns take `padded` and the rest is
        zero.

        source: [rows, k] in device memory; offsets: row and step. No row is read beyond the last. It is no copy that
        `commit` and `wait` know of: other threads see it after a barrier. For sizes that no copy of 16 bytes fits.
        """
        ops.CopyPaddedOp(
            source.value,
            target.value,
            indices(offsets),
            text(str(layout)),
            i64(group),
            i64(padded),
        )

    def copy_box(
        self,
        map: Scalar,
        target: Memory,
        signals: Memory,
        index: Index,
        offsets: Sequence[Index],
        row: Index = 0,
        blocks: int = 1,
    ) -> None:
        """Copies a box of a tensor map, whose first element is at `offsets` (the last dim first), to rows of a
        stage."""
        op = ops.CopyBoxOp(map.value, target.value, as_i32(row), signals.value, as_i32(index), indices(offsets))
        op.blocks = i64(blocks) if blocks > 1 else None

    def prefetch(
        self, source: Memory, offsets: Sequence[Index], layout: Layout, boundary: Sequence[str] | None = None
    ) -> None:
        """Asks for what `load` would read to be brought into the L2 cache."""
        words = boundary_of(boundary, layout)
        ops.PrefetchOp(source.value, indices(offsets), text(str(layout)), words)
