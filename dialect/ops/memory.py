"""Shared memory, copies into it, and what orders them."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Iterator, Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import activation, expect, in_range, real, same_element, text, verifier
from lowbit.dialect.layouts.shared_memory import BANKS
from lowbit.dialect.ops.common import BOUNDARIES, I1, I32, check_access, check_table, one
from lowbit.dialect.optional import Flag, Optional
from lowbit.dialect.types import (
    FormatAttr,
    Global,
    GlobalType,
    Lowbit,
    Shared,
    SharedType,
    read_format,
    read_ints,
    read_layout,
    read_strings,
)


class AllocSharedOp(Lowbit.Operation, name="alloc_shared"):
    """A buffer in shared memory, alive until its `free_shared` or the end of the program."""

    result: ext.Result[SharedType]

    @verifier
    def verify_invariants(op: Any) -> None:
        Shared.of(op.result.type)


class FreeSharedOp(Lowbit.Operation, name="free_shared"):
    """Ends the life of a buffer: what is allocated later may take its place. A barrier must come before.

    It is in the block of the buffer, and nothing there uses the buffer, or a stage of it, afterwards."""

    buffer: ext.Operand[SharedType]

    @verifier
    def verify_invariants(op: Any) -> None:
        expect(_block_of(op.buffer) == op.operation.block, "place", "the block that the buffer is in", "another")
        late = [use.name for use in _uses_in(op.operation.block, op.buffer) if op.operation.is_before_in_block(use)]
        expect(not late, "buffer", "nothing that uses it afterwards", ", ".join(late))


def _block_of(value: Any) -> Any:
    owner = value.owner
    return owner if isinstance(owner, ir.Block) else owner.operation.block


def _uses_in(block: Any, buffer: Any) -> Iterator[Any]:
    """Yields the operations of a block that use a buffer, or a part of it, or have an operation inside that does."""
    for use in buffer.uses:
        operation = use.owner.operation
        if operation.name in ("lowbit.stage", "lowbit.peer"):
            yield from _uses_in(block, operation.results[0])
        while operation.parent and operation.block != block:
            operation = operation.parent.operation
        if operation.parent:  # else the use is in another block, and is the root, which has no block to ask for
            yield operation


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
        check_access(op, source, target.shape, BOUNDARIES, limited=bool(limit))
        expect(len(limit) in (0, len(source.shape) + 1), "limit", "a factor per dim and the end", list(limit))


class CopyRowsOp(Lowbit.Operation, name="copy_rows"):
    """Starts to copy rows of a source that a list names: `copy_async`, but along dim `dim`, offset + index is a place
    in `rows`, which says what row of the source is copied. Beyond the end of `rows`, zeros are copied ("zero"), or
    nothing ("skip"). The layout may have fewer elements along a dim than the target, whose last ones keep what they
    have.

    `rows` is a view of i32 of rank 1 whose memory has one element at least; all that it names must be rows of the
    source.
    """

    source: ext.Operand[GlobalType]
    rows: ext.Operand[GlobalType]
    target: ext.Operand[SharedType]
    offsets: Sequence[ext.Operand[I32]]
    dim: ir.IntegerAttr
    layout: ir.StringAttr
    boundary: ir.ArrayAttr
    limit: ir.ArrayAttr = ext.attribute(default_factory=lambda: ir.ArrayAttr.get([]))

    @verifier
    def verify_invariants(op: Any) -> None:
        source, target, rows = Global.of(op.source.type), Shared.of(op.target.type), Global.of(op.rows.type)
        limit, dim = read_ints(op.limit), in_range(op.dim, "dim", 0, len(source.shape) - 1)
        _check_copy(op, source, target, part=True)
        same_element("i32", rows.element, "element of the rows")
        expect(len(rows.shape) == 1, "rows", "rank 1", list(rows.shape))
        check_access(op, source, read_layout(op.layout).shape, BOUNDARIES, limited=bool(limit))
        word = read_strings(op.boundary)[dim]
        expect(word in ("zero", "skip"), f"boundary of dim {dim}, whose rows a list names", "zero or skip", word)
        expect(source.divisors[dim] == 1, f"divisor of dim {dim}, whose rows a list names", 1, source.divisors[dim])
        expect(len(limit) in (0, len(source.shape) + 1), "limit", "a factor per dim and the end", list(limit))
        expect(not limit or limit[dim] == 0, f"limit of dim {dim}, whose rows a list names", 0, limit and limit[dim])


class PrefetchOp(Lowbit.Operation, name="prefetch"):
    """Asks for source[offsets + index], of the elements of a tile laid out as `layout`, to be brought into the L2
    cache, and goes on. A load that comes later need not wait for device memory."""

    source: ext.Operand[GlobalType]
    offsets: Sequence[ext.Operand[I32]]
    layout: ir.StringAttr
    boundary: ir.ArrayAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        check_access(op, Global.of(op.source.type), read_layout(op.layout).shape, ("none", "clamp"))


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
        activation(source.element, "element")
        expect(len(source.shape) == 2, "source", "rank 2 [rows, columns]", len(source.shape))
        expect(len(target.shape) == 3, "target", "rank 3 [steps, rows, columns]", len(target.shape))
        expect(len(op.offsets) == 2, "offsets", "two: row, step", len(op.offsets))
        in_range(op.group, "group", 1, in_range(op.padded, "padded", 1))


def _check_copy(op: Any, source: Global, target: Shared, part: bool = False) -> None:
    """part: whether the layout may be of the first part of the target."""
    shape, whole = read_layout(op.layout).shape, target.shape
    same_element(source.element, target.element, "element of the target")
    fits = shape == whole or (part and len(shape) == len(whole) and all(n <= most for n, most in zip(shape, whole)))
    expect(fits, "shape of the layout", f"the target's, {whole}" + ", or less of it" * part, shape)


class FillTableOp(Lowbit.Operation, name="fill_table"):
    """Fills a buffer with the table of `dialect.formats.decode_table` that decodes `format` to `element`, times
    2^-exponent. A buffer of one column has each of its entries once.

    All threads of the block take part, and see the table afterwards. Among the copies of a `pipeline` it is
    done once, while the first of them are under way.
    """

    buffer: ext.Operand[SharedType]
    format: FormatAttr
    element: ir.StringAttr
    exponent: ir.IntegerAttr

    @verifier
    def verify_invariants(op: Any) -> None:
        element = text(op.element, "element")
        real(element, "table")
        in_range(op.exponent, "exponent", -1022, 1023)
        copies = 1 if Shared.of(op.buffer.type).shape[-1] == 1 else BANKS
        check_table(op.buffer, read_format(op.format), element, copies)


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
    each other's shared memory. That of a cluster also comes in two parts: "cluster_arrive" says that a thread is here,
    and "cluster_wait" that all are.

    With `async_proxy`, instructions that read shared memory by themselves (wgmma) see it too. With `relaxed`,
    "cluster_arrive" shows signals that have been allocated to other blocks, and orders nothing else: it does not wait
    for what is under way.
    """

    scope: ir.StringAttr
    warps: ir.IntegerAttr = ext.attribute(default_factory=one)
    async_proxy = Flag()
    relaxed = Flag()

    @verifier
    def verify_invariants(op: Any) -> None:
        scope = text(op.scope, "scope")
        allowed = ("warps", "block", "cluster", "cluster_arrive", "cluster_wait")
        expect(scope in allowed, "scope", f"one of {', '.join(allowed)}", repr(scope))
        expect(not op.relaxed or scope == "cluster_arrive", "scope of a relaxed barrier", "cluster_arrive", scope)
        in_range(op.warps, "warps", 1, 32)


class AllocSignalsOp(Lowbit.Operation, name="alloc_signals"):
    """mbarriers (PTX ISA 9.7.13.15), two words each: [groups, number, 2]. The block is divided into groups of warps
    side by side; all threads of a group arrive at each of its own. All of the block come here, and with `arrivals` all
    of the cluster: a phase takes so many arrivals then."""

    result: ext.Result[SharedType]
    arrivals = Optional(ir.IntegerAttr, "an integer")

    @verifier
    def verify_invariants(op: Any) -> None:
        signals = Shared.of(op.result.type)
        if op.arrivals is not None:
            in_range(op.arrivals, "arrivals", 1, (1 << 20) - 1)
        expect(signals.element == "i32", "element", "i32", signals.element)
        expect(len(signals.shape) == 3 and signals.shape[2] == 2, "signals", "[groups, number, 2]", list(signals.shape))


class ArriveOp(Lowbit.Operation, name="arrive"):
    """This thread has come to signals[its group, index]; with `copies`, when all that it has started
    to copy has arrived, which it does not wait for.

    expected   so many bytes of `copy_box` or `send` are to come before the phase can end
    each_warp  one thread of every warp comes for all of it
    blocks     it comes to the signal of each of so many blocks of the cluster
    """

    signals: ext.Operand[SharedType]
    index: ext.Operand[I32]
    copies = Flag()
    expected = Optional(ir.IntegerAttr, "an integer")
    each_warp = Flag()
    blocks = Optional(ir.IntegerAttr, "an integer")

    @verifier
    def verify_invariants(op: Any) -> None:
        if op.expected is not None:
            in_range(op.expected, "expected", 1, (1 << 20) - 1)
        if op.blocks is not None:
            in_range(op.blocks, "blocks", 1, 8)
        kinds = op.copies + (op.expected is not None) + (op.blocks is not None)
        alone = kinds <= 1 and not (op.copies and op.each_warp)
        expect(alone, "arrive", "one of copies, expected, and blocks, where copies is not of each_warp", "several")


class AwaitOp(Lowbit.Operation, name="await"):
    """Waits until all threads of the group have come to signals[group, index], in its phase of `parity`; before the
    first phase, that of parity 1 counts as over. With `async_proxy`, what they copied is visible
    then, to instructions that read shared memory by themselves (wgmma), too; without it, only what `copy_box` brought
    is."""

    signals: ext.Operand[SharedType]
    index: ext.Operand[I32]
    parity: ext.Operand[I32]
    async_proxy = Flag()


class LastArrivalOp(Lowbit.Operation, name="last_arrival"):
    """True in the last of `count` blocks, at least one, that come here with the same counter, which it leaves at zero.

    What the others wrote to device memory before is visible to it. Counters are i32, zero before the launch.
    """

    counters: ext.Operand[GlobalType]
    index: ext.Operand[I32]
    count: ext.Operand[I32]
    result: ext.Result[I1] = ext.infer_result()

    @verifier
    def verify_invariants(op: Any) -> None:
        check_counters(op)


class OthersArrivedOp(Lowbit.Operation, name="others_arrived"):
    """True if `count` blocks have come to `last_arrival` with a counter, which it then leaves at zero.

    What they wrote to device memory before is visible then. Where `count` is 0 it is true, and where it is less it is
    false, without a look at the counter.
    """

    counters: ext.Operand[GlobalType]
    index: ext.Operand[I32]
    count: ext.Operand[I32]
    result: ext.Result[I1] = ext.infer_result()

    @verifier
    def verify_invariants(op: Any) -> None:
        check_counters(op)


def check_counters(op: Any) -> None:
    """Counters are i32, side by side."""
    counters = Global.of(op.counters.type)
    expect(counters.element == "i32", "element of the counters", "i32", counters.element)
    expect(len(counters.shape) == 1, "counters", "rank 1", list(counters.shape))
