"""The prepared activation: tokens in the order in which codes are decoded (`ChunkMap.columns`), group padding as zeros.

A row holds the padded k columns of a token as f32, bf16 or i16, and then, where the weight has offsets to take away
late, the sums of x over every group in f32. Integers that are decoded in place are too large by a power of two, and the
activation takes the opposite power where the rows are for such codes. Columns in i16 are multiples of a unit, a power
of two for every `Tiling.piece` of them (`products`); the units, in f32, are the end of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lowbit.dialect.bindings import arith, ir, vector
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.decode import ChunkMap
from lowbit.passes.cpu.task import round_to_line
from lowbit.passes.cpu.vector_ops import (
    LANES,
    MAGIC,
    Value,
    add,
    at,
    bits_and,
    broadcast,
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

Element = Literal["f32", "bf16", "i16"]
_BYTES: dict[Element, int] = {"f32": 4, "bf16": 2, "i16": 2}
_COLUMN, _FACTOR = "lowbit_column", "lowbit_factor"
_EXPONENT = 0xFF << 23  # of an f32
_LARGEST = 14  # of a whole number's exponents
_LEAST_EXPONENT = (_LARGEST + 2) << 23  # of the largest number in a piece: its unit and the inverse are normal numbers


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
        return self.bytes * self.spec.packing.padded_k

    @property
    def units_at(self) -> int:
        """Byte of a row at which its units begin."""
        return self.sums_at + 4 * self.spec.packing.groups * self.sums

    @property
    def units(self) -> int:
        """Units of a row; 0 where numbers are as they are."""
        return self.spec.packing.padded_k // Tiling(self.spec).piece if self.element == "i16" else 0

    @property
    def bytes(self) -> int:
        """Bytes of a column."""
        return _BYTES[self.element]

    @property
    def nbytes(self) -> int:
        """Bytes from one row to the next."""
        return round_to_line(self.units_at + 4 * self.units)

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
        if self.rows.units:
            with loop(0, self.rows.units) as unit:
                store(self._unit(x, mul(unit.index, self.tiling.piece)), self._unit_at(row, unit.index))
        with loop(0, p.chunks) as chunk:
            with loop(0, p.chunk, LANES) as c:
                store(constant(vec(f32()), 0.0), at(self._chunk, mul(c.index, 4)))
            self._fill(x, row, mul(chunk.index, p.chunk))
            self._permute(at(row, mul(chunk.index, self.rows.bytes * p.chunk)))

    def _sum_of(self, row: Value, group: Value) -> Value:
        return at(row, mul(group, 4), self.rows.sums_at)

    def _unit_at(self, row: Value, unit: Value) -> Value:
        return at(row, mul(unit, 4), self.rows.units_at)

    def _columns(self, x: Value, first: Value, width: int) -> tuple[Value, Value, Value]:
        """Returns the group of the columns in memory from `first` on, where x has them, and how many of `width` it
        has: none in the padding."""
        group_size = self.spec.group_size or self.spec.k
        group, within = divmod_(first, self.tiling.group)
        count = arith.minsi(i64(width), arith.subi(i64(group_size), within))
        count = arith.select(less(group, i64(self.spec.groups)), arith.maxsi(count, i64(0)), i64(0))
        return group, at(x, mul(add(mul(group, group_size), within), ELEMENTS[self.spec.act].bytes)), count

    def _unit(self, x: Value, first: Value) -> Value:
        """Returns the unit of the piece that begins with a column in memory; not finite where a number in it is not."""
        _, source, count = self._columns(x, first, self.tiling.piece)

        def larger(values: Value, most: Value, _column: Value) -> Value:
            kind = most.type
            bits = arith.andi(arith.bitcast(kind, values), constant(kind, 0x7FFFFFFF))
            return arith.maxsi(most, bits)  # magnitudes in f32 are in the order of their bits, NaN above all

        most = self._each(source, count, constant(vec(i(32)), 0), larger, _largest)
        exponent = arith.maxsi(bits_and(most, _EXPONENT), constant(i(32), _LEAST_EXPONENT))
        unit = arith.subi(exponent, constant(i(32), _LARGEST << 23))
        is_finite = arith.cmpi(arith.CmpIPredicate.ult, most, constant(i(32), _EXPONENT))
        return arith.bitcast(f32(), arith.select(is_finite, unit, most))

    def _fill(self, x: Value, row: Value, first: Value) -> None:
        """Copies the columns in memory from `first` on, of one chunk, in f32; adds them to the sums."""
        chunk = self.spec.packing.chunk
        width = min(self.tiling.group, chunk)  # of the part of a group that a chunk holds
        with loop(0, chunk, width) as part:
            column = add(first, part.index)
            group, source, count = self._columns(x, column, width)
            with when(less(i64(0), count)):
                unit = None
                if self.rows.units:
                    unit = load(f32(), self._unit_at(row, divmod_(column, self.tiling.piece)[0]))
                total = self._copy(source, at(self._chunk, mul(part.index, 4)), count, unit)
                if self.rows.sums:
                    place = self._sum_of(row, group)
                    store(arith.addf(load(f32(), place), total), place)

    def _copy(self, source: Value, target: Value, count: Value, unit: Value | None) -> Value:
        """Copies columns in f32, as multiples of a unit if there is one; returns their sum."""
        factor = None if unit is None else arith.divf(constant(f32(), 1.0), unit)

        def copied(values: Value, total: Value, column: Value) -> Value:
            if factor is not None:
                kind = values.type
                values = arith.mulf(values, broadcast(factor) if isinstance(kind, ir.VectorType) else factor)
                values = arith.subf(arith.addf(values, constant(kind, MAGIC)), constant(kind, MAGIC))  # rounds
            store(values, at(target, mul(column, 4)))
            return arith.addf(total, values)

        total = self._each(source, count, constant(vec(f32()), 0.0), copied, sum_of)
        return total if unit is None else arith.mulf(total, unit)

    def _each(
        self,
        source: Value,
        count: Value,
        start: Value,
        visit: Callable[[Value, Value, Value], Value],
        join: Callable[[Value], Value],
    ) -> Value:
        """Visits numbers of x in f32, sixteen at a time and then each that is left: with what the last visit returned,
        which `join` makes one of sixteen, and with their column. Returns the last result."""
        act = scalar_type(self.spec.act)

        def some(kind: ir.Type, wide: ir.Type, first: Value | int, end: Value, step: int, result: Value) -> Value:
            with loop(first, end, step, carried=[result]) as c:
                values = arith.extf(wide, load(kind, at(source, mul(c.index, ELEMENTS[self.spec.act].bytes))))
                c.carried = [visit(values, c.carried[0], c.index)]
            return c.carried[0]

        whole = mul(divmod_(count, LANES)[0], LANES)
        vectors = some(vec(act), vec(f32()), 0, whole, LANES, start)
        return some(act, f32(), whole, count, 1, join(vectors))

    def _permute(self, target: Value) -> None:
        """Writes the chunk on the stack in the order of the decoded vectors."""
        vectors, join = _JOINED[self.rows.element]
        with loop(0, self.spec.packing.chunk, vectors * LANES) as c:
            values = [self._gathered(add(c.index, LANES * v)) for v in range(vectors)]
            store(join(*values), at(target, mul(c.index, self.rows.bytes)))

    def _gathered(self, place: Value) -> Value:
        values = gather(self._chunk, look_up(_COLUMN, vec(i(32)), place))
        return arith.mulf(values, look_up(_FACTOR, vec(f32()), place)) if self.rows.scaled else values


def _largest(values: Value) -> Value:
    return vector.reduction(i(32), vector.CombiningKind.MAXSI, values)


def _same(values: Value) -> Value:
    return values


def _to_i16(low: Value, high: Value) -> Value:
    """Two vector<16xf32> of whole numbers to one vector<32xi16>."""
    halves = [arith.trunci(vec(i(16)), arith.fptosi(vec(i(32)), values)) for values in (low, high)]
    return vector.shuffle(*halves, list(range(2 * LANES)))


_JOINED: dict[Element, tuple[int, Callable[..., Value]]] = {
    "f32": (1, _same),
    "bf16": (2, to_bf16),
    "i16": (2, _to_i16),
}
"""How many vectors of f32 make one of an element, and how."""
