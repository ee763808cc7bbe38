"""The rules of `load_outliers` and `sparse_vector`: products of one token with outliers, without mma.

A lane takes a word of a line, and adds its product to a sum of its own, of which it has one for each of the 16 rows in
shared memory. That is an eighth of the instructions, as no two lanes look at one word.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8_D
from lowbit.dialect.types import Reg, Shared
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.context import LoweringContext
from lowbit.passes.lowering.fragment import Fragment, fragment_blocks
from lowbit.passes.lowering.outlier_lines import WORD, Outlier, outlier_of
from lowbit.passes.lowering.outlier_share import WARP, Line, Share, Sums, if_any
from lowbit.passes.lowering.registry import lowers

_AHEAD = 16  # lines whose x are on their way at once
_MORE = 4  # the same of lines that were not loaded before: few row blocks have some, and registers are for all


@lowers(ops.LoadOutliersOp)
def load_outliers(op: Any, c: LoweringContext) -> None:
    """All lines are asked for at once, when the table has come. The barrier keeps the assembler from moving the wait
    for the table in front of copies that are to be started before."""
    reg = Reg.of(op.result.type)
    lines = reg.shape[2]
    nvvm.bar_warp_sync(emit.constant(-1))
    words = Share(op, c, reg.layout, ROWS).load_first(reg.layout.locals // lines, lines)
    c.tiles[op.result] = Fragment(reg, "scalar", words.__getitem__)


@lowers(ops.SparseVectorOp)
def sparse_vector(op: Any, c: LoweringContext) -> None:
    """Loads all x that the lines of a few row blocks meet, at once. Then, row block by row block, each lane adds up its
    products in shared memory, and those of a row are added to its accumulators.

    One barrier keeps the assembler from moving the wait for the lines in front of copies that are to be started before,
    the other from asking for some x later, behind the wait for others."""
    c.pending.finish_reads()
    nvvm.bar_warp_sync(emit.constant(-1))
    total, reg = c.tiles[op.c], Reg.of(op.result.type)
    registers, words = total.registers("scalar"), c.tiles[op.words].registers("scalar")
    share, lanes = Share(op, c, reg.layout, 1), _LaneSums(op, c)
    rows = [row for row, _ in fragment_blocks(reg.layout, MMA_M16N8_D)]
    count = len(words) // len(rows)
    at_once = max(1, _AHEAD // count)
    for first in range(0, len(rows), at_once):
        some = {row: words[row * count : (row + 1) * count] for row in rows[first : first + at_once]}
        loaded = [lanes.load([lanes.outlier(word) for word in own]) for own in some.values()]
        nvvm.bar_warp_sync(emit.constant(-1))
        for (row, own), products in zip(some.items(), loaded):
            lanes.clear()
            lanes.add(products)
            others = partial(share.fold_in_memory, [row], count, _MORE, [], lanes.add_lines)
            if_any([emit.of_lane(1, own[-1])], [], others)
            at = rows.index(row)
            for slot, value in zip((4 * at, 4 * at + 2), lanes.of_rows()):
                registers[slot] = arith.addf(registers[slot], value)
    c.tiles[op.result] = Fragment(reg, "scalar", registers.__getitem__)


class _LaneSums:
    """A sum of every lane for each of 16 rows: [16, 32] f32 of a warp, at the head of its part of a buffer."""

    def __init__(self, op: Any, c: LoweringContext) -> None:
        self._x, sums = c.places[op.x], c.places[op.scratch]
        self._lane = c.thread_digit(WARP)
        warps, nbytes = c.threads_per_block // WARP, Shared.of(op.scratch.type).bytes
        warp = arith.muli(c.thread_digit(warps, WARP), emit.constant(nbytes // warps))
        self._warp = emit.offset_bytes(sums.base, dynamic=warp)
        self._mine = emit.offset_bytes(self._warp, dynamic=arith.muli(self._lane, emit.constant(WORD)))
        row = arith.muli(c.thread_digit(8, 4), emit.constant(WARP))
        eight = arith.muli(c.thread_digit(4), emit.constant(8))
        self._quad = emit.offset_bytes(self._warp, dynamic=arith.muli(arith.addi(row, eight), emit.constant(WORD)))

    def clear(self) -> None:
        for row in range(ROWS):
            place = emit.offset_bytes(self._mine, static=row * WARP * WORD)
            llvm.store(emit.real(0.0, ir.F32Type.get()), place, alignment=WORD)

    def outlier(self, word: Any) -> Outlier:
        """This lane's outlier of a line whose words are loaded."""
        return outlier_of(word, emit.of_lane(0, word), self._lane)

    def load(self, outliers: Sequence[Outlier]) -> list[tuple[Outlier, Any]]:
        """Outliers of this lane, each with the x that it meets."""
        element = str(self._x.type.element)
        size = ELEMENTS[element].bytes
        found: list[tuple[Outlier, Any]] = []
        for mine in outliers:
            offset = arith.muli(arith.extui(emit.integer(64), mine.column), emit.constant(size, 64))
            address = emit.offset_bytes(self._x.base, dynamic=offset)
            found.append((mine, llvm.load(ir.Type.parse(element), address, alignment=size)))
        return found

    def add(self, products: Sequence[tuple[Outlier, Any]]) -> None:
        f32 = ir.F32Type.get()
        for mine, x in products:
            place = emit.offset_bytes(self._mine, dynamic=arith.muli(mine.row, emit.constant(WARP * WORD)))
            old = llvm.load(f32, place, alignment=WORD)
            llvm.store(emit.fma(mine.value, arith.extf(f32, x), old), place, alignment=WORD)

    def add_lines(self, turns: list[list[Line]], sums: Sums) -> Sums:
        self.add(self.load([line.outlier(self._lane) for (line,) in turns]))
        return sums

    def of_rows(self) -> list[Any]:
        """The sums of eight lanes for this lane's rows g and g + 8, when all lanes have theirs."""
        nvvm.bar_warp_sync(emit.constant(-1))
        four = ir.VectorType.get([4], ir.F32Type.get())
        result: list[Any] = []
        for half in range(2):
            at = [emit.offset_bytes(self._quad, static=(8 * half * WARP + 4 * i) * WORD) for i in range(2)]
            vectors = [llvm.load(four, address, alignment=16) for address in at]
            result.append(reduce(arith.addf, [emit.element(v, i) for v in vectors for i in range(4)]))
        nvvm.bar_warp_sync(emit.constant(-1))
        return result
