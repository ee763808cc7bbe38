"""A packed weight in host code: its tiles of k, and the codes, scales and zeros of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lowbit.dialect.bilevel import TABLE_CODE, Bilevel
from lowbit.dialect.bilevel import least_code as scale_code
from lowbit.dialect.bindings import arith, ir, vector
from lowbit.dialect.elements import ELEMENTS
from lowbit.dialect.formats.packing import ROWS, UNIT_BYTES
from lowbit.dialect.spec import MatmulSpec
from lowbit.dialect.weight import TensorSlot
from lowbit.passes.cpu.decode import ChunkMap, ChunkReader, Isa, decode_e4m3, decode_e8m0, least_code, look_up_scales
from lowbit.passes.cpu.vector_ops import (
    Value,
    add,
    at,
    broadcast,
    constant,
    divmod_,
    f32,
    fma,
    i,
    load,
    mul,
    round_to,
    scalar_type,
    scratch,
    store,
    take,
    vec,
)

VECTOR_BYTES = 4 * ROWS  # of the f32 of 16 rows, or of 16 columns
_MAX_TILE = 512  # columns


@dataclass(frozen=True)
class Tiling:
    """How k is walked. A *span* is a group or, where groups are smaller, a chunk of several groups; a *tile*
    is a run of chunks of a span, short enough for its activations to stay in the first-level cache."""

    spec: MatmulSpec

    @property
    def group(self) -> int:
        """Columns of a group in memory."""
        p = self.spec.packing
        return p.padded_group or p.padded_k

    @property
    def span(self) -> int:
        return max(self.group, self.spec.packing.chunk)

    @property
    def groups(self) -> int:
        """Groups of a span."""
        return self.span // self.group

    @property
    def spans(self) -> int:
        return self.spec.packing.padded_k // self.span

    @cached_property
    def chunks(self) -> int:
        """Chunks of a tile: a divisor of the span's."""
        chunk = self.spec.packing.chunk
        of_span = self.span // chunk
        return max(d for d in range(1, max(_MAX_TILE // chunk, 1) + 1) if of_span % d == 0)

    @property
    def piece(self) -> int:
        """Columns of a group in a tile."""
        return min(self.group, self.chunks * self.spec.packing.chunk)

    @property
    def tiles(self) -> int:
        """Tiles of a span."""
        return self.span // (self.chunks * self.spec.packing.chunk)


class Row(NamedTuple):
    """Row `index` = g + 8 * odd of a block."""

    index: Value
    g: Value
    odd: int

    @classmethod
    def pair(cls, g: Value) -> tuple[Row, Row]:
        """The two rows that share their words."""
        return cls(g, g, 0), cls(add(g, ROWS // 2), g, 1)


class Weight:
    """The arrays of a packed weight inside a function, by name; `map` says how its chunks decode."""

    def __init__(self, spec: MatmulSpec, isa: Isa, arrays: Sequence[Value]) -> None:
        self.spec = spec
        self.tiling = Tiling(spec)
        self.map = ChunkMap(spec.packing, spec.dtype)
        self.low = least_code(spec)
        self._isa: Isa = isa
        self.arrays = dict(zip(spec.call_operands, arrays))

    def scales(self, block: Value, group: Value) -> Value:
        """Returns the scales of 16 rows, times those of the rows where they have some: vector<16xf32>."""
        scales = self._of_group("scales", block, group)
        if self.spec.folds_in_f16:
            scales = arith.extf(vec(f32()), round_to(scales, scalar_type("f16")))
        return self._row_scaled(scales, block)

    def zeros(self, block: Value, group: Value) -> Value | None:
        """Returns the zeros of 16 rows, to be subtracted from stored code + low: vector<16xf32>."""
        return None if self.spec.zero_kind is None else self._of_group("zeros", block, group)

    def offsets(self, block: Value, group: Value) -> Value | None:
        """Returns the offsets of 16 rows, to be added to scaled codes, times the rows' scales: vector<16xf32>."""
        if self.spec.offset_kind is None:
            return None
        return self._row_scaled(self._of_group("offsets", block, group), block)

    def shifts(self, scales: Value, block: Value, group: Value, low: int) -> Value | None:
        """Returns the factor of the sums of x, scales * (low - zeros) or scales * low + offsets; None if that is 0."""
        zeros, offsets, least = self.zeros(block, group), self.offsets(block, group), constant(vec(f32()), low)
        if offsets is not None:
            return fma(scales, least, offsets) if low else offsets
        if zeros is None:
            return arith.mulf(scales, least) if low else None
        return arith.mulf(scales, arith.subf(least, zeros) if low else arith.negf(zeros))

    def row_scales(self, block: Value) -> Value:
        """Returns the scales of 16 rows: vector<16xf32>."""
        return load(vec(f32()), at(self.arrays["row_scales"], mul(block, VECTOR_BYTES)))

    def _row_scaled(self, values: Value, block: Value) -> Value:
        """Times the scales of rows, but for weights that are rounded before."""
        if not self.spec.row_scales or self.spec.folds:
            return values
        return arith.mulf(values, self.row_scales(block))

    def _of_group(self, name: str, block: Value, group: Value) -> Value:
        """Numbers of 16 rows in a group; of codes, what the second level makes of them."""
        slot = self.spec.slot(name)
        values = self._per_row(slot, add(mul(block, self.spec.packing.groups), group))
        if self.spec.bilevel is None or not slot.code:
            return values
        if slot.storage == "u8" and (least := scale_code(slot.code)):
            values = arith.addf(values, constant(vec(f32()), least))
        if self.spec.bilevel.zeros:
            values = arith.subf(values, self._of_block(f"{slot.role}_zeros", self.spec.bilevel, block, group))
        values = arith.mulf(values, self._of_block(f"{slot.role}_scales", self.spec.bilevel, block, group))
        if self.spec.bilevel.offsets:
            values = arith.addf(values, self._of_block(f"{slot.role}_offsets", self.spec.bilevel, block, group))
        return values

    def _of_block(self, name: str, bilevel: Bilevel, block: Value, group: Value) -> Value:
        """Numbers of the second level for 16 rows in a group."""
        slot = self.spec.slot(name)
        _, blocks, lanes = slot.shape
        place = add(mul(block, blocks), divmod_(group, bilevel.groups)[0])
        if bilevel.rows == 1:
            return self._per_row(slot, place)
        element = scalar_type(slot.storage)
        number = load(element, at(self.arrays[name], mul(place, lanes * ELEMENTS[slot.storage].bytes)))
        return broadcast(number if element == f32() else arith.extf(f32(), number))

    def _per_row(self, slot: TensorSlot, place: Value) -> Value:
        """The numbers of 16 rows that stand side by side, as f32; codes are those that are stored."""
        kind = slot.storage
        address = at(self.arrays[slot.tensor], mul(place, ROWS * ELEMENTS[kind].bytes))
        if kind in ("f16", "bf16", "f32"):
            values = load(vec(scalar_type(kind)), address)
            return values if kind == "f32" else arith.extf(vec(f32()), values)
        codes = load(vec(i(8)), address)
        if slot.code == TABLE_CODE:
            return look_up_scales(codes)
        if slot.shared:
            shifted = arith.shrui(codes, constant(codes.type, slot.bit))
            codes = arith.andi(shifted, constant(codes.type, (1 << slot.bits) - 1))
        if kind == "u8":
            return arith.uitofp(vec(f32()), codes)
        return decode_e8m0(codes) if kind == "e8m0" else decode_e4m3(codes)

    def chunk(self, block: Value, chunk: Value, row: Row) -> ChunkReader:
        """The codes of a row of a block in a chunk."""
        p = self.spec.packing
        unit = mul(add(mul(block, p.chunks), chunk), p.units * UNIT_BYTES)
        words = at(self.arrays["codes"], add(unit, mul(row.g, UNIT_BYTES * 2 // ROWS)))
        return ChunkReader(self.map, self._isa, words, row.odd)


class RowValues:
    """f32 of 16 rows for every group of a tile, a power of two of them, on the stack: written by group, read by row."""

    def __init__(self, groups: int) -> None:
        self._groups, self._base = groups, scratch(groups * VECTOR_BYTES)

    def put(self, values: Sequence[Value]) -> None:
        """Writes the values of all groups, those of a row side by side."""
        store(_interleaved(values), self._base)

    def spread(self, row: Value, groups: Sequence[int]) -> Value:
        """vector<16xf32> with a row's value of group groups[e] in element e."""
        place = at(self._base, mul(row, 4 * self._groups))
        if len(set(groups)) == 1:
            return broadcast(load(f32(), at(place, byte=4 * groups[0])))
        return take(load(vec(f32(), self._groups), place), groups)


def _interleaved(vectors: Sequence[Value]) -> Value:
    """Returns the first elements of all vectors, then the second ones, and so on."""
    if len(vectors) == 1:
        return vectors[0]
    even, odd = _interleaved(vectors[::2]), _interleaved(vectors[1::2])
    count = ir.VectorType(even.type).shape[0]
    return vector.shuffle(even, odd, [element + which for element in range(count) for which in (0, count)])
