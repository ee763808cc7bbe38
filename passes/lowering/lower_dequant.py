"""lower-dequant: `lowbit.decode_pair` and `decode_shifted_pair` become shifts, lop3, and a few packed floating-point
operations.

What to do is derived in `dialect.formats.recipes`; here it is written down as arith and llvm operations. Formats with a
table are in `passes.lowering.tables`, and so is `lowbit.lookup_pair`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.errors import PassError
from lowbit.dialect.formats.dtypes import DType
from lowbit.dialect.formats.raw_codes import raw_lows, zero_code
from lowbit.dialect.formats.reals import BF16, REALS, Real
from lowbit.dialect.formats.recipes import (
    Field,
    Magic,
    compute_element,
    deferred_magic,
    exponent,
    float_bytes,
    float_places,
    has_float_bytes,
    magic,
    place,
)
from lowbit.dialect.types import read_format
from lowbit.passes.base import at, each_op
from lowbit.passes.lowering import emit
from lowbit.passes.lowering.tables import lower_decode_pair, lower_lookup_pair


@dataclass(frozen=True)
class LowerDequant:
    """Expand decode_pair, decode_shifted_pair and lookup_pair into bit operations, packed arithmetic, table lookups."""

    name: ClassVar[str] = "lower-dequant"

    def run(self, module: ir.Module) -> None:
        for op in each_op(module, ops.DecodePairOp, ops.DecodeShiftedPairOp, ops.LookupPairOp):
            with ir.InsertionPoint(op), at(op):
                result = _lowered(op)
            op.result.replace_all_uses_with(result)
            op.operation.erase()


def _lowered(op: Any) -> Any:
    """Writes what an operation becomes in front of it; returns the result."""
    if isinstance(op, ops.LookupPairOp):
        return lower_lookup_pair(op)
    table = isinstance(op, ops.DecodePairOp) and read_format(op.format).kind == "table"
    return lower_decode_pair(op) if table else _Decoder(op).result()


class _Decoder:
    """Writes the operations for one pair. A 32-bit register holds both numbers (16 bits each) or one (f32)."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.format: DType = read_format(op.format)
        self.number = int(ir.IntegerAttr(op.register).value)
        self.words = list(op.words)
        self.shift = op.shift if isinstance(op, ops.DecodeShiftedPairOp) else None
        self.vector = ir.VectorType(op.result.type)
        self.real: Real = REALS[str(self.vector.element_type)]
        self.packed = self.real.bits == 16
        self.register = self.vector if self.packed else self.vector.element_type
        if compute_element(self.format, self.real.name) != self.real.name:
            raise PassError(f"lower-dequant: {self.format.name} does not fit {self.real.name}; decode it to f32")
        self.offset = op.offset if isinstance(op, ops.DecodePairOp) else "subtracted"
        # The power of two that is left to do here.
        self.rest = exponent(self.format, self.real.name) - int(ir.IntegerAttr(op.exponent).value)

    def result(self) -> Any:
        kinds = {"uint": self._integer, "int": self._integer, "float": self._float}
        make: Callable[[int], Any] = kinds[self.format.kind]
        value = make(0) if self.packed else emit.pair(make(0), make(1))
        if self.rest:
            value = arith.mulf(value, emit.real(2.0**self.rest, self.vector))
        return value

    # -- parts; `half` is the code to decode where a register holds one number

    def _number(self, value: float) -> Any:
        return emit.real(value, self.register)

    def _both(self, bits: int) -> int:
        """A pattern of 16 bits in both halves of a register, or one of 32 bits."""
        return bits * 0x10001 if self.packed else bits

    def _fields(self, fields: tuple[Field, ...], half: int, base: Any = None) -> Any:
        """All fields in their places, or-ed with each other and with `base`; those that move alike as one."""
        masks: dict[tuple[int, int], int] = {}
        for f in fields:
            masks[f.piece, f.shift] = masks.get((f.piece, f.shift), 0) | f.mask
        for (piece, shift), bits in masks.items():
            word = emit.shift_right(self.words[piece], shift + 16 * half)
            bits = self._both(bits)
            base = emit.mask(word, bits) if base is None else emit.mask_or(word, bits, base)
        return base

    def _add(self, a: Any, b: Any) -> Any:
        # bf16 has no addition before sm_90, but fma.
        return emit.fma(a, self._number(1.0), b) if self.real is BF16 else arith.addf(a, b)

    def _magic(self, m: Magic, half: int) -> Any:
        base = emit.constant(self._both(m.bits))
        return emit.bitcast(self.register, self._fields(m.fields, half, base))

    # -- the kinds of formats

    def _integer(self, half: int) -> Any:
        t = self.format
        zero = zero_code(t)
        if self.offset == "raw":
            low = raw_lows(t.bits)[self.number % 2]
            return emit.bitcast(self.register, self._fields(place(t, self.number, 0, t.bits, low), half))
        if self.offset == "deferred":
            return self._magic(deferred_magic(t, self.real, self.number), half)
        if t.bits <= self.real.mantissa:
            m = magic(t, self.real, self.number, 0, t.bits)
            return self._add(self._magic(m, half), self._shifted(-m.offset - zero, half))
        low, high = magic(t, self.real, self.number, 0, 4), magic(t, self.real, self.number, 4, t.bits - 4)
        upper = self._add(self._magic(high, half), self._number(-high.offset - low.offset - zero))
        value = self._add(upper, self._magic(low, half))
        return value if self.shift is None else self._add(value, self._shifted(0.0, half))

    def _shifted(self, constant: float, half: int) -> Any:
        """A constant plus the shift: up to 256 in bf16, thanks to `MatmulSpec.zero_span`, and 2048 in f16, so exact."""
        if self.shift is None:
            return self._number(constant)
        shift = self.shift if self.packed else emit.element(self.shift, half)
        return self._add(shift, self._number(constant)) if constant else shift

    def _float(self, half: int) -> Any:
        if has_float_bytes(self.format, self.real):
            return self._float_bytes()
        p = float_places(self.format, self.real, self.number)
        if p.unit:
            magnitude = self._fields(p.rest, half)
            bits = self._fields(p.sign, half, magnitude)
        else:
            magnitude, bits = None, self._fields((*p.rest, *p.sign), half)
        value = emit.bitcast(self.register, bits)
        if p.factor != 1.0:
            value = self._multiply(value, p.factor)
        if magnitude is None:
            return value
        carried, bit = arith.addi(magnitude, emit.constant(self._both(p.unit))), self._both(1 << p.carry)
        if p.factor == 1.0 and p.carry == self.real.bits - 2:
            # Below the carry the exponent is all ones as it is.
            return emit.bitcast(self.register, emit.mask_or(carried, bit, emit.bitcast(emit.integer(), value)))
        carry = emit.mask(carried, bit)
        # The carried bit spread over the whole exponent field makes inf or NaN of it.
        above = emit.shift_right(carry, p.carry - (self.real.bits - 1))
        below = emit.shift_right(carry, p.carry - self.real.mantissa)
        word = arith.ori(emit.bitcast(emit.integer(), value), arith.subi(above, below))
        return emit.bitcast(self.register, word)

    def _float_bytes(self) -> Any:
        p, each = float_bytes(self.format, self.number), 0x01010101
        sign, rest = (emit.shift_right(self.words[0], field.shift) for field in (p.sign, p.rest))
        four = emit.mask_or(sign, p.sign.mask * each, emit.mask(rest, p.rest.mask * each))
        return emit.bitcast(self.register, emit.permute_bytes(four, emit.constant(0), p.selector))

    def _multiply(self, a: Any, factor: float) -> Any:
        if self.real is not BF16:
            return arith.mulf(a, self._number(factor))
        return emit.fma(a, self._number(factor), self._number(-0.0))  # -0.0 keeps the sign of a zero
