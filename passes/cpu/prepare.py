"""The prepared activation: tokens in the order in which codes are decoded (`ChunkMap.columns`), group padding as zeros.

A row holds the padded k columns of a token as f32 or bf16, and then, where the weight has offsets to take away late,
the sums of x over every group in f32. Integers that are decoded in place are too large by a power of two, and the
activation takes the opposite power where the rows are for such codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import ChunkMap
from lowbit.passes.cpu.task import round_to_line
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    add,
    at,
    constant,
    constant_array,
    divmod_,
    f32,
    gather,
    i,
    i64,
    less,
    load,
    look_up,
    loop,
    mul,
    scalar_type,
    scratch,
    store,
    sum_of,
    to_bf16,
    vec,
    when,
)
from lowbit.passes.cpu.weight import Tiling

Element = Literal["f32", "bf16"]
_COLUMN, _FACTOR = "lowbit_column", "lowbit_factor"


@dataclass(frozen=True)
class Rows:
    """The rows of a prepared activation. `scaled`: by the powers of two of codes in place; `paired`: the two codes of a
    word stay neighbours; `sums`: of groups."""

    spec: MatmulSpec
    element: Element = "f32"
    scaled: bool = False
    paired: bool = False
    sums: bool = False

    @property
    def sums_at(self) -> int:
        """Byte of a row at which its sums begin."""
        return ELEMENTS[self.element].bytes * self.spec.packing.padded_k

    @property
    def nbytes(self) -> int:
        """Bytes from one row to the next."""
        return round_to_line(self.sums_at + 4 * self.spec.packing.groups * self.sums)

    def constants(self) -> None:
        """Defines the module's tables: the column, and the factor, of every place in a prepared chunk."""
        chunk_map = ChunkMap(self.spec.packing, self.spec.dtype)
        columns = chunk_map.pairs if self.paired else chunk_map.columns
        constant_array(_COLUMN, i(32), columns.ravel().astype(np.int32))
        if self.scaled:
            factors = np.exp2(chunk_map.early_exponents.ravel())
            constant_array(_FACTOR, f32(), np.repeat(factors, LANES).astype(np.float32))


class Preparer:
    """Writes rows. Made once per function, at its entry: it has a chunk's columns on the stack."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.spec, self.tiling = rows, rows.spec, Tiling(rows.spec)
        self._chunk = scratch(4 * rows.spec.packing.chunk)

    def token(self, x: Value, row: Value) -> None:
        """The token at x to a row."""
        p, zero = self.spec.packing, constant(f32(), 0.0)
        if self.rows.sums:
            with loop(0, p.groups) as group:
                store(zero, self._sum_of(row, group.index))
        with loop(0, p.chunks) as chunk:
            with loop(0, p.chunk, LANES) as c:
                store(constant(vec(f32()), 0.0), at(self._chunk, mul(c.index, 4)))
            self._fill(x, row, mul(chunk.index, p.chunk))
            self._permute(at(row, mul(chunk.index, ELEMENTS[self.rows.element].bytes * p.chunk)))

    def _sum_of(self, row: Value, group: Value) -> Value:
        return at(row, mul(group, 4), self.rows.sums_at)

    def _fill(self, x: Value, row: Value, first: Value) -> None:
        """Copies the columns in memory from `first` on, of one chunk, in f32; adds them to the sums."""
        spec, group_size = self.spec, self.spec.group_size or self.spec.k
        width = min(self.tiling.group, spec.packing.chunk)  # of the part of a group that a chunk holds
        with loop(0, spec.packing.chunk, width) as part:
            group, within = divmod_(add(first, part.index), self.tiling.group)
            columns = arith.minsi(i64(width), arith.subi(i64(group_size), within))
            with when(arith.andi(less(group, i64(spec.groups)), less(i64(0), columns))):
                source = at(x, mul(add(mul(group, group_size), within), ELEMENTS[spec.act].bytes))
                total = self._copy(source, at(self._chunk, mul(part.index, 4)), columns)
                if self.rows.sums:
                    place = self._sum_of(row, group)
                    store(arith.addf(load(f32(), place), total), place)

    def _copy(self, source: Value, target: Value, columns: Value) -> Value:
        """Copies columns in f32; returns their sum."""
        act = scalar_type(self.spec.act)

        def copy(type_: ir.Type, result: ir.Type, start: Value | int, stop: Value, step: int, total: Value) -> Value:
            with loop(start, stop, step, carried=[total]) as c:
                values = arith.extf(result, load(type_, at(source, mul(c.index, ELEMENTS[self.spec.act].bytes))))
                store(values, at(target, mul(c.index, 4)))
                c.carried = [arith.addf(c.carried[0], values)]
            return c.carried[0]

        whole = mul(divmod_(columns, LANES)[0], LANES)
        sums = copy(vec(act), vec(f32()), 0, whole, LANES, constant(vec(f32()), 0.0))
        return copy(act, f32(), whole, columns, 1, sum_of(sums))

    def _permute(self, target: Value) -> None:
        """Writes the chunk on the stack in the order of the decoded vectors."""
        size = ELEMENTS[self.rows.element].bytes
        vectors = 2 if self.rows.element == "bf16" else 1
        with loop(0, self.spec.packing.chunk, vectors * LANES) as c:
            values = [self._gathered(add(c.index, LANES * v)) for v in range(vectors)]
            store(to_bf16(*values) if vectors == 2 else values[0], at(target, mul(c.index, size)))

    def _gathered(self, place: Value) -> Value:
        values = gather(self._chunk, look_up(_COLUMN, vec(i(32)), place))
        return arith.mulf(values, look_up(_FACTOR, vec(f32()), place)) if self.rows.scaled else values
