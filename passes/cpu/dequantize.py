"""The program that writes the weight out, and how a row of a chunk becomes numbers: scale * (value - zero), or
scale * value + offset.

w [n, k] in the activation's type stands at `y` in the task; every number is computed in f32 and rounded once more.
Where the weight has outliers, all rows of a chunk are decoded before any is rounded, and outliers are added to them.
"""

from __future__ import annotations

import numpy as np

from lowbit.dialect.bindings import arith
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import ChunkMap, Isa, nearest_e4m3, nearest_i8
from lowbit.passes.cpu.outliers import Lines, Outlier, add_to
from lowbit.passes.cpu.task import Needs
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    add,
    at,
    constant,
    constant_array,
    divmod_,
    f32,
    fma,
    gather,
    i,
    i64,
    less,
    load,
    look_up,
    loop,
    mul,
    round_to,
    scalar_type,
    scratch,
    store,
    vec,
    when,
)
from lowbit.passes.cpu.weight import VECTOR_BYTES, Row, RowValues, Weight
from lowbit.passes.cpu.worker import Ranged, Task, run_function

_PLACE = "lowbit_place"


class ChunkDecoder:
    """Turns rows of chunks into f32. Made once per function, at its entry: scales, zeros and offsets are on the
    stack."""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.spec = weight, weight.spec
        groups = weight.tiling.groups
        self._scales = RowValues(groups)
        self._zeros = RowValues(groups) if self.spec.zero_kind else None
        self._offsets = RowValues(groups) if self.spec.offset_kind else None
        self._rows = RowValues(1) if self.spec.folds else None

    def begin(self, block: Value, chunk: Value) -> None:
        """Fetches scales, zeros and offsets of a chunk's 16 rows."""
        group, _ = divmod_(mul(chunk, self.spec.packing.chunk), self.weight.tiling.group)
        groups = [add(group, g) for g in range(self.weight.tiling.groups)]
        self._scales.put([self.weight.scales(block, g) for g in groups])
        if self._zeros:
            self._zeros.put([self.weight.zeros(block, g) for g in groups])
        if self._offsets:
            self._offsets.put([self.weight.offsets(block, g) for g in groups])
        if self._rows:
            self._rows.put([self.weight.row_scales(block)])

    def row(self, block: Value, chunk: Value, row: Row) -> list[Value]:
        """The vectors of a row, in decoded order."""
        reader, steps = self.weight.chunk(block, chunk, row), range(self.weight.map.steps)
        return [
            self._weights(value, row, step, which) for step in steps for which, value in enumerate(reader.vectors(step))
        ]

    def _weights(self, value: Value, row: Row, step: int, which: int) -> Value:
        chunk_map = self.weight.map
        groups, factor = chunk_map.groups(step, which), 2.0 ** int(chunk_map.exponents[step, which])
        if self.weight.low:
            value = fma(value, constant(vec(f32()), factor), constant(vec(f32()), self.weight.low))
        elif factor != 1:
            value = arith.mulf(value, constant(vec(f32()), factor))
        if self._zeros:
            value = arith.subf(value, self._zeros.spread(row.index, groups))
        value = arith.mulf(value, self._scales.spread(row.index, groups))
        if self._offsets:
            value = arith.addf(value, self._offsets.spread(row.index, groups))
        return self._folded(value, self._rows, row) if self._rows else value

    def _folded(self, value: Value, rows: RowValues, row: Row) -> Value:
        """Weights of a row rounded as kernels with `MatmulSpec.fold_scales` round them."""
        in_i8 = self.spec.compute == "i8"
        if not (in_i8 and self.spec.folds_in_f16):
            value = arith.extf(vec(f32()), round_to(value, scalar_type("f16")))
        near = nearest_i8(value) if in_i8 else nearest_e4m3(value)
        return arith.mulf(near, rows.spread(row.index, [0] * LANES))


def dequantize_needs(spec: MatmulSpec, isa: Isa) -> Needs:
    """Returns that it needs no scratch memory: a row of a chunk is on the stack."""
    return Needs()


def build_dequantize(spec: MatmulSpec, isa: Isa) -> None:
    """Defines the program in the module at the insertion point."""
    columns = ChunkMap(spec.packing, spec.dtype).columns.ravel()
    constant_array(_PLACE, i(32), np.argsort(columns).astype(np.int32))

    def emit(task: Task) -> tuple[None, Ranged]:
        weight = Weight(spec, isa, task.weight(spec))
        return None, _Dequantizer(weight, task).blocks

    run_function(dequantize_needs(spec, isa), spec.packing.row_blocks, isa, emit)


class _Dequantizer:
    """The parts of the work."""

    def __init__(self, weight: Weight, task: Task) -> None:
        self.weight, self.spec, self._task, self._w = weight, weight.spec, task, task.array("y")
        self._decoder = ChunkDecoder(weight)
        self._row_bytes = 4 * self.spec.packing.chunk
        self._values = scratch(self._row_bytes * (ROWS if self.spec.outliers else 1))

    def blocks(self, first: Value, last: Value) -> None:
        """The row blocks from `first` up to `last`."""
        if self.spec.outliers:
            self._blocks_with_outliers(first, last)
        else:
            self._plain_blocks(first, last)

    def _blocks_with_outliers(self, first: Value, last: Value) -> None:
        """The same where all rows of a chunk have to be there for outliers to be added, which come by column."""
        spec, lines = self.spec, Lines(self.weight, self._task)
        with loop(first, last) as block:
            word, end = lines.of_block(block.index)
            start = mul(block.index, ROWS)
            rows = arith.minsi(i64(ROWS), arith.subi(i64(spec.n), start))
            with loop(0, spec.packing.chunks, carried=[word]) as chunk:
                self._decoder.begin(block.index, chunk.index)
                with loop(0, ROWS // 2) as g:
                    for row in Row.pair(g.index):
                        target = at(self._values, mul(row.index, self._row_bytes))
                        for v, value in enumerate(self._decoder.row(block.index, chunk.index, row)):
                            store(value, at(target, byte=v * VECTOR_BYTES))
                column = mul(chunk.index, spec.packing.chunk)
                chunk.carried = [self._add_outliers(lines, chunk.carried[0], end, column)]
                with loop(0, rows) as r:
                    values = at(self._values, mul(r.index, self._row_bytes))
                    target = at(self._w, mul(add(start, r.index), ELEMENTS[spec.act].bytes * spec.k))
                    self._copy(column, target, values)

    def _add_outliers(self, lines: Lines, word: Value, end: Value, first: Value) -> Value:
        """Adds the outliers of the chunk of columns in memory from `first` on; returns the word of the next."""
        packing = self.spec.packing

        def visit(outlier: Outlier) -> None:
            within = arith.subi(self._in_memory(outlier.column), first)
            place = arith.extui(i(64), look_up(_PLACE, i(32), within))
            add_to(at(at(self._values, mul(outlier.row, self._row_bytes)), mul(place, 4)), outlier.value)

        return lines.each_below(word, end, self._in_weight(add(first, packing.chunk)), visit)

    def _in_memory(self, column: Value) -> Value:
        """The column in memory of a column of the weight."""
        if not self.spec.packing.pads_groups:
            return column
        group, within = divmod_(column, self.spec.group_size or self.spec.k)
        return add(mul(group, self.weight.tiling.group), within)

    def _in_weight(self, column: Value) -> Value:
        """The first column of the weight that is not before a column in memory."""
        if not self.spec.packing.pads_groups:
            return column
        size = self.spec.group_size or self.spec.k
        group, within = divmod_(column, self.weight.tiling.group)
        return add(mul(group, size), arith.minsi(within, i64(size)))

    def _plain_blocks(self, first: Value, last: Value) -> None:
        spec = self.spec
        with loop(first, last) as block, loop(0, spec.packing.chunks) as chunk:
            self._decoder.begin(block.index, chunk.index)
            start = mul(block.index, ROWS)
            rows = arith.minsi(i64(ROWS), arith.subi(i64(spec.n), start))
            with loop(0, ROWS // 2) as g:
                for row in Row.pair(g.index):
                    with when(less(row.index, rows)):
                        for v, value in enumerate(self._decoder.row(block.index, chunk.index, row)):
                            store(value, at(self._values, byte=v * VECTOR_BYTES))
                        target = at(self._w, mul(add(start, row.index), ELEMENTS[spec.act].bytes * spec.k))
                        self._copy(mul(chunk.index, spec.packing.chunk), target, self._values)

    def _copy(self, first: Value, row: Value, decoded: Value) -> None:
        """Rounds the columns in memory from `first` on, of one decoded chunk, into a row of w, in order and without
        the padding of groups."""
        spec, tiling, size = self.spec, self.weight.tiling, self.spec.group_size or self.spec.k
        width = min(tiling.group, spec.packing.chunk)  # of the part of a group that a chunk holds
        with loop(0, spec.packing.chunk, width) as part:
            group, within = divmod_(add(first, part.index), tiling.group)
            columns = arith.minsi(i64(width), arith.subi(i64(size), within))
            target = at(row, mul(add(mul(group, size), within), ELEMENTS[spec.act].bytes))
            with when(less(group, i64(spec.groups))):
                whole = arith.maxsi(i64(0), mul(arith.divsi(columns, i64(LANES)), LANES))
                with loop(0, whole, LANES) as c:
                    values = gather(decoded, look_up(_PLACE, vec(i(32)), add(part.index, c.index)))
                    self._store(values, target, c.index)
                with loop(whole, columns) as c:
                    place = arith.extui(i(64), look_up(_PLACE, i(32), add(part.index, c.index)))
                    self._store(load(f32(), at(decoded, mul(place, 4))), target, c.index)

    def _store(self, value: Value, target: Value, column: Value) -> None:
        act = self.spec.act
        store(round_to(value, scalar_type(act)), at(target, mul(column, ELEMENTS[act].bytes)))
