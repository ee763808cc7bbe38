"""Tiles in registers: loaded and stored, seen as other tiles, and summed. Arithmetic is in `ops.elementwise`."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
import math
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import (
    NUMBERS,
    activation,
    expect,
    fragments,
    in_range,
    number,
    same_element,
    same_warps,
    verifier,
    within_warp,
)
from lowbit.dialect.elements import OPERANDS
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import BLOCK_K, ROWS, Packing
from lowbit.dialect.layouts.fragments import MMA_B_NK, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from lowbit.dialect.ops.common import I32, check_access, memory_of
from lowbit.dialect.optional import Choice, Flag, Optional
from lowbit.dialect.types import UNIT, Global, GlobalType, Lowbit, Reg, RegType, Shared, SharedType, element_bits

WARP = 32  # threads
_MOST_I32 = 1 << 31


class LoadOp(Lowbit.Operation, name="load"):
    """source[offsets + index] from device or shared memory."""

    source: ext.Operand[Any]
    offsets: Sequence[ext.Operand[I32]]
    boundary: ir.ArrayAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        source, tile = memory_of(op.source), Reg.of(op.result.type)
        same_element(source.element, tile.element, "element of the tile")
        check_access(op, source, tile.shape, ("none", "clamp", "zero"))


class GatherOp(Lowbit.Operation, name="gather"):
    """source[offsets, i] for every i of a tile of i32: elements of the last dim of device or shared memory, exactly.

    Indices must be inside of the memory, and are read one by one.
    """

    source: ext.Operand[Any]
    index: ext.Operand[RegType]
    offsets: Sequence[ext.Operand[I32]]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_indexed(op, memory_of(op.source), Reg.of(op.result.type), "source", "result")


def _check_indexed(op: Any, memory: Global | Shared, tile: Reg, what: str, value: str) -> None:
    """Elements of the last dim of memory are those of a tile, one for each of a tile of indices."""
    index = Reg.of(op.index.type)
    number(memory.element, what)
    same_element(memory.element, tile.element, f"element of the {value}")
    same_element("i32", index.element, "element of the index")
    expect(tile.layout == index.layout, "layout", index.layout, tile.layout)
    outer = len(memory.shape) - 1
    expect(len(op.offsets) == outer, "offsets", f"one for each dim but the last ({outer})", len(op.offsets))
    if isinstance(memory, Shared):
        expect(memory.swizzle == 0, "swizzle", "none", memory.swizzle)
    else:
        expect(set(memory.divisors) == {1}, "divisors", "all 1", list(memory.divisors))


class ScatterOp(Lowbit.Operation, name="scatter"):
    """target[offsets, i] = value for every i of a tile of i32: elements of the last dim of device or shared memory.

    Elements whose index is outside of that dim are left out: below 0, or its size and more. With `combine` "add",
    integers (i32) in shared memory are counted up: target[offsets, i] += value, as often as i is there. Else no two
    elements may have the same index. Of several threads that hold an element, the first writes it.
    """

    value: ext.Operand[RegType]
    target: ext.Operand[Any]
    index: ext.Operand[RegType]
    offsets: Sequence[ext.Operand[I32]]
    combine = Choice("replace", "add")

    @verifier
    def verify_invariants(op: Any) -> None:
        target, tile = memory_of(op.target), Reg.of(op.value.type)
        _check_indexed(op, target, tile, "target", "value")
        if op.combine == "add":
            counts = isinstance(target, Shared) and target.element == "i32"
            expect(counts, 'target with combine "add"', "i32 in shared memory", op.target.type)


class ReadIndexOp(Lowbit.Operation, name="read_index"):
    """source[offsets] as a scalar that all threads have: an i32 of device memory that nobody writes meanwhile, such as
    the end of an expert's rows."""

    source: ext.Operand[GlobalType]
    offsets: Sequence[ext.Operand[I32]]
    result: ext.Result[I32] = ext.infer_result()

    @verifier
    def verify_invariants(op: Any) -> None:
        source = Global.of(op.source.type)
        same_element("i32", source.element, "element of the source")
        expect(len(op.offsets) == len(source.shape), "offsets", f"one per dim ({len(source.shape)})", len(op.offsets))
        expect(set(source.divisors) == {1}, "divisors", "all 1", list(source.divisors))


class LoadMatrixOp(Lowbit.Operation, name="load_matrix"):
    """The B fragments (rows of n, columns of k) of a tile [.., n, k] of 16-bit or 8-bit elements, by ldmatrix.

    Rows from `rows` on are read as row rows-1: their columns of the product are never stored.
    """

    source: ext.Operand[SharedType]
    rows: ext.Operand[I32]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        source, tile = Shared.of(op.source.type), Reg.of(op.result.type)
        same_element(source.element, tile.element, "element of the tile")
        bits = element_bits(tile.element)
        expect(bits in (8, 16), "element", "of 16 or 8 bits", tile.element)
        expect(len(source.shape) >= 2, "rank of the buffer", "at least 2", len(source.shape))
        *batch, rows, columns = source.shape
        expect([*tile.shape[:-2], tile.shape[-1]] == [*batch, columns], "shape of the tile", source.shape, tile.shape)
        expect(tile.shape[-2] >= rows, "rows of the tile", f"at least the {rows} of the buffer", tile.shape[-2])
        expect(source.swizzle == 0, "swizzle", "none", source.swizzle)
        *outer, last = source.strides
        vector = 128 // bits
        aligned = last == 1 and all(stride % vector == 0 for stride in outer)
        expect(aligned, "strides", f"multiples of {vector} (16 bytes) and 1 for the last dim", list(source.strides))
        fragments(tile.layout, MMA_B_NK[bits], "result")


class StoreOp(Lowbit.Operation, name="store"):
    """target[offsets + index] = value; of several threads that hold an element, the first writes it."""

    value: ext.Operand[RegType]
    target: ext.Operand[Any]
    offsets: Sequence[ext.Operand[I32]]
    boundary: ir.ArrayAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        target, tile = memory_of(op.target), Reg.of(op.value.type)
        same_element(target.element, tile.element, "element of the tile")
        check_access(op, target, tile.shape, ("none", "skip"))


class ConstantOp(Lowbit.Operation, name="constant", traits=[ext.Pure]):
    """A tile of one value, a real or i32. With `lower` that is its value in the lower half of every 16 rows."""

    value: ir.FloatAttr
    lower = Optional(ir.FloatAttr, "a float")
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        element = Reg.of(op.result.type).element
        number(element, "result")
        if element == "i32":
            for value in [v for v in (op.value, op.lower) if v is not None]:
                given = float(ir.FloatAttr(value).value)
                fits = given.is_integer() and -_MOST_I32 <= given < _MOST_I32
                expect(fits, "value of i32", "an integer of 32 bits", given)


class SplatOp(Lowbit.Operation, name="splat", traits=[ext.Pure]):
    """A tile of one value that is known when the kernel runs: an f32 parameter, rounded to the tile's element, or an
    i32."""

    value: ext.Operand[Any]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        element = Reg.of(op.result.type).element
        wanted = "i32" if element == "i32" else "f32"
        expect(str(op.value.type) == wanted, "value", wanted, op.value.type)
        number(element, "result")


class IotaOp(Lowbit.Operation, name="iota", traits=[ext.Pure]):
    """The place of each element along a dim, in i32: 0, 1, 2 .."""

    dim: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        tile = Reg.of(op.result.type)
        same_element("i32", tile.element, "element of the result")
        in_range(op.dim, "dim", 0, len(tile.shape) - 1)


class MaterializeOp(Lowbit.Operation, name="materialize"):
    """Computes a tile here. Without it, `lower-tiles` writes down the registers of a tile where they are first used.

    by_all  a tile in f32 that no compiler may move from here: what a warp makes together, such as `row_sums`, may not
            go to where only the lanes are that store it
    """

    source: ext.Operand[RegType]
    by_all = Flag()

    @verifier
    def verify_invariants(op: Any) -> None:
        element = Reg.of(op.source.type).element
        if op.by_all:
            expect(element == "f32", "element of the source", "f32", element)


class ViewOp(Lowbit.Operation, name="view", traits=[ext.Pure]):
    """The same registers read as another tile: the bits of every thread stay where they are.

    To a low-bit format, units of packed codes are read in the order of `dialect.formats.packing`: per warp row blocks,
    then chunks. Otherwise slots stay in order.
    """

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(a.layout.threads == b.layout.threads, "threads", a.layout.threads, b.layout.threads)
        before, after = a.bits_per_thread, b.bits_per_thread
        expect(before == after, "bits per thread", before, after)
        if not isinstance(b.element, DType):
            if not (isinstance(a.element, DType) and b.element == UNIT):
                same_element(a.element, b.element, "element")
            return
        expect(isinstance(a.element, DType) or a.element == UNIT, "element of the source", UNIT, a.element)
        blocks = fragments(b.layout, MMA_M16N8K16_A, "result")
        chunk = Packing(b.element.bits, ROWS, BLOCK_K).chunk
        for dim, what, block, least in ((-2, "rows", ROWS, ROWS), (-1, "columns", BLOCK_K, chunk)):
            own = [d for d in blocks.local_digits() if d.dim == blocks.rank + dim]
            count = block * math.prod(d.size for d in own)
            span = block * (1 + sum((d.size - 1) * d.stride for d in own))
            expect(count == span, f"{what} of a warp", "side by side", f"{count} among {span}")
            expect(count % least == 0, f"{what} of a warp", f"a multiple of {least} for {b.element.name}", count)


class SliceOp(Lowbit.Operation, name="slice", traits=[ext.Pure]):
    """Elements start .. start+size of one dim, which every thread cuts from its own slots."""

    source: ext.Operand[RegType]
    dim: ir.IntegerAttr
    start: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        known = (*NUMBERS, *OPERANDS)
        expect(a.element in known, "element of the source", " or ".join(dict.fromkeys(known)), a.element)
        same_element(a.element, b.element, "element")
        expect(len(a.shape) == len(b.shape), "rank", len(a.shape), len(b.shape))
        dim = in_range(op.dim, "dim", 0, len(a.shape) - 1)
        start = in_range(op.start, "start", 0, a.shape[dim] - b.shape[dim])
        layout, _ = a.layout.restrict(dim, start, b.shape[dim])
        expect(b.layout == layout, "layout", layout, b.layout)


class ReshapeOp(Lowbit.Operation, name="reshape", traits=[ext.Pure]):
    """The tile's elements, in row-major order, as another shape; nothing moves."""

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        same_element(a.element, b.element, "element")
        layout = a.layout.reshape(b.shape)
        expect(b.layout == layout, "layout", layout, b.layout)


class DiagonalOp(Lowbit.Operation, name="diagonal", traits=[ext.Pure]):
    """Blocks of 16 columns that stand below one another [.., 8, k / 8], in eight rows, side by side and apart
    [.., 8, k]: row i of the result has its blocks at i, i + 8, i + 16 .. and 0 elsewhere. Both are B fragments.

    A product with the result has in column i what the blocks of row i add to the sum.
    """

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        activation(a.element, "element of the source")
        same_element(a.element, b.element, "element")
        from_, to = (fragments(t.layout, MMA_M16N8K16_B_NK, what) for t, what in ((a, "source"), (b, "result")))
        *batch, rows, columns = a.shape
        expect(rows == 8, "rows of the source", 8, rows)
        expect(list(b.shape) == [*batch, 8, 8 * columns], "result", [*batch, 8, 8 * columns], list(b.shape))
        for blocks, what in ((from_, "columns of the source"), (to, "columns of the result")):
            within_warp(blocks, len(a.shape) - 1, what)
        same_warps(from_.reduce((-1,)), to.reduce((-1,)), "the source")


class ReduceOp(Lowbit.Operation, name="reduce", traits=[ext.Pure]):
    """The sum over one dim, or the largest element ("max", NaN if there is one); the dim stays with size 1. It must lie
    within each thread or, in f32 and i32, within each warp, whose lanes exchange their parts."""

    source: ext.Operand[RegType]
    dim: ir.IntegerAttr
    combine = Choice("sum", "max")
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        number(a.element, "source")
        same_element(a.element, b.element, "element")
        dim = in_range(op.dim, "dim", 0, len(a.shape) - 1)
        spread = [d for d in a.layout.thread_digits() if d.dim == dim]
        wide = a.element in ("f32", "i32")
        inside = not spread or (wide and all(d.size * d.divisor <= WARP for d in spread))
        where = "within each thread, or in f32 and i32 within each warp"
        fix = "" if wide else "; cast to f32 first"
        expect(inside, f"dim {dim}", where, f"{a.element} spread over threads by {a.layout}{fix}")
        expect(b.layout == a.layout.reduce((dim,)), "layout", a.layout.reduce((dim,)), b.layout)
