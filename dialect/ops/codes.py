"""Tiles of codes: to numbers and back."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import Mismatch, expect, fragments, in_range, real, same_element, verifier, within_warp
from lowbit.dialect.formats.byte_codes import Compute, fits
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.packing import BLOCK_K
from lowbit.dialect.formats.raw_codes import OFFSETS
from lowbit.dialect.layouts.fragments import MMA_M16N8K16_A, MMA_M16N8K32_A
from lowbit.dialect.layouts.layout import Layout, local
from lowbit.dialect.ops.common import check_offset, check_rounding, check_shifted, check_table
from lowbit.dialect.optional import Choice, Optional
from lowbit.dialect.types import CONDITION, UNIT, Lowbit, Reg, RegType, Shared, SharedType

_OF_NUMBERS = ("f8E4M3FN", "i8")  # what numbers of f16 may become in `encode_fragments`

BYTES: dict[str, Compute] = {"f8E4M3FN": "f8e4m3", "ui8": "i8", "i8": "i8"}
"""By the type of operand a in the IR, the type in which bytes are multiplied (`dialect.formats.byte_codes`)."""


def _check_subtraction(op: Any, format_: DType, result: Reg) -> None:
    """Raises Mismatch unless the number that `decode_bytes` subtracts fits the format and the result."""
    has_offset = op.offset is not None
    expect(not (op.zeros and has_offset), "zeros and offset", "one of them at most", "both")
    if not op.zeros and not has_offset:
        allowed = result.element != "i8" or format_.kind == "int"
        expect(allowed, "element of the result with nothing to subtract", "f8E4M3FN or ui8", "i8")
        return
    check_shifted(format_)
    expect(result.element != "ui8", "element of the result with a sign", "f8E4M3FN or i8", "ui8")
    if has_offset:
        expect(result.element == "f8E4M3FN", "element of the result with an offset", "f8E4M3FN", result.element)
        in_range(op.offset, "offset", 1, 1 << (format_.bits - 1))
        return
    expect(format_.bits < 8, "format with zeros", "one of up to 7 bits", format_.name)
    _check_parts(op.zeros, "zeros", "i8", result.layout, MMA_M16N8K32_A)


def _check_parts(tiles: Sequence[Any], what: str, element: Any, layout: Layout, fragment: Layout) -> None:
    """Raises Mismatch unless tiles have a number for each row, and each is for an equal part of the columns.

    layout, fragment   of what they are subtracted from or added to
    """
    fragments_ = fragments(layout, fragment, "result")
    within_warp(fragments_, fragments_.rank - 1, f"columns with {what}")
    parts, blocks = len(tiles), fragments_.shape[-1]
    wanted = f"a number that divides the {blocks} blocks of {fragment.shape[1]} columns"
    expect(blocks % parts == 0, what, wanted, parts)
    rows = layout.reduce((layout.rank - 1,))
    for reg in (Reg.of(tile.type) for tile in tiles):
        same_element(element, reg.element, f"element of the {what}")
        expect(reg.layout == rows, f"layout of the {what}", rows, reg.layout)


def _format(source: Reg) -> DType:
    """The format of a tile of codes."""
    if not isinstance(source.element, DType):
        raise Mismatch(f"source: expected codes of a low-bit format, got {source.element}")
    return source.element


class DecodeOp(Lowbit.Operation, name="decode", traits=[ext.Pure]):
    """decode(code) * 2^-exponent of every code, exactly (tables: rounded to the element of the result).

    `offset` says what becomes of the offset that the decoding of integers adds: it is "subtracted", or "deferred"
    (which `offset_sums` makes up for), or codes are left "raw", as they are stored (`dialect.formats.raw_codes`).

    `shifts` are added to the codes: tiles [.., rows, 1], each for an equal part of the columns, in order. A shift is
    minus an integer zero point of a `MatmulSpec` (`zero_span`): the sum is exact then, and costs nothing where the
    subtraction that decodes an integer can do it, too.
    """

    source: ext.Operand[RegType]
    shifts: Sequence[ext.Operand[RegType]]
    exponent: ir.IntegerAttr
    offset = Choice(*OFFSETS)
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(isinstance(a.element, DType), "source", "codes of a low-bit format", a.element)
        in_range(op.exponent, "exponent", -1022, 1023)
        real(b.element, "result")
        expect(a.layout == b.layout, "layout", a.layout, b.layout)
        check_offset(op.offset, a.element, b.element)
        if not op.shifts:
            return
        check_shifted(a.element)
        expect(op.offset == "subtracted", "offset with shifts", "subtracted", op.offset)
        _check_parts(op.shifts, "shifts", b.element, b.layout, MMA_M16N8K16_A)


class LookupOp(Lowbit.Operation, name="lookup", traits=[ext.Pure]):
    """Looks every code up in the table that `fill_table` made: decode(code) * 2^-exponent, rounded to the element.

    The table must not be freed before the numbers have been used.
    """

    source: ext.Operand[RegType]
    table: ext.Operand[SharedType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        format_ = _format(a)
        real(b.element, "result")
        expect(a.layout == b.layout, "layout", a.layout, b.layout)
        check_table(op.table, format_, str(b.element))


class LookupBytesOp(Lowbit.Operation, name="lookup_bytes", traits=[ext.Pure]):
    """The numbers (f32) at places, which are bytes (i8), in a table of 256 that `fill_table` has filled with each once.

    The table must not be freed before the numbers have been used.
    """

    source: ext.Operand[RegType]
    table: ext.Operand[SharedType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        same_element("i8", a.element, "element of the source")
        same_element("f32", b.element, "element of the result")
        expect(a.layout == b.layout, "layout", a.layout, b.layout)
        expected = Shared("i32", (256, 1), (1, 1))
        expect(Shared.of(op.table.type) == expected, "table", expected.type, op.table.type)


class EncodeOp(Lowbit.Operation, name="encode", traits=[ext.Pure]):
    """Codes, given as i8 numbers, packed into the words of a lane: what `view` then shows as units.

    there   none, or one tile of conditions: where it does not hold, all bits are 0
    """

    source: ext.Operand[RegType]
    there: Sequence[ext.Operand[RegType]]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(a.element == "i8", "element of the source", "i8", a.element)
        expect(isinstance(b.element, DType), "result", "codes of a low-bit format", b.element)
        expect(a.layout == b.layout, "layout", a.layout, b.layout)
        fragments(b.layout, MMA_M16N8K16_A, "result")
        expect(len(op.there) <= 1, "number of tiles of conditions", "0 or 1", len(op.there))
        for there in (Reg.of(tile.type) for tile in op.there):
            same_element(CONDITION, there.element, "element of the conditions")
            expect(there.layout == a.layout, "layout of the conditions", a.layout, there.layout)


class DecodeBytesOp(Lowbit.Operation, name="decode_bytes", traits=[ext.Pure]):
    """Every code as a byte that an mma of 8 bits multiplies, as `dialect.formats.byte_codes` says: f8E4M3FN, which is
    the value times 2^-e (`byte_exponent`), ui8, the code as it is stored, or, of a signed format, i8, its value times
    2^(8 - bits).

    The columns of every 16 are those that `byte_order` puts next to one another, in the order of bytes in memory.

    From integers as they are stored may be subtracted, so that they are f8E4M3FN or i8 with a sign:

    zeros   tiles [.., rows, 1] of bytes, integer zero points, each for an equal part of the columns, in order; or none
    offset  of f8E4M3FN a number, that of signed codes (`raw_codes.zero_code`), where there are no zeros
    """

    source: ext.Operand[RegType]
    zeros: Sequence[ext.Operand[RegType]]
    offset = Optional(ir.IntegerAttr, "an integer")
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        format_ = _format(a)
        expect(b.element in BYTES, "element of the result", " or ".join(BYTES), b.element)
        exact = fits(format_, BYTES[str(b.element)])
        expect(exact, "source", f"codes that are numbers of {b.element}", format_.name)
        before, after = fragments(a.layout, MMA_M16N8K16_A, "source"), fragments(b.layout, MMA_M16N8K32_A, "result")
        expected = after * local(*(1,) * (after.rank - 1), 2)
        expect(before == expected, "layout of the source (in fragments)", expected, before)
        _check_subtraction(op, format_, b)


class EncodeBytesOp(Lowbit.Operation, name="encode_bytes", traits=[ext.Pure]):
    """f32 numbers as bytes, 16 to a unit, in the order of `byte_order`: rounded to nearest even, and to the largest
    number where they are beyond it.

    `kind` is "f8e4m3" or "i8". A NaN is NaN in f8e4m3, and 0 in i8.
    """

    source: ext.Operand[RegType]
    kind: ir.StringAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        same_element("f32", a.element, "element of the source")
        same_element(UNIT, b.element, "element of the result")
        check_rounding(op.kind)
        expected = b.layout * local(*(1,) * (b.layout.rank - 1), BLOCK_K)
        expect(a.layout == expected, "layout of the source", expected, a.layout)


class EncodeFragmentsOp(Lowbit.Operation, name="encode_fragments", traits=[ext.Pure]):
    """Numbers of f16 in fragments of 16 x 16 as fragments of f8E4M3FN or i8 that an mma of 8 bits multiplies: rounded
    to nearest even, and to the largest number where they are beyond it. Integers are the lowest bytes of numbers that
    `byte_codes.ROUNDER` has rounded. The order of columns is that of `decode_bytes`.

    Sources stand side by side: each has as many of the columns of all rows.
    """

    sources: Sequence[ext.Operand[RegType]]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        result = Reg.of(op.result.type)
        expect(result.element in _OF_NUMBERS, "element of the result", " or ".join(_OF_NUMBERS), result.element)
        after = fragments(result.layout, MMA_M16N8K32_A, "result")
        last, columns = after.rank - 1, 0
        rows = after.reduce((last,))
        for source in op.sources:
            reg = Reg.of(source.type)
            same_element("f16", reg.element, "element of a source")
            before = fragments(reg.layout, MMA_M16N8K16_A, "source")
            within_warp(before, last, "columns of a source")
            expect(before.reduce((last,)) == rows, "rows of a source (in fragments)", rows, before.reduce((last,)))
            columns += reg.layout.shape[last]
        expect(columns == result.layout.shape[last], "columns of the sources", result.layout.shape[last], columns)
