"""One token in integers (`dialect.formats.integer_limbs`)."""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import activation, expect, fragments, in_range, verifier
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.integer_limbs import BITS, HALVES, LIMBS, PIECE, takes
from lowbit.dialect.formats.packing import BLOCK_K, ROWS
from lowbit.dialect.layouts.fragments import MMA_M16N8_PAIRS, MMA_M16N8K16_A
from lowbit.dialect.layouts.layout import Layout, spatial
from lowbit.dialect.types import FormatAttr, Lowbit, Reg, RegType, Shared, SharedType, read_format


def _check_limbs(limbs: Shared, unit: Reg) -> tuple[int, int]:
    """Warps and pieces of limbs [warps, pieces, 4, 4, 8] and their units [warps, 1, pieces]."""
    expect(limbs.element == "i32", "element of the limbs", "i32", limbs.element)
    rank = len(limbs.shape)
    lanes = (LIMBS, 4, HALVES)
    expect(rank == 5 and limbs.shape[2:] == lanes, "limbs", f"[warps, pieces, {LIMBS}, 4, {HALVES}]", limbs.shape)
    aligned = limbs.strides[-1] == 1 and all(stride % 4 == 0 for stride in limbs.strides[:-1])
    expect(aligned, "strides of the limbs", "multiples of 4 (16 bytes) and 1 for the last dim", list(limbs.strides))
    warps, pieces = limbs.shape[:2]
    layout = spatial(warps, 1, 1).local(1, 1, pieces).replicated(32)
    _check_f32(unit, layout, "unit")
    return warps, pieces


def _check_f32(tile: Reg, layout: Layout, what: str) -> None:
    expect(tile == Reg("f32", layout), what, f"f32 laid out as {layout}", f"{tile.element} as {tile.layout}")


def _check_limb_format(format_: Any) -> DType:
    fits = isinstance(format_, DType) and takes(format_)
    expect(fits, "codes", f"integers of {', '.join(map(str, BITS))} bits", format_)
    return format_


def _check_pieces(op: Any, columns: int) -> None:
    start = in_range(op.start, "start", 0, columns - PIECE)
    size = in_range(op.columns, "columns", PIECE, columns - start)
    expect(start % PIECE == 0 and size % PIECE == 0, "start and columns", f"multiples of {PIECE}", (start, size))


class SplitLimbsOp(Lowbit.Operation, name="split_limbs"):
    """Writes x [warps, 1, k] as limbs for codes of `format`, every warp its own row, and gives the unit of every
    piece.

    A piece with an infinity or a NaN has NaN for a unit, and so has all that is made of it.
    """

    x: ext.Operand[SharedType]
    limbs: ext.Operand[SharedType]
    format: FormatAttr
    unit: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        x, limbs = Shared.of(op.x.type), Shared.of(op.limbs.type)
        _check_limb_format(read_format(op.format))
        warps, pieces = _check_limbs(limbs, Reg.of(op.unit.type))
        activation(x.element, "element of x")
        expect(x.shape == (warps, 1, PIECE * pieces), "x", (warps, 1, PIECE * pieces), x.shape)
        plain = x.swizzle == 0 and x.strides[-1] == 1 and x.strides[0] % 2 == 0
        expect(plain, "x", "rows in one piece that start at even columns", list(x.strides))


class LimbMmaOp(Lowbit.Operation, name="limb_mma"):
    """Columns start .. start + columns of codes [warps, m, k] times as many of x in limbs: [warps, m, 2] in f32.

    Codes are as they lie in memory: signed ones are 2^(b-1) too large. Column 0 is what the two lower limbs of x
    bring, column 1 what the upper two bring, 2^16 times too small; `join_limbs` adds them up.
    """

    a: ext.Operand[RegType]
    limbs: ext.Operand[SharedType]
    unit: ext.Operand[RegType]
    start: ir.IntegerAttr
    columns: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, d = Reg.of(op.a.type), Reg.of(op.result.type)
        _check_limb_format(a.element)
        warps, pieces = _check_limbs(Shared.of(op.limbs.type), Reg.of(op.unit.type))
        rank, k = len(a.shape), PIECE * pieces
        expect(rank == 3 and a.shape[::2] == (warps, k), "a", f"[{warps}, m, {k}]", list(a.shape))
        blocks = fragments(a.layout, MMA_M16N8K16_A, "a")
        row_blocks = a.shape[1] // ROWS
        one_warp = spatial(warps, 1, 1).local(1, row_blocks, k // BLOCK_K)
        expect(blocks == one_warp, "a", f"all rows and columns in one warp, {one_warp}", f"{blocks} (in fragments)")
        layout = spatial(warps, 1, 1).local(1, row_blocks, 1) * MMA_M16N8_PAIRS.unsqueeze(0)
        _check_f32(d, layout, "result")
        _check_pieces(op, k)


class LimbSumsOp(Lowbit.Operation, name="limb_sums"):
    """Sums of x over columns start .. start + columns, as of a row of `limb_mma` with all codes 1: [warps, 1, 2]."""

    limbs: ext.Operand[SharedType]
    unit: ext.Operand[RegType]
    format: FormatAttr
    start: ir.IntegerAttr
    columns: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        d = Reg.of(op.result.type)
        _check_limb_format(read_format(op.format))
        warps, pieces = _check_limbs(Shared.of(op.limbs.type), Reg.of(op.unit.type))
        layout = spatial(warps, 1, 1) * MMA_M16N8_PAIRS.reduce((0,)).unsqueeze(0)
        _check_f32(d, layout, "result")
        _check_pieces(op, PIECE * pieces)


class JoinLimbsOp(Lowbit.Operation, name="join_limbs", traits=[ext.Pure]):
    """Adds column 0 and 2^16 times column 1 of a sum of `limb_mma` [warps, m, 2]: [warps, m, 1]."""

    source: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, d = Reg.of(op.source.type), Reg.of(op.result.type)
        expect(a.element == "f32", "element of the source", "f32", a.element)
        fragments(a.layout, MMA_M16N8_PAIRS, "source")
        expect(a.shape[-1] == 2, "columns of the source", 2, a.shape[-1])
        layout = a.layout.reduce((a.layout.rank - 1,))
        _check_f32(d, layout, "result")
