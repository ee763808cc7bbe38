"""Numbers from codes, codes from numbers, and numbers of another type."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.dialect import ops
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.layouts.layout import Layout
from lowbit.dialect.types import UNIT, Reg, format_attr
from lowbit.passes.builder.scope import Operations
from lowbit.passes.builder.tile import Tile
from lowbit.passes.builder.values import Memory, i64, text


class Codes(Operations):
    """Decoding, encoding, and conversions between types."""

    def decode(
        self, codes: Tile, element: str, exponent: int = 0, offset: str = "subtracted", shifts: Sequence[Tile] = ()
    ) -> Tile:
        """Numbers from codes, exactly. offset: "subtracted", "deferred" or "raw" (`dialect.formats.raw_codes`).
        shifts: minus zero points [.., rows, 1], each for an equal part of columns."""
        values = [s.value for s in shifts]
        op = ops.DecodeOp(codes.value, values, i64(exponent), Reg(element, codes.layout).type)
        op.offset = offset
        return Tile(op.result)

    def decode_bytes(
        self, codes: Tile, element: str, layout: Layout, zeros: Sequence[Tile] = (), offset: int = 0
    ) -> Tile:
        """Codes as bytes that an mma multiplies, f8E4M3FN, ui8 or i8 (`dialect.formats.byte_codes`), less zeros
        [.., rows, 1] in bytes, each for an equal part of columns, or, in f8E4M3FN, less an offset."""
        op = ops.DecodeBytesOp(codes.value, [zero.value for zero in zeros], Reg(element, layout).type)
        op.offset = i64(offset) if offset else None
        return Tile(op.result)

    def encode_bytes(self, numbers: Tile, kind: str, layout: Layout) -> Tile:
        """Numbers in f32 rounded to bytes of "f8e4m3" or "i8", 16 to a unit, in the order of `byte_order`."""
        return Tile(ops.EncodeBytesOp(numbers.value, text(kind), Reg(UNIT, layout).type).result)

    def encode_fragments(self, parts: Sequence[Tile], element: str, layout: Layout) -> Tile:
        """Numbers of f16 in fragments of 16 x 16, tiles side by side, in fragments of 16 x 32: rounded to f8E4M3FN, or
        to i8 by the `ROUNDER` that has been added."""
        return Tile(ops.EncodeFragmentsOp([part.value for part in parts], Reg(element, layout).type).result)

    def lookup(self, codes: Tile, table: Memory, element: str) -> Tile:
        """Returns the number of each code, from the table that `fill_table` made for the same format and element. Do
        not free the table before the numbers are used."""
        return Tile(ops.LookupOp(codes.value, table.value, Reg(element, codes.layout).type).result)

    def encode(self, numbers: Tile, format: DType, there: Tile | None = None) -> Tile:
        """Returns codes, given as numbers in i8, packed as they lie in memory: `view` shows them as units.

        there: conditions; where they do not hold, all bits are 0.
        """
        conditions = [] if there is None else [there.value]
        return Tile(ops.EncodeOp(numbers.value, conditions, Reg(format, numbers.layout).type).result)

    def cast(self, tile: Tile, element: str, kind: str = "float") -> Tile:
        """The elements as another type; kind: "float", from integers "signed" or "unsigned", from bytes "e4m3" or
        "e8m0"."""
        if tile.reg.element == element:
            return tile
        reg = Reg(element, tile.layout)
        return Tile(ops.CastOp(tile.value, text(kind), reg.type).result)

    def look_up(self, places: Tile, table: DType) -> Tile:
        """The numbers at places, which are bytes, in the table of a format of 8 bits, as f32."""
        op = ops.CastOp(places.value, text("table"), Reg("f32", places.layout).type)
        op.format = format_attr(table)
        return Tile(op.result)

    def lookup_bytes(self, places: Tile, table: Memory) -> Tile:
        """The same from a table in shared memory."""
        return Tile(ops.LookupBytesOp(places.value, table.value, Reg("f32", places.layout).type).result)

    def raise_bits(self, tile: Tile, first: int, bits: int) -> Tile:
        """The unsigned number in some bits of every byte, plus `ops.raised_power` of the first, in f32."""
        return Tile(ops.RaiseBitsOp(tile.value, i64(first), i64(bits), Reg("f32", tile.layout).type).result)

    def round_to(self, a: Tile, kind: str) -> Tile:
        """Numbers in f32 rounded to those of "f8e4m3" or "i8", the largest of which they do not exceed."""
        return Tile(ops.RoundToOp(a.value, text(kind), a.reg.type).result)
