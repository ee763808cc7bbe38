"""The operations of the `lowbit` dialect.

Tensor level: `matmul`, `dequantize`, `prepack`. Tile level: a `program` is what one thread block does with tiles in
device memory, shared memory and registers; scalars and loops are upstream's arith and scf. Register level: `decode_pair`
turns the words of a thread into a pair of numbers, and is all that is left of a format when tiles are gone.

Verifiers say what was expected and what came. Accesses carry a `boundary`, one word per dim of the tile:

    "none"   the index is always inside
    "clamp"  an index beyond the end reads the last element
    "zero"   an element beyond the end reads as zero
    "skip"   an element beyond the end is not touched
"""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Callable, Sequence
from typing import Any

from dialect.bindings import ext, ir
from dialect.dtypes import DType
from dialect.errors import LayoutError, LowbitError
from dialect.layout import MMA_M16N8_D, MMA_M16N8K16_A, MMA_M16N8K16_B_NK
from dialect.packing import plane_bits
from dialect.types import (
    Element,
    FormatAttr,
    Global,
    GlobalType,
    Lowbit,
    Packed,
    PackedType,
    Reg,
    RegType,
    Shared,
    SharedType,
    element_bits,
    read_format,
    read_ints,
    read_strings,
)

I32 = ir.IntegerType  # scalar indices are i32
BOUNDARIES = ("none", "clamp", "zero", "skip")


class Mismatch(LowbitError):
    """What a verifier found."""


def expect(ok: bool, what: str, expected: object, got: object) -> None:
    """Raise a verifier's message unless `ok`."""
    if not ok:
        raise Mismatch(f"{what}: expected {expected}, got {got}")


def verifier(check: Callable[[Any], None]) -> Any:
    """Turns a function that raises into the verifier hook of the bindings, which reports and returns a bool."""

    def verify_invariants(op: Any) -> bool:
        try:
            check(op)
        except LowbitError as error:
            op.location.emit_error(f"'{op.operation.name}' op {error}")
            return False
        return True

    return staticmethod(verify_invariants)


def _memory(type_: ir.Type) -> Global | Shared:
    return Global.of(type_) if isinstance(type_, GlobalType) else Shared.of(type_)


def _check_access(op: Any, memory: Global | Shared, tile: tuple[int, ...], boundary: ir.Attribute) -> None:
    rank = len(memory.shape)
    expect(len(tile) == rank, "rank of the tile", f"{rank} as the memory", len(tile))
    expect(len(op.offsets) == rank, "offsets", f"one per dim ({rank})", len(op.offsets))
    words = read_strings(boundary)
    expect(len(words) == rank, "boundary", f"one word per dim ({rank})", len(words))
    for word in words:
        expect(word in BOUNDARIES, "boundary", f"one of {', '.join(BOUNDARIES)}", word)


def _same_element(a: Element, b: Element, what: str) -> None:
    expect(a == b, what, a, b)


# -- tensors


class MatmulOp(Lowbit.Operation, name="matmul"):
    """y[t, n] = sum_k x[t, k] W[n, k] (+ bias[n]): x is tensor<?xk>, w a packed weight, y tensor<?xn>."""

    x: ext.Operand[Any]
    w: ext.Operand[PackedType]
    y: ext.Result[Any]
    bias: Sequence[ext.Operand[Any]]

    @verifier
    def verify_invariants(op: Any) -> None:
        w, x, y = Packed.of(op.w.type), ir.RankedTensorType(op.x.type), ir.RankedTensorType(op.y.type)
        expect(x.rank == 2 and x.get_dim_size(1) == w.k, "x", f"tensor<? x {w.k}>", x)
        expect(y.rank == 2 and y.get_dim_size(1) == w.n, "y", f"tensor<? x {w.n}>", y)
        for bias in op.bias:
            b = ir.RankedTensorType(bias.type)
            expect(b.rank == 1 and b.get_dim_size(0) == w.n, "bias", f"tensor<{w.n}>", b)


class DequantizeOp(Lowbit.Operation, name="dequantize"):
    """The weight W [n, k] in the activation's type: s * (decode(code) - z), rounded once."""

    w: ext.Operand[PackedType]
    y: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        w, y = Packed.of(op.w.type), ir.RankedTensorType(op.y.type)
        expect(list(y.shape) == [w.n, w.k], "y", f"tensor<{w.n} x {w.k}>", y)


# -- programs


class ProgramOp(Lowbit.Operation, name="program"):
    """One block's program. The region's arguments are the kernel's parameters, named by `params`."""

    sym_name: ir.StringAttr
    threads: ir.IntegerAttr
    grid: ir.ArrayAttr
    params: ir.ArrayAttr
    workspace: ir.IntegerAttr
    body: ext.Region

    @verifier
    def verify_invariants(op: Any) -> None:
        threads = int(ir.IntegerAttr(op.threads).value)
        expect(0 < threads <= 1024 and threads % 32 == 0, "threads", "a multiple of 32 up to 1024", threads)
        names, arguments = read_strings(op.params), op.body.blocks[0].arguments
        expect(len(names) == len(arguments), "params", f"a name for each of {len(arguments)} arguments", len(names))


class ReturnOp(Lowbit.Operation, name="return", traits=[ir.IsTerminatorTrait]):
    """Ends a program."""


class BlockIdOp(Lowbit.Operation, name="block_id", traits=[ext.Pure]):
    """Index of this block along grid axis 0, 1 or 2."""

    axis: ir.IntegerAttr
    result: ext.Result[I32[32]] = ext.infer_result()


class GridWaitOp(Lowbit.Operation, name="grid_wait"):
    """Waits until the kernel before this one has finished and its writes are visible (griddepcontrol.wait)."""


class GridLaunchOp(Lowbit.Operation, name="grid_launch_dependents"):
    """Lets the next kernel start its blocks where there is room (griddepcontrol.launch_dependents)."""


class GlobalViewOp(Lowbit.Operation, name="global_view", traits=[ext.Pure]):
    """Device memory at a pointer as an array; `sizes` gives the dims that the type writes as -1."""

    pointer: ext.Operand[Any]
    sizes: Sequence[ext.Operand[I32[32]]]
    result: ext.Result[GlobalType]

    @verifier
    def verify_invariants(op: Any) -> None:
        view = Global.of(op.result.type)
        dynamic = view.shape.count(-1)
        expect(len(op.sizes) == dynamic, "sizes", f"one per dynamic dim ({dynamic})", len(op.sizes))
        for name, values in (("strides", view.strides), ("divisors", view.divisors)):
            expect(len(values) == len(view.shape), name, f"one per dim ({len(view.shape)})", len(values))


# -- shared memory and copies


class AllocSharedOp(Lowbit.Operation, name="alloc_shared"):
    """A buffer in shared memory, alive until its `free_shared` or the end of the program."""

    result: ext.Result[SharedType]


class FreeSharedOp(Lowbit.Operation, name="free_shared"):
    """Ends the life of a buffer; what is allocated later may take its place. The block must have passed a barrier."""

    buffer: ext.Operand[SharedType]


class StageOp(Lowbit.Operation, name="stage", traits=[ext.Pure]):
    """buffer[index]: a stage of a pipelined buffer, which has one dim less."""

    buffer: ext.Operand[SharedType]
    index: ext.Operand[I32[32]]
    result: ext.Result[SharedType]

    @verifier
    def verify_invariants(op: Any) -> None:
        whole, part = Shared.of(op.buffer.type), Shared.of(op.result.type)
        expected = Shared(whole.element, whole.shape[1:], whole.strides[1:])
        expect(part == expected, "result", expected, part)


class CopyAsyncOp(Lowbit.Operation, name="copy_async"):
    """Starts to copy source[offsets + index] to target[index] for the elements of a tile laid out as `layout`.

    `limit` = [c0, c1, ..., end] reads zero where sum(c_i * (offsets + index)_i) >= end: the end of a dim that the
    view cuts in two. An empty list means no such limit.
    """

    source: ext.Operand[GlobalType]
    target: ext.Operand[SharedType]
    offsets: Sequence[ext.Operand[I32[32]]]
    layout: ir.StringAttr
    boundary: ir.ArrayAttr
    limit: ir.ArrayAttr = ext.attribute(default_factory=lambda: ir.ArrayAttr.get([]))

    @verifier
    def verify_invariants(op: Any) -> None:
        source, target = Global.of(op.source.type), Shared.of(op.target.type)
        _same_element(source.element, target.element, "element of the target")
        _check_access(op, source, target.shape, op.boundary)
        limit = read_ints(op.limit)
        expect(len(limit) in (0, len(source.shape) + 1), "limit", "one factor per dim and the end", limit)


class CopyPaddedOp(Lowbit.Operation, name="copy_padded"):
    """Copies rows of activations into shared memory element by element, spreading groups over padded groups.

    Column c of the target tile is column (c // padded) * group + c % padded of the source, and zero where
    c % padded >= group or where the source ends. source is [rows, k], offsets are (row, column), and rows beyond the
    end are skipped. A plain, synchronous copy: for shapes that no 16-byte copy fits.
    """

    source: ext.Operand[GlobalType]
    target: ext.Operand[SharedType]
    offsets: Sequence[ext.Operand[I32[32]]]
    layout: ir.StringAttr
    group: ir.IntegerAttr
    padded: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        source, target = Global.of(op.source.type), Shared.of(op.target.type)
        _same_element(source.element, target.element, "element of the target")
        expect(len(source.shape) == 2, "source", "rank 2 [rows, columns]", len(source.shape))
        expect(len(target.shape) == 3, "target", "rank 3 [steps, rows, columns]", len(target.shape))


class CommitOp(Lowbit.Operation, name="commit"):
    """Makes a group of the copies started since the last one."""


class WaitOp(Lowbit.Operation, name="wait"):
    """Waits until at most `pending` groups are under way."""

    pending: ir.IntegerAttr


class BarrierOp(Lowbit.Operation, name="barrier"):
    """All threads of the "block" or of the "warp" meet, and see each other's shared memory."""

    scope: ir.StringAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        scope = ir.StringAttr(op.scope).value
        expect(scope in ("block", "warp"), "scope", "'block' or 'warp'", repr(scope))


class LastArrivalOp(Lowbit.Operation, name="last_arrival"):
    """True in the last of `count` blocks that come here with the same counter, which it leaves at zero.

    What the others wrote to device memory before is visible to it. Counters are i32, zero before the first launch.
    """

    counters: ext.Operand[GlobalType]
    index: ext.Operand[I32[32]]
    count: ir.IntegerAttr
    result: ext.Result[I32[1]] = ext.infer_result()


# -- tiles in registers


class ConstantOp(Lowbit.Operation, name="constant", traits=[ext.Pure]):
    """A tile of one value."""

    value: ir.FloatAttr
    result: ext.Result[RegType]


class LoadOp(Lowbit.Operation, name="load"):
    """source[offsets + index] from device or shared memory."""

    source: ext.Operand[Any]
    offsets: Sequence[ext.Operand[I32[32]]]
    boundary: ir.ArrayAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        source, tile = _memory(op.source.type), Reg.of(op.result.type)
        _same_element(source.element, tile.element, "element of the tile")
        _check_access(op, source, tile.shape, op.boundary)


class LoadMatrixOp(Lowbit.Operation, name="load_matrix"):
    """The B fragments (rows of n, columns of k) of a tile [.., n, k] of 16-bit elements in shared memory, by ldmatrix.

    Rows from `rows` on are read as row rows-1: their columns of the product are never stored.
    """

    source: ext.Operand[SharedType]
    rows: ext.Operand[I32[32]]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        source, tile = Shared.of(op.source.type), Reg.of(op.result.type)
        _same_element(source.element, tile.element, "element of the tile")
        expect(element_bits(tile.element) == 16, "element", "of 16 bits", tile.element)
        expect(source.shape == tile.shape, "shape of the tile", source.shape, tile.shape)
        _fragment(tile, MMA_M16N8K16_B_NK, "result")


class StoreOp(Lowbit.Operation, name="store"):
    """target[offsets + index] = value; of several threads that hold an element, the first writes it."""

    value: ext.Operand[RegType]
    target: ext.Operand[Any]
    offsets: Sequence[ext.Operand[I32[32]]]
    boundary: ir.ArrayAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        target, tile = _memory(op.target.type), Reg.of(op.value.type)
        _same_element(target.element, tile.element, "element of the tile")
        _check_access(op, target, tile.shape, op.boundary)


class ViewOp(Lowbit.Operation, name="view", traits=[ext.Pure]):
    """The same registers read as another tile: the bits of every thread stay where they are.

    To a low-bit format, the words of a lane are read in the order of `dialect.packing`; otherwise slots stay in order.
    """

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(a.layout.threads == b.layout.threads, "threads", a.layout.threads, b.layout.threads)
        expect(a.bits_per_thread == b.bits_per_thread, "bits per thread", a.bits_per_thread, b.bits_per_thread)
        if isinstance(b.element, DType):
            _fragment(b, MMA_M16N8K16_A, "result")


class DecodeOp(Lowbit.Operation, name="decode", traits=[ext.Pure]):
    """decode(code) * 2^-exponent of every code, exactly (tables: rounded to the element of the result)."""

    source: ext.Operand[RegType]
    exponent: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(isinstance(a.element, DType), "source", "codes of a low-bit format", a.element)
        expect(b.element in ("f16", "bf16", "f32"), "result", "f16, bf16 or f32", b.element)
        expect(a.layout == b.layout, "layout", a.layout, b.layout)


class SliceOp(Lowbit.Operation, name="slice", traits=[ext.Pure]):
    """Elements start .. start+size of one dim, which every thread cuts from its own slots."""

    source: ext.Operand[RegType]
    dim: ir.IntegerAttr
    start: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        dim, start = int(ir.IntegerAttr(op.dim).value), int(ir.IntegerAttr(op.start).value)
        _same_element(a.element, b.element, "element")
        expect(0 <= dim < len(a.shape), "dim", f"0..{len(a.shape) - 1}", dim)
        layout, _ = a.layout.restrict(dim, start, b.shape[dim])
        expect(b.layout == layout, "layout", layout, b.layout)


class ReshapeOp(Lowbit.Operation, name="reshape", traits=[ext.Pure]):
    """The tile's elements, in row-major order, as another shape; nothing moves."""

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        _same_element(a.element, b.element, "element")
        layout = a.layout.reshape(b.shape)
        expect(b.layout == layout, "layout", layout, b.layout)


class CastOp(Lowbit.Operation, name="cast", traits=[ext.Pure]):
    """Every element converted, to nearest even; from "e4m3", "e8m0" scales and unsigned zeros stored as i8 as well."""

    source: ext.Operand[RegType]
    kind: ir.StringAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        kind = ir.StringAttr(op.kind).value
        allowed = ("float", "e4m3", "e8m0", "unsigned")
        expect(kind in allowed, "kind", f"one of {', '.join(allowed)}", kind)
        expect(a.layout == b.layout, "layout", a.layout, b.layout)


def _check_elementwise(op: Any) -> None:
    """Operands have the result's shape, or dims of size 1 that are spread over it without moving data."""
    result = Reg.of(op.result.type)
    for value in op.operands:
        tile = Reg.of(value.type)
        _same_element(result.element, tile.element, "element")
        tile.layout.slots_for(result.layout)  # raises LayoutError


class AddOp(Lowbit.Operation, name="add", traits=[ext.Pure]):
    """a + b, with dims of size 1 broadcast."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class MulOp(Lowbit.Operation, name="mul", traits=[ext.Pure]):
    """a * b, with dims of size 1 broadcast."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class FmaOp(Lowbit.Operation, name="fma", traits=[ext.Pure]):
    """a * b + c rounded once, with dims of size 1 broadcast."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    c: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class MmaOp(Lowbit.Operation, name="mma", traits=[ext.Pure]):
    """c + a b^T on tensor cores: a [.., m, k], b [.., n, k], c [.., m, n] in f32; leading dims are a batch.

    a and b of f16 or bf16 make mma.m16n8k16; a of f32 (with b of f16 or bf16) makes two mma.m16n8k8.tf32 of the same
    fragments, whose k columns are merely paired otherwise.
    """

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    c: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b, c, d = (Reg.of(v.type) for v in (op.a, op.b, op.c, op.result))
        expect(c == d, "result", c, d)
        expect(c.element == "f32", "element of c", "f32", c.element)
        allowed = (b.element,) if b.element != "f16" else ("f16", "f32")
        expect(a.element in allowed, "element of a", " or ".join(map(str, allowed)), a.element)
        *batch, m, k = a.shape
        expect(list(b.shape) == [*batch, b.shape[-2], k], "b", f"{[*batch, 'n', k]}", list(b.shape))
        expect(list(c.shape) == [*batch, m, b.shape[-2]], "c", f"{[*batch, m, b.shape[-2]]}", list(c.shape))
        for tile, fragment, what in ((a, MMA_M16N8K16_A, "a"), (b, MMA_M16N8K16_B_NK, "b"), (c, MMA_M16N8_D, "c")):
            _fragment(tile, fragment, what)


def _fragment(tile: Reg, fragment: Any, what: str) -> None:
    """The last two dims must be made of the instruction's own fragment."""
    wide = fragment.reshape((*(1,) * (tile.layout.rank - 2), *fragment.shape))
    try:
        _ = tile.layout / wide
    except LayoutError:
        raise Mismatch(f"layout of {what}: expected a multiple of {fragment}, got {tile.layout}") from None


class ReduceOp(Lowbit.Operation, name="reduce", traits=[ext.Pure]):
    """The sum over one dim, which must lie within each thread; it stays with size 1."""

    source: ext.Operand[RegType]
    dim: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        dim = int(ir.IntegerAttr(op.dim).value)
        inside = all(d.dim != dim for d in a.layout.thread_digits())
        expect(inside, f"dim {dim}", "within each thread", f"spread over threads by {a.layout}")
        expect(b.layout == a.layout.reduce((dim,)), "layout", a.layout.reduce((dim,)), b.layout)


class RowSumsOp(Lowbit.Operation, name="row_sums", traits=[ext.Pure]):
    """Sums along k of b [.., n, k], as [.., 1, n] in f32, laid out as a row of mma's accumulator.

    Made with tensor cores (a matrix of ones times b), so that the sums land where an accumulator needs them.
    """

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        b, d = Reg.of(op.source.type), Reg.of(op.result.type)
        _fragment(b, MMA_M16N8K16_B_NK, "source")
        *batch, n, _ = b.shape
        expect(list(d.shape) == [*batch, 1, n], "result", [*batch, 1, n], list(d.shape))
        expect(d.element == "f32", "element of the result", "f32", d.element)


# -- registers


class DecodePairOp(Lowbit.Operation, name="decode_pair", traits=[ext.Pure]):
    """Two codes of one thread as numbers, times 2^-exponent: operand i holds the fields of plane i, in bits shifts[i] ..
    and 16 + shifts[i] .. of a word. The result is a vector of two f16, bf16 or f32."""

    words: Sequence[ext.Operand[I32[32]]]
    format: FormatAttr
    shifts: ir.ArrayAttr
    exponent: ir.IntegerAttr
    result: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        bits = plane_bits(read_format(op.format).bits)
        shifts = read_ints(op.shifts)
        expect(len(op.words) == len(bits), "words", f"one per plane ({len(bits)})", len(op.words))
        expect(len(shifts) == len(bits), "shifts", f"one per plane ({len(bits)})", len(shifts))
        for shift, width in zip(shifts, bits):
            expect(0 <= shift <= 16 - width, "shift", f"0..{16 - width} for a field of {width} bits", shift)


def register(context: ir.Context) -> None:
    """Make the dialect known in a context. Call it once per context."""
    with context, ir.Location.unknown():
        if not context.is_dialect_loaded(Lowbit.DIALECT_NAMESPACE):
            Lowbit.load()
