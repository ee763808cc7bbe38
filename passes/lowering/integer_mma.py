"""Rules of `lower-tiles` for one token in integers: x to limbs in shared memory, codes to bytes, their products by
mma.m16n8k32 of u8 and s8 (`dialect.formats.integer_limbs` has the idea).

The accumulators of a piece start from the bits of the f32 1.5 * 2^23 instead of 0. Read as f32, they then are that
number plus the sum, exactly, and two fused multiply-adds make of two limbs' sums one number in units of x: no
conversion from integers, which runs at a quarter of the rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir, llvm, nvvm
from lowbit.dialect.errors import PassError
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.integer_limbs import HALVES, LIMBS, PIECE, TOP, halves
from lowbit.dialect.formats.packing import ROWS
from lowbit.dialect.types import Reg, element_bits, read_format
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.addressing import Place
from lowbit.passes.lowering.context import LoweringContext, int_attr
from lowbit.passes.lowering.fragment import Fragment
from lowbit.passes.lowering.registry import lowers

_BYTES = 0x01010101
_CARRIES = 0x00808080  # adding it, and then flipping it, makes unsigned bytes signed limbs
_LEAST = TOP + 8  # exponent fields below it are taken for it, so that units, and theirs of rows g + 8, are normal
_SPECIAL = 255  # the exponent field of inf and NaN
_NAN = 0x7FC00000
_ORIGIN = 1.5 * 2.0**23  # sums of limbs below 2^22 keep f32's exponent
_ORIGIN_BITS = 0x4B400000
_ALL_LANES = -1


@lowers(ops.SplitLimbsOp)
def split_limbs(op: Any, c: LoweringContext) -> None:
    """Each lane loads four columns of a piece, and stores a word of each limb."""
    c.pending.finish_reads()
    reg, bits = Reg.of(op.unit.type), read_format(op.format).bits
    x, limbs = c.places[op.x], c.places[op.limbs]
    q, half = c.thread_digit(4), c.thread_digit(8, 4)
    per_word = 4 // bits
    word = arith.divui(half, emit.constant(per_word))
    within = arith.remui(half, emit.constant(per_word))
    shift = arith.muli(within, emit.constant(2 * bits))
    column = arith.addi(arith.muli(word, emit.constant(64 // bits)), arith.muli(within, emit.constant(8)))
    column = arith.addi(column, arith.muli(q, emit.constant(2)))
    source = emit.offset_bytes(_of_warp(x, c), dynamic=arith.muli(column, emit.constant(2)))
    *_, piece_bytes, digit_bytes, lane_bytes, _ = (4 * stride for stride in limbs.type.strides)
    place = arith.addi(arith.muli(q, emit.constant(lane_bytes)), arith.muli(half, emit.constant(4)))
    target = emit.offset_bytes(_of_warp(limbs, c), dynamic=place)
    pair = ir.VectorType.get([2], ir.Type.parse(str(x.type.element)))
    units: list[Any] = []
    for piece in range(reg.shape[-1]):
        at = [emit.offset_bytes(source, static=2 * (PIECE * piece + more)) for more in (0, 32 // bits)]
        pairs = [llvm.load(pair, address, alignment=4) for address in at]
        values = [arith.extf(ir.F32Type.get(), emit.element(p, i)) for i in range(2) for p in pairs]
        unit, factor = _scale(values, shift)
        units.append(unit)
        for limb, word_of_digit in enumerate(_limbs([_round(arith.mulf(v, factor)) for v in values])):
            static = piece * piece_bytes + limb * digit_bytes
            llvm.store(word_of_digit, emit.offset_bytes(target, static=static), alignment=4)
    c.tiles[op.unit] = Fragment(reg, "scalar", units.__getitem__)


@lowers(ops.LimbMmaOp)
def limb_mma(op: Any, c: LoweringContext) -> None:
    codes = c.tiles[op.a]
    reg, format_ = Reg.of(op.result.type), codes.reg.element
    if not isinstance(format_, DType) or codes.kind != "word":
        raise PassError(f"lower-tiles: lowbit.limb_mma multiplies the words of codes, not {codes.reg.element}")
    bits = format_.bits
    per_row = codes.count * ROWS // reg.shape[1]
    per_piece = PIECE * bits // 64
    terms = _Terms(op, c, bits)
    products: dict[int, list[Any]] = {}

    def of_piece(row_block: int, piece: int) -> list[Any]:
        first = row_block * per_row + piece * per_piece
        words = [codes.register(first + i) for i in range(per_piece)]
        places = [(half.word, half.shift + more) for half in halves(bits) for more in (0, bits)]
        a = [emit.mask(words[word], ((1 << bits) - 1) * _BYTES << shift) for word, shift in places]
        return terms.product(piece, a)

    def make(slot: int) -> Any:
        row_block, row = divmod(slot, 2)  # rows g and g + 8
        if row_block not in products:
            by_row = zip(*(of_piece(row_block, piece) for piece in terms.pieces), strict=True)
            products[row_block] = [_sum(numbers) for numbers in by_row]
        return products[row_block][row]

    _read(op, c, Fragment(reg, "scalar", make))


@lowers(ops.LimbSumsOp)
def limb_sums(op: Any, c: LoweringContext) -> None:
    bits = read_format(op.format).bits
    terms = _Terms(op, c, bits)

    def make(_: int) -> Any:
        zero = emit.constant(0)
        ones = [a for half in halves(bits) for a in (emit.constant(_BYTES << half.shift), zero)]
        return _sum([terms.product(piece, ones)[0] for piece in terms.pieces])

    _read(op, c, Fragment(Reg.of(op.result.type), "scalar", make))


@lowers(ops.JoinLimbsOp)
def join_limbs(op: Any, c: LoweringContext) -> None:
    source = c.tiles[op.source]

    def make(slot: int) -> Any:
        mine = source.scalar(slot)
        other = emit.from_lane_beside(mine, 1)
        is_upper = arith.cmpi(arith.CmpIPredicate.ne, c.thread_digit(2), emit.constant(0))
        lower, upper = arith.select(is_upper, other, mine), arith.select(is_upper, mine, other)
        return emit.fma(upper, emit.real(2.0**16, ir.F32Type.get()), lower)

    joined = Fragment(Reg.of(op.result.type), "scalar", make)
    joined.force()  # here, where all lanes are: they shuffle
    c.tiles[op.result] = joined


def _read(op: Any, c: LoweringContext, fragment: Fragment) -> None:
    """Records the result of an operation, which reads limbs that may be overwritten after the next barrier."""
    c.pending.add_read(fragment)
    c.tiles[op.result] = fragment


def _of_warp(place: Place, c: LoweringContext) -> Any:
    """Returns where the part of a buffer [warps, ..] begins that is this warp's."""
    warps = place.type.shape[0]
    if warps == 1:
        return place.base
    size = place.type.strides[0] * element_bits(place.type.element) // 8
    return emit.offset_bytes(place.base, dynamic=arith.muli(c.thread_digit(warps, 32), emit.constant(size)))


class _Terms:
    """Products with the limbs of x that one operation reads, each piece's fragments of B loaded once."""

    def __init__(self, op: Any, c: LoweringContext, bits: int) -> None:
        self._context = c
        self._limbs, self._units = c.places[op.limbs], c.tiles[op.unit]
        self._bits = bits
        start, columns = int_attr(op, "start"), int_attr(op, "columns")
        self.pieces = range(start // PIECE, (start + columns) // PIECE)
        self._base: Any = None
        self._words: dict[int, list[Any]] = {}
        self._factors: dict[int, list[tuple[Any, Any, Any]]] = {}

    def product(self, piece: int, a: Sequence[Any]) -> list[Any]:
        """Returns the product of two limbs of x in a piece, rows g and g + 8 in f32; a: two registers for each half."""
        b = self._fragments(piece)
        sums = [emit.constant(_ORIGIN_BITS)] * 4
        for half in range(0, HALVES, 2):
            sums = _mma(a[2 * half : 2 * half + 4], b[half : half + 2], sums)
        numbers = [emit.bitcast(ir.F32Type.get(), x) for x in sums]
        result: list[Any] = []
        for row, (upper, both, unit) in enumerate(self._scales(piece)):
            high = emit.fma(numbers[2 * row + 1], upper, both)  # (256 h - origin) * unit, exactly
            result.append(emit.fma(numbers[2 * row], unit, high))
        return result

    def _fragments(self, piece: int) -> list[Any]:
        """Lane 4 g + q loads what it needs of limb g % 4: columns 4 to 7 of B are columns 0 to 3 again."""
        if piece not in self._words:
            _, piece_bytes, digit_bytes, lane_bytes, _ = (4 * stride for stride in self._limbs.type.strides)
            if self._base is None:
                limb, q = self._context.thread_digit(LIMBS, 4), self._context.thread_digit(4)
                lane = arith.muli(q, emit.constant(lane_bytes))
                place = arith.addi(arith.muli(limb, emit.constant(digit_bytes)), lane)
                self._base = emit.offset_bytes(_of_warp(self._limbs, self._context), dynamic=place)
            vector = ir.VectorType.get([4], emit.integer())
            at = [emit.offset_bytes(self._base, static=piece * piece_bytes + 4 * i) for i in range(0, HALVES, 4)]
            loaded = [llvm.load(vector, address, alignment=16) for address in at]
            self._words[piece] = [emit.element(v, i) for v in loaded for i in range(4)]
        return self._words[piece]

    def _scales(self, piece: int) -> list[tuple[Any, Any, Any]]:
        """Returns for rows g and g + 8: 256 units, minus 257 origins, and a unit, smaller where codes are too large."""
        if piece not in self._factors:
            unit = self._units.scalar(piece)

            def times(factor: float) -> Any:
                return arith.mulf(unit, emit.real(factor, ir.F32Type.get()))

            self._factors[piece] = [
                (times(256 * size), times(-257 * _ORIGIN * size), times(size)) for size in (1.0, 2.0**-self._bits)
            ]
        return self._factors[piece]


def _scale(values: Sequence[Any], shift: Any) -> tuple[Any, Any]:
    """The unit of a piece, of which each lane has some values, and what to multiply this lane's by, which meet codes
    that are 2^shift too large."""
    f32 = ir.F32Type.get()
    top = None
    for value in values:
        magnitude = emit.mask(emit.bitcast(emit.integer(), value), 0x7FFFFFFF)
        top = magnitude if top is None else arith.maxui(top, magnitude)
    kind = ir.Attribute.parse("#nvvm<reduction_kind umax>")
    top = nvvm.redux_sync(top, kind, emit.constant(_ALL_LANES))
    field = emit.shift_right(top, 23)
    is_special = arith.cmpi(arith.CmpIPredicate.eq, field, emit.constant(_SPECIAL))
    field = arith.maxui(field, emit.constant(_LEAST))
    unit = emit.shift_right(arith.subi(field, emit.constant(TOP)), -23)
    unit = arith.select(is_special, emit.constant(_NAN), unit)
    factor = arith.subi(arith.subi(emit.constant(254 + TOP), field), shift)
    return emit.bitcast(f32, unit), emit.bitcast(f32, emit.shift_right(factor, -23))


def _sum(terms: Sequence[Any]) -> Any:
    return reduce(arith.addf, terms)


def _round(x: Any) -> Any:
    """Returns x rounded to the nearest integer."""
    return llvm.inline_asm(emit.integer(), [x], "cvt.rni.s32.f32 $0, $1;", "=r,f", asm_dialect=0)


def _limbs(numbers: Sequence[Any]) -> list[Any]:
    """Word d: limb d of four numbers, the first in the lowest byte."""
    carries = emit.constant(_CARRIES)
    x = [arith.xori(arith.addi(number, carries), carries) for number in numbers]
    # Limbs 0 and 1 of two numbers, and limbs 2 and 3
    selectors = 0x5140, 0x7362
    halves_of_pairs = [[emit.permute_bytes(x[i], x[i + 1], selector) for i in (0, 2)] for selector in selectors]
    return [emit.permute_bytes(a, b, selector) for a, b in halves_of_pairs for selector in (0x5410, 0x7632)]


def _mma(a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Any]:
    """One mma.sync.m16n8k32 of u8 and s8 (PTX ISA 9.7.14.5.10)."""
    result = nvvm.mma_sync(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        ir.Attribute.parse("#nvvm.shape<m = 16, n = 8, k = 32>"),
        nvvm.MMALayout.row,
        nvvm.MMALayout.col,
        list(a),
        list(b),
        list(c),
        int_overflow_behavior=nvvm.MMAIntOverflow.wrapped,
        multiplicand_a_ptx_type=nvvm.MMATypes.u8,
        multiplicand_b_ptx_type=nvvm.MMATypes.s8,
    )
    return [llvm.extractvalue(emit.integer(), result, [i]) for i in range(4)]
