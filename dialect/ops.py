"""The operations of the `lowbit` dialect.

Tensor level: `matmul`, `dequantize`, `prepack`. Tile level: a `program` is what one block does with tiles in device
memory, shared memory and registers; scalars and loops are upstream's arith and scf. Register level: `decode_pair`,
`decode_shifted_pair` and `lookup_pair` turn the words of a thread into a pair of numbers, and are all that is left of a
format when tiles are gone.

Verifiers say what was expected and what came. Accesses carry a `boundary`, one word per dim of the tile:

    "none"   the index is always inside
    "clamp"  an index beyond the end reads the last element
    "zero"   an element beyond the end reads as zero
    "skip"   an element beyond the end is not touched
"""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dialect.bindings import ext, ir
from dialect.checks import (
    REALS,
    Mismatch,
    expect,
    fragments,
    in_range,
    real,
    same_element,
    same_warps,
    tensor,
    verifier,
    within_warp,
)
from dialect.decode_table import DecodeTable
from dialect.digits import BITS, DIGITS, HALVES, PIECE
from dialect.dtypes import DType
from dialect.errors import LowbitError
from dialect.layout import MMA_M16N8_D, MMA_M16N8_PAIRS, MMA_M16N8K16_A, MMA_M16N8K16_B_NK, Layout, spatial
from dialect.packing import BLOCK_K, ROWS, Packing, run_of
from dialect.types import (
    UNIT,
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
    read_layout,
    read_strings,
    row_major,
)

if TYPE_CHECKING:
    I1 = ir.IntegerType
    I32 = ir.IntegerType
else:
    I1, I32 = ir.IntegerType[1], ir.IntegerType[32]  # indices are i32

BOUNDARIES = ("none", "clamp", "zero", "skip")
CLUSTER = "lowbit.cluster"
MOST_BLOCKS = 8  # of a cluster, on any GPU that has them (CUDA C++ Programming Guide, "Thread Block Clusters")


def _one() -> ir.IntegerAttr:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 1)


def _memory(value: Any) -> Global | Shared:
    type_ = value.type
    expect(isinstance(type_, GlobalType | SharedType), "memory", "!lowbit.global or !lowbit.shared", type_)
    return Global.of(type_) if isinstance(type_, GlobalType) else Shared.of(type_)


def _check_access(
    op: Any, memory: Global | Shared, tile: tuple[int, ...], allowed: Sequence[str], limited: bool = False
) -> None:
    rank = len(memory.shape)
    if isinstance(memory, Shared) and memory.swizzle:
        allowed = [word for word in allowed if word != "clamp"]
    expect(len(tile) == rank, "rank of the tile", f"{rank} as the memory", len(tile))
    expect(len(op.offsets) == rank, "offsets", f"one per dim ({rank})", len(op.offsets))
    words = read_strings(op.boundary)
    expect(len(words) == rank, "boundary", f"one word per dim ({rank})", len(words))
    divisors = memory.divisors if isinstance(memory, Global) else (1,) * rank
    for dim, (word, most) in enumerate(zip(words, memory.shape)):
        expect(word in allowed, "boundary", f"one of {', '.join(allowed)}", word)
        if word == "none" and most > 0 and divisors[dim] == 1 and not limited:
            expect(tile[dim] <= most, f"size of dim {dim} with boundary none", f"at most {most}", tile[dim])


def _check_copy(op: Any, source: Global, target: Shared) -> None:
    layout = read_layout(op.layout)
    same_element(source.element, target.element, "element of the target")
    expect(layout.shape == target.shape, "shape of the layout", f"the target's, {target.shape}", layout.shape)


# -- tensors


class MatmulOp(Lowbit.Operation, name="matmul"):
    """y[t, n] = sum_k x[t, k] W[n, k] (+ bias[n]): x is tensor<?xk>, w a packed weight, y tensor<?xn>."""

    x: ext.Operand[Any]
    w: ext.Operand[PackedType]
    y: ext.Result[Any]
    bias: Sequence[ext.Operand[Any]]

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        tensor(op.x, "x", (None, w.k), ("f16", "bf16"))
        out = tensor(op.y, "y", (None, w.n), REALS)
        expect(len(op.bias) <= 1, "bias", "one at most", len(op.bias))
        for bias in op.bias:
            tensor(bias, "bias", (w.n,), (out,))


class DequantizeOp(Lowbit.Operation, name="dequantize"):
    """The weight W [n, k] in the activation's type: s * (decode(code) - z), rounded once."""

    w: ext.Operand[PackedType]
    y: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(op.w.type)
        tensor(op.y, "y", (w.n, w.k), ("f16", "bf16"))


class PrepackOp(Lowbit.Operation, name="prepack"):
    """The codes tensor<n x k x i8> of a weight in memory order, tensor<row blocks x chunks x units x 32 x 4 x i32>.

    `weight` is its !lowbit.packed type. Codes are given as numbers: signed ones in two's complement.
    """

    codes: ext.Operand[Any]
    weight: ir.TypeAttr
    packed: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        w = Packed.of(ir.TypeAttr(op.weight).value)
        tensor(op.codes, "codes", (w.n, w.k), ("i8",))
        tensor(op.packed, "packed", w.packing.codes_shape, ("i32",))


# -- programs


class ProgramOp(Lowbit.Operation, name="program", traits=[ir.IsIsolatedFromAboveTrait]):
    """One block's program. The region's arguments are the kernel's parameters, named by `params`.

    Two attributes may be added: `lowbit.cluster`, how many blocks along each axis of the grid run side by side and see
    each other's shared memory (PTX ISA 5.2.2), and `lowbit.max_blocks`, how many fit on a multiprocessor.
    """

    sym_name: ir.StringAttr
    threads: ir.IntegerAttr
    grid: ir.ArrayAttr
    params: ir.ArrayAttr
    workspace: ir.IntegerAttr
    body: ext.Region

    @verifier
    def verify_invariants(op: Any) -> None:
        threads = in_range(op.threads, "threads", 32, 1024)
        expect(threads % 32 == 0, "threads", "a multiple of 32", threads)
        grid = read_ints(op.grid)
        expect(len(grid) == 3 and min(grid) >= 1, "grid", "three sizes of at least 1", list(grid))
        in_range(op.workspace, "workspace", 0)
        if CLUSTER in op.operation.attributes:
            cluster = read_ints(op.operation.attributes[CLUSTER])
            whole = len(cluster) == 3 and min(cluster) >= 1 and not any(n % c for n, c in zip(grid, cluster))
            expect(whole, CLUSTER, f"three divisors of the grid's {list(grid)}", list(cluster))
            expect(math.prod(cluster) <= MOST_BLOCKS, CLUSTER, f"at most {MOST_BLOCKS} blocks", math.prod(cluster))
        expect(len(op.body.blocks) == 1, "body", "one block", len(op.body.blocks))
        names, arguments = read_strings(op.params), op.body.blocks[0].arguments
        expect(len(names) == len(arguments), "params", f"names of {len(arguments)} arguments", len(names))
        for name, argument in zip(names, arguments):
            expect(str(argument.type) in ("!llvm.ptr<1>", "i32"), name, "!llvm.ptr<1> or i32", argument.type)
        _check_threads(op, threads)


def _check_threads(program: Any, threads: int) -> None:
    """All tiles must be spread over the threads of the block, whose warps its barriers divide."""
    wrong: list[Mismatch] = []

    def visit(op: Any) -> Any:
        texts = [RegType(r.type).params[2] for r in op.results if isinstance(r.type, RegType)]
        texts += [op.attributes["layout"]] if "layout" in op.attributes else []
        try:
            for layout in map(read_layout, texts):
                what = f"layout {layout} in {op.name}"
                expect(layout.threads == threads, what, f"{threads} threads", layout.threads)
            if op.name == "lowbit.barrier" and "warps" in op.attributes:
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


# -- shared memory and copies


class AllocSharedOp(Lowbit.Operation, name="alloc_shared"):
    """A buffer in shared memory, alive until its `free_shared` or the end of the program."""

    result: ext.Result[SharedType]

    @verifier
    def verify_invariants(op: Any) -> None:
        Shared.of(op.result.type)


class FreeSharedOp(Lowbit.Operation, name="free_shared"):
    """Ends the life of a buffer: what is allocated later may take its place. A barrier must come before."""

    buffer: ext.Operand[SharedType]


class StageOp(Lowbit.Operation, name="stage", traits=[ext.Pure]):
    """buffer[index]: a stage of a pipelined buffer, which has one dim less."""

    buffer: ext.Operand[SharedType]
    index: ext.Operand[I32]
    result: ext.Result[SharedType]

    @verifier
    def verify_invariants(op: Any) -> None:
        whole, part = Shared.of(op.buffer.type), Shared.of(op.result.type)
        expect(len(whole.shape) > 1, "buffer", "rank 2 or more", list(whole.shape))
        expected = Shared(whole.element, whole.shape[1:], whole.strides[1:], whole.swizzle)
        expect(part == expected, "result", expected, part)


class PeerOp(Lowbit.Operation, name="peer", traits=[ext.Pure]):
    """The same buffer in the shared memory of block `rank` of the cluster (PTX mapa), for loads only.

    A barrier of the cluster must come between the writes and the loads, and another before any block ends.
    """

    buffer: ext.Operand[SharedType]
    rank: ext.Operand[I32]
    result: ext.Result[SharedType]

    @verifier
    def verify_invariants(op: Any) -> None:
        expect(op.result.type == op.buffer.type, "result", op.buffer.type, op.result.type)
        for use in op.result.uses:
            expect(use.owner.name == "lowbit.load", "use of the result", "lowbit.load", use.owner.name)


class CopyAsyncOp(Lowbit.Operation, name="copy_async"):
    """Starts to copy source[offsets + index] to target[index] for the elements of a tile laid out as `layout`.

    `limit` = [c0, c1, ..., end] reads zero where sum(c_i * (offsets + index)_i) >= end: the end of a dim that
    the view cuts in two. An empty list means no such limit.
    """

    source: ext.Operand[GlobalType]
    target: ext.Operand[SharedType]
    offsets: Sequence[ext.Operand[I32]]
    layout: ir.StringAttr
    boundary: ir.ArrayAttr
    limit: ir.ArrayAttr = ext.attribute(default_factory=lambda: ir.ArrayAttr.get([]))

    @verifier
    def verify_invariants(op: Any) -> None:
        source, target = Global.of(op.source.type), Shared.of(op.target.type)
        limit = read_ints(op.limit)
        _check_copy(op, source, target)
        _check_access(op, source, target.shape, BOUNDARIES, limited=bool(limit))
        expect(len(limit) in (0, len(source.shape) + 1), "limit", "a factor per dim and the end", list(limit))


class CopyPaddedOp(Lowbit.Operation, name="copy_padded"):
    """Copies rows of activations into shared memory element by element, spreading groups over padded groups.

    Column c of the target tile is column (c // padded) * group + c % padded of the source, and zero where
    c % padded >= group or where the source ends. source is [rows, k], offsets are (row, step), and rows beyond
    the end are skipped. A plain, synchronous copy: for shapes that no 16-byte copy fits.
    """

    source: ext.Operand[GlobalType]
    target: ext.Operand[SharedType]
    offsets: Sequence[ext.Operand[I32]]
    layout: ir.StringAttr
    group: ir.IntegerAttr
    padded: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        source, target = Global.of(op.source.type), Shared.of(op.target.type)
        _check_copy(op, source, target)
        expect(source.element in ("f16", "bf16"), "element", "f16 or bf16", source.element)
        expect(len(source.shape) == 2, "source", "rank 2 [rows, columns]", len(source.shape))
        expect(len(target.shape) == 3, "target", "rank 3 [steps, rows, columns]", len(target.shape))
        expect(len(op.offsets) == 2, "offsets", "two: row, step", len(op.offsets))
        in_range(op.group, "group", 1, in_range(op.padded, "padded", 1))


class FillTableOp(Lowbit.Operation, name="fill_table"):
    """Fills a buffer with the table of `dialect.decode_table` that decodes `format` to `element`, times 2^-exponent.

    All threads of the block take part, and see the table afterwards. In a loop that `pipeline-copies` rewrites it is
    done once, while the first copies are under way.
    """

    buffer: ext.Operand[SharedType]
    format: FormatAttr
    element: ir.StringAttr
    exponent: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        element = ir.StringAttr(op.element).value
        real(element, "table")
        in_range(op.exponent, "exponent", -1022, 1023)
        _check_table(op.buffer, read_format(op.format), element)


def _check_table(buffer: Any, format_: DType, element: str) -> None:
    """A buffer must be a table that decodes a format to an element."""
    expect(format_.kind == "table", "format", "one with a table of values", format_.name)
    shape = DecodeTable(format_, element).shape
    expected = Shared("i32", shape, row_major(shape))
    expect(Shared.of(buffer.type) == expected, f"table from {format_.name} to {element}", expected.type, buffer.type)


class CommitOp(Lowbit.Operation, name="commit"):
    """Makes a group of the copies started since the last one."""


class WaitOp(Lowbit.Operation, name="wait"):
    """Waits until at most `pending` groups are under way."""

    pending: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.pending, "pending", 0)


class BarrierOp(Lowbit.Operation, name="barrier"):
    """All threads of `warps` warps side by side ("warps"), of the "block" or of the "cluster" of blocks meet, and see
    each other's shared memory.

    With the unit attribute `async_proxy`, instructions that read shared memory by themselves (wgmma) see it too.
    """

    scope: ir.StringAttr
    warps: ir.IntegerAttr = ext.attribute(default_factory=_one)

    @verifier
    def verify_invariants(op: Any) -> None:
        scope = ir.StringAttr(op.scope).value
        allowed = ("warps", "block", "cluster")
        expect(scope in allowed, "scope", f"one of {', '.join(allowed)}", repr(scope))
        in_range(op.warps, "warps", 1, 32)


class LastArrivalOp(Lowbit.Operation, name="last_arrival"):
    """True in the last of `count` blocks that come here with the same counter, which it leaves at zero.

    What the others wrote to device memory before is visible to it. Counters are i32, zero before the launch.
    """

    counters: ext.Operand[GlobalType]
    index: ext.Operand[I32]
    count: ir.IntegerAttr
    result: ext.Result[I1] = ext.infer_result()

    @verifier
    def verify_invariants(op: Any) -> None:
        counters = Global.of(op.counters.type)
        expect(counters.element == "i32", "element of the counters", "i32", counters.element)
        expect(len(counters.shape) == 1, "counters", "rank 1", list(counters.shape))
        in_range(op.count, "count", 1)


# -- tiles in registers


class ConstantOp(Lowbit.Operation, name="constant", traits=[ext.Pure]):
    """A tile of one value."""

    value: ir.FloatAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        real(Reg.of(op.result.type).element, "result")


class LoadOp(Lowbit.Operation, name="load"):
    """source[offsets + index] from device or shared memory."""

    source: ext.Operand[Any]
    offsets: Sequence[ext.Operand[I32]]
    boundary: ir.ArrayAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        source, tile = _memory(op.source), Reg.of(op.result.type)
        same_element(source.element, tile.element, "element of the tile")
        _check_access(op, source, tile.shape, ("none", "clamp", "zero"))


class LoadMatrixOp(Lowbit.Operation, name="load_matrix"):
    """The B fragments (rows of n, columns of k) of a tile [.., n, k] of 16-bit elements, by ldmatrix.

    Rows from `rows` on are read as row rows-1: their columns of the product are never stored.
    """

    source: ext.Operand[SharedType]
    rows: ext.Operand[I32]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        source, tile = Shared.of(op.source.type), Reg.of(op.result.type)
        same_element(source.element, tile.element, "element of the tile")
        expect(element_bits(tile.element) == 16, "element", "of 16 bits", tile.element)
        expect(len(source.shape) >= 2, "rank of the buffer", "at least 2", len(source.shape))
        *batch, rows, columns = source.shape
        expect([*tile.shape[:-2], tile.shape[-1]] == [*batch, columns], "shape of the tile", source.shape, tile.shape)
        expect(tile.shape[-2] >= rows, "rows of the tile", f"at least the {rows} of the buffer", tile.shape[-2])
        expect(source.swizzle == 0, "swizzle", "none", source.swizzle)
        *outer, last = source.strides
        aligned = last == 1 and all(stride % 8 == 0 for stride in outer)
        expect(aligned, "strides", "multiples of 8 (16 bytes) and 1 for the last dim", list(source.strides))
        blocks = fragments(tile.layout, MMA_M16N8K16_B_NK, "result")
        within_warp(blocks, tile.layout.rank - 2, "rows of the result")


class StoreOp(Lowbit.Operation, name="store"):
    """target[offsets + index] = value; of several threads that hold an element, the first writes it."""

    value: ext.Operand[RegType]
    target: ext.Operand[Any]
    offsets: Sequence[ext.Operand[I32]]
    boundary: ir.ArrayAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        target, tile = _memory(op.target), Reg.of(op.value.type)
        same_element(target.element, tile.element, "element of the tile")
        _check_access(op, target, tile.shape, ("none", "skip"))


class ViewOp(Lowbit.Operation, name="view", traits=[ext.Pure]):
    """The same registers read as another tile: the bits of every thread stay where they are.

    To a low-bit format, units of packed codes are read in the order of `dialect.packing`: per warp row blocks, then
    chunks. Otherwise slots stay in order.
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


class DecodeOp(Lowbit.Operation, name="decode", traits=[ext.Pure]):
    """decode(code) * 2^-exponent of every code, exactly (tables: rounded to the element of the result).

    Integers can have one of two extras. With the unit attribute `biased`, numbers are too large by a bias that
    `bias_sums` makes up for. `shifts` are added to the codes: tiles [.., rows, 1], each for an equal part of the
    columns, in order. A shift must be minus the value of a code, as minus a zero point is. The sum is exact then, and
    costs nothing where the subtraction that decodes an integer can do it, too.
    """

    source: ext.Operand[RegType]
    shifts: Sequence[ext.Operand[RegType]]
    exponent: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(isinstance(a.element, DType), "source", "codes of a low-bit format", a.element)
        in_range(op.exponent, "exponent", -1022, 1023)
        real(b.element, "result")
        expect(a.layout == b.layout, "layout", a.layout, b.layout)
        if not op.shifts:
            return
        _check_shifted(a.element)
        expect("biased" not in op.operation.attributes, "decoding with shifts", "plain", "biased")
        fragments_ = fragments(b.layout, MMA_M16N8K16_A, "result")
        within_warp(fragments_, fragments_.rank - 1, "columns with shifts")
        parts, blocks = len(op.shifts), fragments_.shape[-1]
        expect(blocks % parts == 0, "shifts", f"a number that divides the {blocks} blocks of 16 columns", parts)
        rows = b.layout.reduce((b.layout.rank - 1,))
        for shift in op.shifts:
            reg = Reg.of(shift.type)
            same_element(b.element, reg.element, "element of the shifts")
            expect(reg.layout == rows, "layout of the shifts", rows, reg.layout)


def _check_shifted(format_: Any) -> None:
    """Shifts are added where the offset of an integer is subtracted."""
    expect(format_.kind in ("uint", "int"), "format with shifts", "an integer one", format_.name)


class LookupOp(Lowbit.Operation, name="lookup", traits=[ext.Pure]):
    """What the table that `fill_table` made says of every code: decode(code) * 2^-exponent, rounded to the element.

    The table must not be freed before the numbers have been used.
    """

    source: ext.Operand[RegType]
    table: ext.Operand[SharedType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        if not isinstance(a.element, DType):
            raise Mismatch(f"source: expected codes of a low-bit format, got {a.element}")
        real(b.element, "result")
        expect(a.layout == b.layout, "layout", a.layout, b.layout)
        _check_table(op.table, a.element, str(b.element))


class EncodeOp(Lowbit.Operation, name="encode", traits=[ext.Pure]):
    """Codes, given as i8 numbers, packed into the words of a lane: what `view` then shows as units."""

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(a.element == "i8", "element of the source", "i8", a.element)
        expect(isinstance(b.element, DType), "result", "codes of a low-bit format", b.element)
        expect(a.layout == b.layout, "layout", a.layout, b.layout)
        fragments(b.layout, MMA_M16N8K16_A, "result")


class SliceOp(Lowbit.Operation, name="slice", traits=[ext.Pure]):
    """Elements start .. start+size of one dim, which every thread cuts from its own slots."""

    source: ext.Operand[RegType]
    dim: ir.IntegerAttr
    start: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        real(a.element, "source")
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


class CastOp(Lowbit.Operation, name="cast", traits=[ext.Pure]):
    """Every element converted to another type.

    "float": f16 or bf16 to f32, exactly, or f32 to them, to nearest even. From bytes (i8) to f32: "e4m3" and
    "e8m0" scales, and "unsigned" zeros.
    """

    source: ext.Operand[RegType]
    kind: ir.StringAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        kind = ir.StringAttr(op.kind).value
        allowed = ("float", "e4m3", "e8m0", "unsigned")
        expect(kind in allowed, "kind", f"one of {', '.join(allowed)}", kind)
        if kind == "float":
            real(a.element, "source")
            real(b.element, "result")
            got = f"{a.element} to {b.element}"
            expect((a.element == "f32") != (b.element == "f32"), "cast", "from or to f32", got)
        else:
            expect((a.element, b.element) == ("i8", "f32"), kind, "i8 to f32", f"{a.element} to {b.element}")
        expect(a.layout == b.layout, "layout", a.layout, b.layout)


def _check_elementwise(op: Any) -> None:
    """Operands have the result's shape, or dims of size 1 that are spread over it without moving data."""
    result = Reg.of(op.result.type)
    real(result.element, "result")
    for value in op.operands:
        tile = Reg.of(value.type)
        same_element(result.element, tile.element, "element")
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

    a and b of f16 or bf16 make mma.m16n8k16; a of f32 (with b of f16 or bf16) makes two mma.m16n8k8.tf32 of the
    same fragments, whose k columns are merely paired otherwise.
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
        expect(b.element in ("f16", "bf16"), "element of b", "f16 or bf16", b.element)
        expect(a.element in (b.element, "f32"), "element of a", f"{b.element} or f32", a.element)
        rank = len(a.shape)
        expect(rank >= 2 and len(b.shape) == rank, "ranks", "equal and at least 2", (rank, len(b.shape)))
        *batch, m, k = a.shape
        n = b.shape[-2]
        expect(list(b.shape) == [*batch, n, k], "b", [*batch, n, k], list(b.shape))
        expect(list(c.shape) == [*batch, m, n], "c", [*batch, m, n], list(c.shape))
        a_blocks = fragments(a.layout, MMA_M16N8K16_A, "a")
        b_blocks = fragments(b.layout, MMA_M16N8K16_B_NK, "b")
        c_blocks = fragments(c.layout, MMA_M16N8_D, "c")
        within_warp(a_blocks, rank - 1, "k of a")
        within_warp(b_blocks, rank - 1, "k of b")
        columns = b_blocks.reduce((-1,)).permute((*range(rank - 2), rank - 1, rank - 2))
        same_warps(a_blocks.reduce((-1,)), c_blocks.reduce((-1,)), "a")
        same_warps(columns, c_blocks.reduce((-2,)), "b")


def _check_warpgroup(op: Any, layout: Layout, columns: int) -> None:
    """b is [.., k / 64, n, 64] in shared memory, swizzled, of which columns start .. start + columns are used.

    All four warps of a warpgroup have the same index, and one only, along the leading dims.
    """
    b = Shared.of(op.b.type)
    expect(b.element in ("f16", "bf16"), "element of b", "f16 or bf16", b.element)
    expect(b.swizzle == 128, "swizzle of b", 128, b.swizzle)
    expect(len(b.shape) == layout.rank + 1, "rank of b", layout.rank + 1, len(b.shape))
    *batch, panels, n, width = b.shape
    expect(width == 64, "b", "rows of 64 columns: [.., k / 64, n, 64]", list(b.shape))
    expect(n % 8 == 0 and n <= 256, "n", "a multiple of 8 up to 256", n)
    expect([*layout.shape[:-2], layout.shape[-1]] == [*batch, n], "result", f"{[*batch, 'm', n]}", list(layout.shape))
    start = in_range(op.start, "start", 0, 64 * panels - columns)
    expect(start % 16 == 0 and columns % 16 == 0, "start and columns", "multiples of 16", (start, columns))
    inside = [digit for digit in layout.thread_digits() if digit.divisor < 128] + list(layout.local_digits())
    for digit in inside:
        expect(digit.dim >= layout.rank - 2, f"dim {digit.dim} of the result", "the same in all of a warpgroup", layout)


class WarpgroupMmaOp(Lowbit.Operation, name="warpgroup_mma"):
    """c + a b^T by wgmma: a [.., m, k] in registers as for `mma`, b columns start .. start + k of shared memory.

    Its four warps bring 16 rows each of a 64-row instruction and share b [.., k / 64, n, 64] (PTX ISA 9.7.15).
    """

    a: ext.Operand[RegType]
    b: ext.Operand[SharedType]
    c: ext.Operand[RegType]
    start: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b, c, d = Reg.of(op.a.type), Shared.of(op.b.type), Reg.of(op.c.type), Reg.of(op.result.type)
        expect(c == d, "result", c, d)
        expect(c.element == "f32", "element of c", "f32", c.element)
        same_element(b.element, a.element, "element of a")
        _check_warpgroup(op, c.layout, a.shape[-1])
        expect(list(a.shape[:-1]) == list(c.shape[:-1]), "a", [*c.shape[:-1], "k"], list(a.shape))
        a_blocks, c_blocks = fragments(a.layout, MMA_M16N8K16_A, "a"), fragments(c.layout, MMA_M16N8_D, "c")
        within_warp(a_blocks, len(a.shape) - 1, "k of a")
        within_warp(c_blocks, len(a.shape) - 1, "columns of c")
        same_warps(a_blocks.reduce((-1,)), c_blocks.reduce((-1,)), "a")


class WarpgroupRowSumsOp(Lowbit.Operation, name="warpgroup_row_sums"):
    """Sums of b over columns start .. start + columns, as `row_sums` makes them of registers: ones times b^T."""

    b: ext.Operand[SharedType]
    start: ir.IntegerAttr
    columns: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        d = Reg.of(op.result.type)
        expect(d.element == "f32", "element of the result", "f32", d.element)
        _check_warpgroup(op, d.layout, in_range(op.columns, "columns", 16))


class ReduceOp(Lowbit.Operation, name="reduce", traits=[ext.Pure]):
    """The sum over one dim, which must lie within each thread; it stays with size 1."""

    source: ext.Operand[RegType]
    dim: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        real(a.element, "source")
        same_element(a.element, b.element, "element")
        dim = in_range(op.dim, "dim", 0, len(a.shape) - 1)
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
        expect(b.element in ("f16", "bf16"), "element of the source", "f16 or bf16", b.element)
        expect(d.element == "f32", "element of the result", "f32", d.element)
        blocks = fragments(b.layout, MMA_M16N8K16_B_NK, "source")
        *batch, n, _ = b.shape
        expect(list(d.shape) == [*batch, 1, n], "result", [*batch, 1, n], list(d.shape))
        rank = len(b.shape)
        within_warp(blocks, rank - 1, "k of the source")
        columns = blocks.reduce((-1,)).permute((*range(rank - 2), rank - 1, rank - 2))
        sums = MMA_M16N8_D.reduce((0,)).reshape((*(1,) * (rank - 1), 8))
        expect(d.layout == columns * sums, "layout of the result", columns * sums, d.layout)


class BiasSumsOp(Lowbit.Operation, name="bias_sums", traits=[ext.Pure]):
    """-sum_k bias(row, k) b[.., n, k], an accumulator [.., m, n] for mma to start from when a is decoded `biased`.

    The biases of a 16 x 16 block of `format` depend on its place in a chunk (`dialect.packing`) and repeat down the
    rows; `start` is the column of the packed weight, modulo the chunk, that column 0 of b meets.
    """

    source: ext.Operand[RegType]
    format: FormatAttr
    start: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        b, d = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(b.element in ("f16", "bf16"), "element of the source", "f16 or bf16", b.element)
        expect(d.element == "f32", "element of the result", "f32", d.element)
        fragments(b.layout, MMA_M16N8K16_B_NK, "source")
        fragments(d.layout, MMA_M16N8_D, "result")
        *batch, n, _ = b.shape
        expect([*d.shape[:-2], d.shape[-1]] == [*batch, n], "result", f"{[*batch, 'm', n]}", list(d.shape))
        start = int(ir.IntegerAttr(op.start).value)
        expect(start >= 0 and start % 16 == 0, "start", "a multiple of 16", start)


# -- one token in integers (`dialect.digits`)


def _check_digits(digits: Shared, unit: Reg) -> tuple[int, int]:
    """Warps and pieces of digits [warps, pieces, 4, 4, 8] and their units [warps, 1, pieces]."""
    expect(digits.element == "i32", "element of the digits", "i32", digits.element)
    rank = len(digits.shape)
    lanes = (DIGITS, 4, HALVES)
    expect(rank == 5 and digits.shape[2:] == lanes, "digits", f"[warps, pieces, {DIGITS}, 4, {HALVES}]", digits.shape)
    aligned = digits.strides[-1] == 1 and all(stride % 4 == 0 for stride in digits.strides[:-1])
    expect(aligned, "strides of the digits", "multiples of 4 (16 bytes) and 1 for the last dim", list(digits.strides))
    warps, pieces = digits.shape[:2]
    layout = spatial(warps, 1, 1).local(1, 1, pieces).replicated(32)
    expect(unit == Reg("f32", layout), "unit", f"f32 laid out as {layout}", f"{unit.element} as {unit.layout}")
    return warps, pieces


def _check_digit_format(format_: Any) -> DType:
    fits = isinstance(format_, DType) and format_.kind in ("uint", "int") and format_.bits in BITS
    expect(fits, "codes", f"integers of {', '.join(map(str, BITS))} bits", format_)
    return format_


def _check_pieces(op: Any, columns: int) -> None:
    start = in_range(op.start, "start", 0, columns - PIECE)
    size = in_range(op.columns, "columns", PIECE, columns - start)
    expect(start % PIECE == 0 and size % PIECE == 0, "start and columns", f"multiples of {PIECE}", (start, size))


class SplitDigitsOp(Lowbit.Operation, name="split_digits"):
    """Writes x [warps, 1, k] as digits for codes of `format`, every warp its own row, and gives the unit of every
    piece.

    A piece with an infinity or a NaN has NaN for a unit, and so has all that is made of it.
    """

    x: ext.Operand[SharedType]
    digits: ext.Operand[SharedType]
    format: FormatAttr
    unit: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        x, digits = Shared.of(op.x.type), Shared.of(op.digits.type)
        _check_digit_format(read_format(op.format))
        warps, pieces = _check_digits(digits, Reg.of(op.unit.type))
        expect(x.element in ("f16", "bf16"), "element of x", "f16 or bf16", x.element)
        expect(x.shape == (warps, 1, PIECE * pieces), "x", (warps, 1, PIECE * pieces), x.shape)
        plain = x.swizzle == 0 and x.strides[-1] == 1 and x.strides[0] % 2 == 0
        expect(plain, "x", "rows in one piece that start at even columns", list(x.strides))


class DigitMmaOp(Lowbit.Operation, name="digit_mma"):
    """Columns start .. start + columns of codes [warps, m, k] times as many of x in digits: [warps, m, 2] in f32.

    Codes are as they lie in memory: signed ones are 2^(b-1) too large. Column 0 is what the two lower digits of x
    bring, column 1 what the upper two bring, 2^16 times too small; `join_digits` adds them up.
    """

    a: ext.Operand[RegType]
    digits: ext.Operand[SharedType]
    unit: ext.Operand[RegType]
    start: ir.IntegerAttr
    columns: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, d = Reg.of(op.a.type), Reg.of(op.result.type)
        _check_digit_format(a.element)
        warps, pieces = _check_digits(Shared.of(op.digits.type), Reg.of(op.unit.type))
        rank, k = len(a.shape), PIECE * pieces
        expect(rank == 3 and a.shape[::2] == (warps, k), "a", f"[{warps}, m, {k}]", list(a.shape))
        blocks = fragments(a.layout, MMA_M16N8K16_A, "a")
        row_blocks = a.shape[1] // ROWS
        one_warp = spatial(warps, 1, 1).local(1, row_blocks, k // BLOCK_K)
        expect(blocks == one_warp, "a", f"all rows and columns in one warp, {one_warp}", f"{blocks} (in fragments)")
        layout = spatial(warps, 1, 1).local(1, row_blocks, 1) * MMA_M16N8_PAIRS.unsqueeze(0)
        expect(d == Reg("f32", layout), "result", f"f32 laid out as {layout}", f"{d.element} as {d.layout}")
        _check_pieces(op, k)


class DigitSumsOp(Lowbit.Operation, name="digit_sums"):
    """Sums of x over columns start .. start + columns, as of a row of `digit_mma` with all codes 1: [warps, 1, 2]."""

    digits: ext.Operand[SharedType]
    unit: ext.Operand[RegType]
    format: FormatAttr
    start: ir.IntegerAttr
    columns: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        d = Reg.of(op.result.type)
        _check_digit_format(read_format(op.format))
        warps, pieces = _check_digits(Shared.of(op.digits.type), Reg.of(op.unit.type))
        layout = spatial(warps, 1, 1) * MMA_M16N8_PAIRS.reduce((0,)).unsqueeze(0)
        expect(d == Reg("f32", layout), "result", f"f32 laid out as {layout}", f"{d.element} as {d.layout}")
        _check_pieces(op, PIECE * pieces)


class JoinDigitsOp(Lowbit.Operation, name="join_digits", traits=[ext.Pure]):
    """Of a sum of `digit_mma` [warps, m, 2], column 0 and 2^16 times column 1: [warps, m, 1]."""

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, d = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(a.element == "f32", "element of the source", "f32", a.element)
        fragments(a.layout, MMA_M16N8_PAIRS, "source")
        expect(a.shape[-1] == 2, "columns of the source", 2, a.shape[-1])
        layout = a.layout.reduce((a.layout.rank - 1,))
        expect(d == Reg("f32", layout), "result", f"f32 laid out as {layout}", f"{d.element} as {d.layout}")


# -- registers


class DecodePairOp(Lowbit.Operation, name="decode_pair", traits=[ext.Pure]):
    """Two codes of one thread as numbers, times 2^-exponent.

    Operand i is the word with piece i of register `register` of a run (`dialect.packing`). The result is a vector of
    two f16, bf16 or f32. With the unit attribute `biased` it keeps the offset of `passes.recipes.bias`.
    """

    words: Sequence[ext.Operand[I32]]
    format: FormatAttr
    register: ir.IntegerAttr
    exponent: ir.IntegerAttr
    result: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.exponent, "exponent", -1022, 1023)
        _check_pair(op)


class DecodeShiftedPairOp(Lowbit.Operation, name="decode_shifted_pair", traits=[ext.Pure]):
    """Two integer codes of one thread, each plus its shift (see `decode`), times 2^-exponent.

    `shift` is a vector as the result; all else is as in `decode_pair`.
    """

    shift: ext.Operand[Any]
    words: Sequence[ext.Operand[I32]]
    format: FormatAttr
    register: ir.IntegerAttr
    exponent: ir.IntegerAttr
    result: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        in_range(op.exponent, "exponent", -1022, 1023)
        _check_pair(op)
        _check_shifted(read_format(op.format))
        expect(op.shift.type == op.result.type, "shift", op.result.type, op.shift.type)


class LookupPairOp(Lowbit.Operation, name="lookup_pair", traits=[ext.Pure]):
    """Two codes of one thread as numbers, from a table in shared memory (`fill_table`).

    `table` points to it, `column` is the place of this lane in an entry, in bytes; `words` and `register` are as in
    `decode_pair`.
    """

    table: ext.Operand[Any]
    column: ext.Operand[I32]
    words: Sequence[ext.Operand[I32]]
    format: FormatAttr
    register: ir.IntegerAttr
    result: ext.Result[Any]

    @verifier
    def verify_invariants(op: Any) -> None:
        expect(str(op.table.type) == "!llvm.ptr<3>", "table", "!llvm.ptr<3>", op.table.type)
        format_ = read_format(op.format)
        expect(format_.kind == "table", "format", "one with a table of values", format_.name)
        _check_pair(op)


def _check_pair(op: Any) -> None:
    """The words and the register of a pair of codes, and its numbers."""
    run = run_of(read_format(op.format).bits)
    pieces = run[in_range(op.register, "register", 0, len(run) - 1)]
    expect(len(op.words) == len(pieces), "words", f"one per piece ({len(pieces)})", len(op.words))
    allowed = [f"vector<2x{real}>" for real in REALS]
    expect(str(op.result.type) in allowed, "result", " or ".join(allowed), op.result.type)


def register(context: ir.Context) -> None:
    """Make the dialect known in a context. Call it once per context."""
    with context, ir.Location.unknown():
        if not context.is_dialect_loaded(Lowbit.DIALECT_NAMESPACE):
            Lowbit.load()
