"""wgmma, for `lower-tiles`: a's fragments from registers, b from shared memory, the accumulators in f32.

A warp's A fragment of m64nNk16 is that of mma.m16n8k16, and its accumulators are those of m16n8, side by side along N
(PTX ISA 9.7.15.5.1): so layouts, packed weights and all that is done with accumulators stay the same. What changes is that
b needs no fragments, and that an instruction has up to 256 columns.

All instructions of a row of fragments are one piece of inline assembly that also waits for them. Registers that wgmma is
still working on may not be touched, and no compiler in between knows; so none are alive outside. Other warpgroups fill
the time of the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dialect.bindings import arith, ir, llvm
from dialect.layout import MMA_M16N8_D, MMA_M16N8K16_A
from dialect.packing import BLOCK_K
from dialect.types import Reg
from passes import emit
from passes.addressing import Place, ThreadIndex
from passes.fragment import Fragment
from passes.lower_mma import fragment_blocks

# The upper word of a matrix descriptor: 1024 bytes from eight rows to the next, 128-byte swizzling (PTX ISA 9.7.15.5.1.2).
_UPPER = 1 << 30 | 1024 // 16


def warpgroup_mma(
    threads: ThreadIndex, a: Fragment, b: Place, start: int, c: Fragment | None, result: Reg
) -> Fragment:
    """c + a b^T (c None: zero), for columns start .. of b."""
    a_at = {place: i for i, place in enumerate(fragment_blocks(a.reg.layout, MMA_M16N8K16_A))}
    d_at = fragment_blocks(result.layout, MMA_M16N8_D)
    blocks = sorted({column for _, column in a_at})
    descriptor = _once(lambda: _descriptor(threads, b, result))
    rows: dict[int, list[Any]] = {}
    of_row = {row: sorted(i for i, place in enumerate(d_at) if place[0] == row) for row, _ in d_at}
    of_row = {row: sorted(found, key=lambda i: d_at[i][1]) for row, found in of_row.items()}

    def registers(row: int) -> list[Any]:
        if row not in rows:
            fragments = [[a.pair(4 * a_at[row, k] + r) for r in range(4)] for k in blocks]
            totals = None if c is None else [c.scalar(4 * i + j) for i in of_row[row] for j in range(4)]
            rows[row] = _wgmma(fragments, descriptor(), b, start, totals, str(a.reg.element))
        return rows[row]

    def make(i: int) -> Any:
        row, column = d_at[i // 4]
        return registers(row)[4 * column + i % 4]

    return Fragment(result, "scalar", make)


def warpgroup_row_sums(threads: ThreadIndex, b: Place, start: int, columns: int, result: Reg) -> Fragment:
    """A matrix of ones times b^T: all rows of the product are the sums, of which a lane keeps one."""
    element = ir.Type.parse(str(b.type.element))
    ones = [emit.real(1.0, ir.VectorType.get([2], element))] * 4
    made = _once(
        lambda: _wgmma(
            [ones] * (columns // BLOCK_K), _descriptor(threads, b, result), b, start, None, str(b.type.element)
        )
    )
    return Fragment(result, "scalar", lambda i: made()[4 * (i // 2) + i % 2])


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    made: list[Any] = []

    def get() -> Any:
        if not made:
            made.append(make())
        return made[0]

    return get


def _descriptor(threads: ThreadIndex, b: Place, result: Reg) -> Any:
    """The lower word of a matrix descriptor: the start address."""
    address = llvm.ptrtoint(emit.integer(), b.base)
    layout = result.layout
    for size, divisor, dim, stride in layout.thread_digits():
        if dim < layout.rank - 2:
            step = emit.constant(stride * b.type.strides[dim] * 2)
            address = arith.addi(address, arith.muli(threads.digit(size, divisor, layout.threads), step))
    return emit.mask(emit.shift_right(address, 4), 0x3FFF)  # in a cluster, addresses have the block's rank above


def _offset(b: Place, column: int) -> int:
    """Bytes from the start to a column, which inside a row are those without swizzling."""
    panel, within = divmod(column, b.type.shape[-1])
    return 2 * (panel * b.type.strides[-3] + within)


def _wgmma(
    fragments: list[list[Any]], descriptor: Any, b: Place, start: int, totals: list[Any] | None, element: str
) -> list[Any]:
    """The accumulators of one row of fragments, after all its instructions."""
    i32, f32 = emit.integer(), ir.F32Type.get()
    n = b.type.shape[-2]
    count = n // 2
    d = ", ".join(f"${i}" for i in range(count))
    first = count if totals is None else 2 * count
    lower = f"${first + 4 * len(fragments)}"
    lines = [
        ".reg .b64 first, here;",
        ".reg .pred add;",
        f"mov.b64 first, {{{lower}, {_UPPER}}};",
        f"setp.ne.b32 add, {lower}, {lower};" if totals is None else f"setp.eq.b32 add, {lower}, {lower};",
        "wgmma.fence.sync.aligned;",
    ]
    for i in range(len(fragments)):
        a = ", ".join(f"${first + 4 * i + r}" for r in range(4))
        lines += [
            f"add.s64 here, first, {_offset(b, start + BLOCK_K * i) // 16};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{element}.{element} {{{d}}}, {{{a}}}, here, add, 1, 1, 0;",
        ]
        if i == 0 and totals is None:
            lines.append(f"setp.eq.b32 add, {lower}, {lower};")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    words = [emit.bitcast(i32, x) for fragment in fragments for x in fragment]
    operands = [*(totals or []), *words, descriptor]
    ties = [] if totals is None else [str(i) for i in range(count)]
    constraints = ["=&f" if totals is None else "=f"] * count + ties + ["r"] * (len(words) + 1) + ["~{memory}"]
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    result = llvm.inline_asm(
        struct,
        operands,
        "{\n" + "\n".join(lines) + "\n}",
        ",".join(constraints),
        has_side_effects=True,
        asm_dialect=0,
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(count)]
