"""From packed words to f32 on the host: which codes a vector of words holds, and how to decode them.

The 64 bytes of a unit that belong to lanes g*4 .. g*4+3 are sixteen words, a vector<16xi32>. Brought into the order
of words of a run (which they are in where a run is one word), element e is of lane e // 4 and run e % 4: all elements
have the same registers at the same places. Even registers are of row g, odd ones of row g + 8, in the same columns.

`ChunkMap` says where every decoded element comes from; it is read off `dialect.formats.packing`, nothing is restated.
The activation is brought into that order once per call, so that a decoded vector meets its activations in one
contiguous vector. A decoder may return a code times a power of two: of an integer left in place in its word, the
activation takes the opposite power, which costs nothing per weight and is exact where the result is a normal f32; of a
float with another format's bias, the sum of a group's products does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lowbit.dialect.bindings import arith, ir, llvm, vector
from lowbit.dialect.formats.byte_codes import LARGEST
from lowbit.dialect.formats.dtypes import DType, dtype
from lowbit.dialect.formats.packing import BLOCK_K, UNIT_BYTES, WORDS_PER_UNIT, Packing, run_of
from lowbit.dialect.spec import MatmulSpec
from lowbit.passes.cpu.vector_ops import (
    LANES,
    Value,
    at,
    bits_and,
    constant,
    constants,
    f32,
    gather,
    i,
    load,
    pointer,
    shift_left,
    shift_right,
    take,
    vec,
)

Isa = Literal["generic", "avx2", "avx512", "avx512bf16"]
"""What the host has beyond LLVM's portable vectors: a permutation of 8 or 16 f32 by a vector of indices, and products
of bf16."""

_PERMUTE: dict[Isa, tuple[str, int]] = {
    "avx2": ("llvm.x86.avx2.permps", 8),
    "avx512": ("llvm.x86.avx512.permvar.sf.512", 16),
    "avx512bf16": ("llvm.x86.avx512.permvar.sf.512", 16),
}
_MOST_PERMUTES = 4  # of one vector of indices; beyond, a gather is no slower
_MOST_ENTRIES = 128  # of a table of bf16
_PREFETCH = 8192  # bytes ahead. The words of a row lie 512 bytes apart, no stream that hardware sees: to 1.8x
_HALVES = 0x00010001  # times a 16-bit mask: that mask in both halves of a word
TABLE = "lowbit_table"
SCALE_TABLE = "lowbit_scale_table"


def multiplies_bf16(spec: MatmulSpec, isa: Isa) -> bool:
    """Whether many tokens are multiplied in bf16, which takes half the time of f32."""
    return isa == "avx512bf16" and spec.act == "bf16"


def pair_table(spec: MatmulSpec, isa: Isa) -> NDArray[np.float64] | None:
    """The values of stored codes where few tokens are multiplied in bf16, too, else None: where bf16 holds them all,
    and they are so few that to look them up is faster than to compute them in f32."""
    t = spec.dtype
    stored = np.arange(t.codes) + least_code(spec) if t.kind in ("uint", "int") else t.values()
    narrow = (stored.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    exact = np.array_equal(narrow, stored, equal_nan=True)
    return stored.astype(np.float64) if multiplies_bf16(spec, isa) and exact and t.codes <= _MOST_ENTRIES else None


def least_code(spec: MatmulSpec) -> int:
    """Value less stored code. Signed integers are stored in offset binary; integer zeros are stored less the format's
    least value, and then the two offsets cancel."""
    t = spec.dtype
    return -(t.codes // 2) if t.kind == "int" and spec.zeros != "int" else 0


@dataclass(frozen=True)
class Container:
    """An IEEE type into whose bits a float code is moved."""

    width: int
    exponent: int

    @property
    def mantissa(self) -> int:
        return self.width - 1 - self.exponent

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1


F16 = Container(16, 5)
F32 = Container(32, 8)


def container(t: DType) -> Container:
    """f16 where it has room: the conversion to f32 is exact and, unlike an f32 multiplication, as fast for
    subnormals. Without inf and NaN in the format all 31 exponents but the last are free."""
    return F16 if t.exponent < F16.exponent or t.has_inf else F32


@dataclass(frozen=True)
class ChunkMap:
    """Where the decoded vectors of a chunk come from. A *step* is a register of a run for row g, the next one for
    row g + 8, and yields two vectors of 16."""

    packing: Packing
    type: DType

    @property
    def steps(self) -> int:
        return len(run_of(self.packing.bits)) // 2

    def position(self, step: int) -> int:
        """The bit that the codes of a step are brought to in both halves of their words, so that one factor serves
        both rows: where the even register has them, which the odd one follows closely."""
        pieces = run_of(self.packing.bits)[2 * step]
        return pieces[0].shift if len(pieces) == 1 else 0

    @property
    def interleaved(self) -> bool:
        """Whether the two halves of a word become neighbours, as in a conversion of 32 f16; else the low
        halves make the first vector and the high halves the second."""
        return self.type.kind == "float" and container(self.type) is F16

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """Columns in the chunk of the two codes of every element: int64 [steps, 16, 2]."""
        fragment = Packing.fragment_order() % BLOCK_K
        result = np.empty((self.steps, LANES, 2), np.int64)
        for block, register in np.ndindex(self.packing.chunk // BLOCK_K, 4):
            word, number = self.packing.place(block, register)
            run = word // self.packing.units
            for lane in range(LANES // WORDS_PER_UNIT):
                codes = fragment[lane, 2 * register : 2 * register + 2]
                result[number // 2, lane * WORDS_PER_UNIT + run] = block * BLOCK_K + codes
        return result

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """Column in the chunk of every element of the vectors: int64 [steps, 2, 16]."""
        result = self.pairs if self.interleaved else np.moveaxis(self.pairs, -1, -2)
        return result.reshape(self.steps, 2, LANES)

    @cached_property
    def exponents(self) -> NDArray[np.int64]:
        """The power of two by which a vector must be multiplied to be the codes' values: [steps, 2]."""
        t, result = self.type, np.zeros((self.steps, 2), np.int64)
        if t.kind in ("uint", "int"):
            result[:] = [(-self.position(step), -self.position(step) - 16) for step in range(self.steps)]
        elif self.interleaved:
            result[:] = F16.bias - t.bias
        return result

    @property
    def late_exponent(self) -> int:
        """The power of two that sums of products take: of float codes, since x times it may be out of range."""
        return int(self.exponents.max()) if self.type.kind == "float" else 0

    @property
    def early_exponents(self) -> NDArray[np.int64]:
        """The power of two that the activation takes, [steps, 2]: of integers in place; none is above 0."""
        return self.exponents - self.late_exponent

    def groups(self, step: int, which: int) -> tuple[int, ...]:
        """Group within the chunk of the 16 elements of a vector."""
        return self._groups(self.columns[step, which])

    def pair_groups(self, step: int) -> tuple[int, ...]:
        """Group within the chunk of the 16 pairs of a step: both are in one, as neighbours."""
        return self._groups(self.pairs[step, :, 0])

    def _groups(self, columns: NDArray[np.int64]) -> tuple[int, ...]:
        g = self.packing.padded_group
        size = self.packing.chunk if g is None else min(g, self.packing.chunk)
        return tuple(int(c) // size for c in columns)


class ChunkReader:
    """Decodes one row of one chunk. `base` is the address of the words of lanes g*4 .. g*4+3 in its unit 0;
    `odd` is 1 for row g + 8, else 0."""

    def __init__(self, chunk_map: ChunkMap, isa: Isa, base: Value, odd: int) -> None:
        self.map = chunk_map
        self.isa: Isa = isa
        self._base = base
        self._odd = odd
        self._units: dict[int, Value] = {}
        self._words: dict[int, Value] = {}

    def vectors(self, step: int) -> list[Value]:
        """The two vectors of a step: vector<16xf32>, to be multiplied by 2**exponents."""
        position = self.map.position(step)
        return decode(self.map.type, self._codes(step, position), position, self.isa)

    def integers(self, step: int) -> Value:
        """The stored codes of a step, in pairs as they lie in memory: vector<32xi16>."""
        return vector.bitcast(vec(i(16), 2 * LANES), self._codes(step, 0))

    def _codes(self, step: int, position: int) -> Value:
        """The codes of a step at a bit of both halves of their words, among zeros: vector<16xi32>."""
        result = constant(vec(i(32)), 0)
        for piece in run_of(self.map.packing.bits)[2 * step + self._odd]:
            place = position + piece.low
            moved = shift_right(self._run_word(piece.word), piece.shift - place)
            field = bits_and(moved, (((1 << piece.bits) - 1) << place) * _HALVES)
            result = arith.ori(result, field)
        return result

    def pairs(self, step: int, table: NDArray[np.float64]) -> Value:
        """The entries of a table for the codes of a step, in pairs as they lie in memory: vector<32xbf16>."""
        pieces = run_of(self.map.packing.bits)[2 * step + self._odd]
        if len(pieces) == 1:  # what stands above a code, the lookup does not see
            words = vector.bitcast(vec(i(16), 2 * LANES), self._run_word(pieces[0].word))
            return look_up_bf16(table, shift_right(words, pieces[0].shift))
        return look_up_bf16(table, self.integers(step))

    def _run_word(self, number: int) -> Value:
        """Word `number` of sixteen runs."""
        if number not in self._words:
            sources = [divmod(run * self.map.packing.units + number, WORDS_PER_UNIT) for run in range(WORDS_PER_UNIT)]
            result = self._unit(sources[0][0])
            for unit in dict(sources):
                # Of the four elements of a lane those whose word is in this unit; the others as they are.
                order = [LANES + word if source == unit else run for run, (source, word) in enumerate(sources)]
                lanes = range(0, LANES, WORDS_PER_UNIT)
                result = vector.shuffle(result, self._unit(unit), [lane + e for lane in lanes for e in order])
            self._words[number] = result
        return self._words[number]

    def _unit(self, unit: int) -> Value:
        """The words of a unit, loaded once."""
        if unit not in self._units:
            address = at(self._base, byte=unit * UNIT_BYTES)
            llvm.intr_prefetch(at(address, byte=_PREFETCH), rw=0, hint=3, cache=1)
            self._units[unit] = load(vec(i(32)), address)
        return self._units[unit]


def decode(t: DType, word: Value, position: int, isa: Isa) -> list[Value]:
    """Two codes per word, at bits `position` and 16 + `position` among zeros, to two vector<16xf32>."""
    if t.kind in ("uint", "int"):
        # Left in place: code * 2**position of an even pair is below 2**31: the signed conversion is right.
        return [arith.sitofp(vec(f32()), bits_and(word, half)) for half in (0x0000FFFF, 0xFFFF0000)]
    if t.kind == "table":
        return [_look_up(t, bits_and(shift_right(word, position + h), t.codes - 1), isa) for h in (0, 16)]
    if container(t) is F16:
        wide = decode_half(t, vector.bitcast(vec(i(16), 2 * LANES), word), position)
        return [take(wide, range(start, start + LANES)) for start in (0, LANES)]
    scale = constant(vec(f32()), 2.0 ** (F32.bias - t.bias))
    placed = [_place(t, F32, word, position + h) for h in (0, 16)]
    return [arith.mulf(vector.bitcast(vec(f32()), x), scale) for x in placed]


def decode_half(t: DType, codes: Value, position: int) -> Value:
    """Float codes in 16-bit elements to as many f32, to be multiplied by 2**(F16.bias - t.bias)."""
    lanes = ir.VectorType(codes.type).shape[0]
    bits = _place(t, F16, codes, position)
    if t.has_nan and not t.has_inf:  # f8e4m3: S.1111.111 is NaN, in f16 an ordinary number
        top = constant(codes.type, ((1 << (t.bits - 1)) - 1) << (F16.mantissa - t.mantissa))
        is_nan = arith.cmpi(arith.CmpIPredicate.eq, bits_and(bits, 0x7FFF), top)
        bits = arith.select(is_nan, constant(codes.type, 0x7FFF), bits)
    return arith.extf(vec(f32(), lanes), vector.bitcast(vec(ir.F16Type.get(), lanes), bits))


def decode_e4m3(codes: Value) -> Value:
    """vector<16xi8> of f8e4m3 scales to vector<16xf32>."""
    t = dtype("f8e4m3")
    wide = decode_half(t, arith.extui(vec(i(16)), codes), 0)
    return arith.mulf(wide, constant(wide.type, 2.0 ** (F16.bias - t.bias)))


def decode_e8m0(codes: Value) -> Value:
    """vector<16xi8> of powers of two, 2**(code - 127), to vector<16xf32>; 255 is NaN (OCP MX 1.0, 5.4.1)."""
    wide = arith.extui(vec(i(32)), codes)

    def equals(code: int) -> Value:
        return arith.cmpi(arith.CmpIPredicate.eq, wide, constant(wide.type, code))

    bits = shift_left(wide, F32.mantissa)
    bits = arith.select(equals(0), constant(wide.type, 1 << (F32.mantissa - 1)), bits)  # 2**-127 is subnormal
    bits = arith.select(equals(255), constant(wide.type, 0x7FC00000), bits)
    return vector.bitcast(vec(f32()), bits)


def nearest_e4m3(value: Value) -> Value:
    """vector<16xf32> rounded to the nearest numbers of f8e4m3, ties to even, and to 448 in magnitude at most.

    A number is rounded by adding one so large that its unit in the last place is that of the result.
    """
    bits, real = vec(i(32)), vec(f32())
    for sign, beyond in ((1.0, arith.CmpFPredicate.OGT), (-1.0, arith.CmpFPredicate.OLT)):  # NaN is neither
        most = constant(real, sign * LARGEST["f8e4m3"])
        value = arith.select(arith.cmpf(beyond, value, most), most, value)
    t = dtype("f8e4m3")
    magnitude = bits_and(vector.bitcast(bits, value), 0x7FFFFFFF)
    normal = arith.maxsi(magnitude, constant(bits, (F32.bias + 1 - t.bias) << F32.mantissa))  # subnormals are as coarse
    power = vector.bitcast(real, bits_and(normal, 0xFF << F32.mantissa))
    large = arith.mulf(power, constant(real, 1.5 * 2.0 ** (F32.mantissa - t.mantissa)))
    return arith.subf(arith.addf(value, large), large)


def nearest_i8(value: Value) -> Value:
    """vector<16xf32> rounded to the nearest integers, ties to even; in -128..127, as folded weights are."""
    large = constant(vec(f32()), 1.5 * 2.0**F32.mantissa)
    return arith.subf(arith.addf(value, large), large)


def _place(t: DType, c: Container, codes: Value, position: int) -> Value:
    """Sign and exponent+mantissa of the code at `position` at their places in a container, the rest zero.

    The arithmetic shift opens the gap between sign and exponent; the mask clears what it filled in.
    """
    gap = c.exponent - t.exponent
    bits = shift_left(codes, c.width - t.bits - position)
    if not gap:
        return bits
    magnitude = ((1 << (t.bits - 1)) - 1) << (c.mantissa - t.mantissa)
    return bits_and(shift_right(bits, gap, signed=True), 1 << (c.width - 1) | magnitude)


def look_up_scales(places: Value) -> Value:
    """The numbers at vector<16xi8> of places in the table of scales: vector<16xf32>."""
    return gather(llvm.mlir_addressof(pointer(), SCALE_TABLE), arith.extui(vec(i(32)), places))


def look_up_bf16(table: NDArray[np.float64], index: Value) -> Value:
    """Entries of a table of 2**bits numbers that bf16 holds, at the low `bits` bits of a vector<32xi16>, from
    registers: one permutation up to 32 entries, of two registers up to 64, and a blend for each doubling beyond."""
    entries = np.resize(table, max(len(table), 2 * LANES)).astype(np.float32).view(np.uint32) >> 16
    lanes = 2 * LANES

    def register(start: int) -> Value:
        values = entries[start : start + lanes].astype(np.uint16)
        type_ = vec(i(16), lanes)
        return arith.constant(type_, ir.DenseElementsAttr.get(values, type=type_))

    if len(entries) == lanes:
        found = [llvm.call_intrinsic(index.type, "llvm.x86.avx512.permvar.hi.512", [register(0), index], [], [])]
    else:
        name = "llvm.x86.avx512.vpermi2var.hi.512"
        found = [
            llvm.call_intrinsic(index.type, name, [register(s), index, register(s + lanes)], [], [])
            for s in range(0, len(entries), 2 * lanes)
        ]
    return vector.bitcast(vec(ir.BF16Type.get(), lanes), _blend(found, index, bit=6, width=16))


def _blend(found: list[Value], index: Value, bit: int, width: int) -> Value:
    """One of the vectors for every element, by the bits of its index from `bit` on."""
    while len(found) > 1:
        sign = shift_left(index, width - 1 - bit)  # the bit as the sign, which is what a blend looks at
        odd = arith.cmpi(arith.CmpIPredicate.slt, sign, constant(index.type, 0))
        found = [arith.select(odd, second, first) for first, second in zip(found[::2], found[1::2])]
        bit += 1
    return found[0]


def _look_up(t: DType, index: Value, isa: Isa) -> Value:
    """Table entries at a vector<16xi32> of indices: permuted in registers if they fit, else gathered."""
    name, lanes = _PERMUTE.get(isa, ("", 0))
    entries = np.resize(t.values(), max(t.codes, lanes))
    if len(entries) > _MOST_PERMUTES * lanes:
        return gather(llvm.mlir_addressof(pointer(), TABLE), index)

    def permute(table: NDArray[np.float64]) -> Value:
        values = constants(f32(), table.tolist())
        parts = [take(index, range(s, s + lanes)) for s in range(0, LANES, lanes)]
        looked = [llvm.call_intrinsic(values.type, name, [values, part], [], []) for part in parts]
        return looked[0] if len(looked) == 1 else vector.shuffle(*looked, list(range(LANES)))

    found = [permute(entries[s : s + lanes]) for s in range(0, len(entries), lanes)]
    return _blend(found, index, bit=lanes.bit_length() - 1, width=32)
