"""Rules of `lower-tiles` for arithmetic on tiles, element by element.

What a GPU computes in f16 and bf16, and there two at a time, is lowered to one operation for a pair; the rest is
computed in f32. Which instruction follows, and how far it is off, is in the docstrings of `dialect.ops.elementwise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lowbit.dialect import ops
from lowbit.dialect.bindings import arith, ir
from lowbit.dialect.formats.decode_table import DecodeTable
from lowbit.dialect.types import Reg, read_format
from lowbit.passes.lowering import byte_numbers, emit
from lowbit.passes.lowering.context import LoweringContext, int_attr, text_attr
from lowbit.passes.lowering.fragment import Fragment, kind_of, pairs_at
from lowbit.passes.lowering.registry import lowers
from lowbit.passes.lowering.tables import constant_table

Make = Callable[..., Any]
"""Writes the operation for one element, or for a vector of two, of every operand."""

_PREDICATES = {
    "lt": (arith.CmpFPredicate.OLT, arith.CmpIPredicate.slt),
    "le": (arith.CmpFPredicate.OLE, arith.CmpIPredicate.sle),
    "eq": (arith.CmpFPredicate.OEQ, arith.CmpIPredicate.eq),
    "ne": (arith.CmpFPredicate.UNE, arith.CmpIPredicate.ne),
    "gt": (arith.CmpFPredicate.OGT, arith.CmpIPredicate.sgt),
    "ge": (arith.CmpFPredicate.OGE, arith.CmpIPredicate.sge),
}


@lowers(ops.CastOp)
def cast(op: Any, c: LoweringContext) -> None:
    source, reg, kind = c.tiles[op.source], Reg.of(op.result.type), text_attr(op, "kind")
    make = _from_table(op, c) if kind == "table" else _CASTS[kind]
    to = ir.Type.parse(str(reg.element))
    _note(op, c, [source], Fragment(reg, "scalar", lambda slot: make(to, source.scalar(slot))))


def _from_signed(to: Any, x: Any) -> Any:
    return arith.sitofp(to, _sign_extended(x))


def _sign_extended(x: Any) -> Any:
    return x if x.type == emit.integer() else arith.extsi(emit.integer(), x)


def _from_unsigned(to: Any, x: Any) -> Any:
    return arith.uitofp(to, _zero_extended(x))


def _zero_extended(x: Any) -> Any:
    return x if x.type == emit.integer() else arith.extui(emit.integer(), x)


def _from_table(op: Any, c: LoweringContext) -> Callable[[Any, Any], Any]:
    """Reads numbers from an array in device memory, which stays in the first-level cache: a row has one for a group."""
    symbol = constant_table(c.shared_base.owner, DecodeTable(read_format(op.format), "f32"), 0)

    def number(to: Any, x: Any) -> Any:
        offset = arith.shli(_zero_extended(x), emit.constant(2))
        return emit.bitcast(to, emit.read_constant(symbol, offset, 32))

    return number


_CASTS: dict[str, Callable[[Any, Any], Any]] = {
    "float": lambda to, x: arith.fptosi(to, x) if to == emit.integer() else emit.convert(to, x),
    "signed": _from_signed,
    "unsigned": _from_unsigned,
    "e4m3": lambda to, x: emit.from_e4m3(_sign_extended(x)),
    "e8m0": lambda to, x: emit.from_e8m0(_zero_extended(x)),
}


@lowers(ops.RaiseBitsOp)
def raise_bits(op: Any, c: LoweringContext) -> None:
    source, reg, f32 = c.tiles[op.source], Reg.of(op.result.type), ir.F32Type.get()
    first, bits = int_attr(op, "first"), int_attr(op, "bits")
    mask = ((1 << bits) - 1) << first

    def raised(slot: int) -> Any:
        power = emit.bitcast(emit.integer(), emit.real(ops.raised_power(first), f32))
        return emit.bitcast(f32, emit.mask_or(_zero_extended(source.scalar(slot)), mask, power))

    _note(op, c, [source], Fragment(reg, "scalar", raised))


@lowers(ops.AddOp)
def add(op: Any, c: LoweringContext) -> None:
    _in_pairs(op, c, arith.addf, arith.addi)


@lowers(ops.SubOp)
def sub(op: Any, c: LoweringContext) -> None:
    _in_pairs(op, c, arith.subf, arith.subi)


@lowers(ops.MulOp)
def mul(op: Any, c: LoweringContext) -> None:
    _in_pairs(op, c, arith.mulf, arith.muli)


@lowers(ops.FmaOp)
def fma(op: Any, c: LoweringContext) -> None:
    def of_integers(x: Any, y: Any, z: Any) -> Any:
        return arith.addi(arith.muli(x, y), z)

    _in_pairs(op, c, emit.fma, of_integers)


@lowers(ops.MaxOp)
def maximum(op: Any, c: LoweringContext) -> None:
    _in_pairs(op, c, arith.maximumf, arith.maxsi)


@lowers(ops.MinOp)
def minimum(op: Any, c: LoweringContext) -> None:
    _in_pairs(op, c, arith.minimumf, arith.minsi)


@lowers(ops.NegOp)
def neg(op: Any, c: LoweringContext) -> None:
    _in_pairs(op, c, arith.negf)


@lowers(ops.AbsOp)
def magnitude(op: Any, c: LoweringContext) -> None:
    _in_pairs(op, c, partial(emit.intrinsic, "llvm.fabs"))


@lowers(ops.DivOp)
def div(op: Any, c: LoweringContext) -> None:
    _in_f32(op, c, partial(emit.f32_instruction, "div.full.f32"))


@lowers(ops.QuotientOp)
def quotient(op: Any, c: LoweringContext) -> None:
    _one_by_one(op, c, arith.divui)


@lowers(ops.ReciprocalOp)
def reciprocal(op: Any, c: LoweringContext) -> None:
    f32 = ir.F32Type.get()

    def make(a: Any) -> Any:
        return arith.divf(emit.real(1.0, f32), a)

    _one_by_one(op, c, make)


@lowers(ops.RoundToOp)
def round_to(op: Any, c: LoweringContext) -> None:
    _one_by_one(op, c, byte_numbers.ROUND[text_attr(op, "kind")])


@lowers(ops.ExpOp)
def exp(op: Any, c: LoweringContext) -> None:
    def make(a: Any) -> Any:
        return emit.intrinsic("llvm.exp2", arith.mulf(a, emit.real(math.log2(math.e), a.type)))

    _in_f32(op, c, make)


@lowers(ops.TanhOp)
def tanh(op: Any, c: LoweringContext) -> None:
    _in_f32(op, c, partial(emit.f32_instruction, "tanh.approx.f32"))


@lowers(ops.SqrtOp)
def sqrt(op: Any, c: LoweringContext) -> None:
    _in_f32(op, c, partial(emit.intrinsic, "llvm.sqrt"))


@lowers(ops.CompareOp)
def compare(op: Any, c: LoweringContext) -> None:
    (of_reals, of_integers), f32 = _PREDICATES[text_attr(op, "predicate")], ir.F32Type.get()

    def make(a: Any, b: Any) -> Any:
        return arith.cmpf(of_reals, emit.convert(f32, a), emit.convert(f32, b))

    _one_by_one(op, c, partial(arith.cmpi, of_integers) if Reg.of(op.a.type).element == "i32" else make)


@lowers(ops.SelectOp)
def select(op: Any, c: LoweringContext) -> None:
    _one_by_one(op, c, arith.select)


def _in_pairs(op: Any, c: LoweringContext, make: Make, of_integers: Make | None = None) -> None:
    """Lowers an operation that GPUs have for every real element, and for two neighbours of 16 bits.

    of_integers   makes it of i32, where it is one of integers, too
    """
    reg = Reg.of(op.result.type)
    if of_integers is not None and reg.element == "i32":
        _one_by_one(op, c, of_integers)
        return
    operands = [c.tiles[v] for v in op.operation.operands]
    slots = _slots(operands, reg)
    if kind_of(reg) == "pair" and all(_pairs_up(s) for s in slots):
        pairs = [pairs_at(f, s) for f, s in zip(operands, slots)]
        _note(op, c, operands, Fragment(reg, "pair", lambda i: make(*[pair(i) for pair in pairs])))
    else:
        _one_by_one(op, c, make)


def _in_f32(op: Any, c: LoweringContext, make: Make) -> None:
    """Lowers an operation that GPUs have for f32 alone."""
    element, f32 = ir.Type.parse(str(Reg.of(op.result.type).element)), ir.F32Type.get()

    def rounded(*values: Any) -> Any:
        return emit.convert(element, make(*[emit.convert(f32, v) for v in values]))

    _one_by_one(op, c, rounded)


def _one_by_one(op: Any, c: LoweringContext, make: Make) -> None:
    """Lowers an operation to one for each element that a thread holds of the result."""
    reg = Reg.of(op.result.type)
    operands = [c.tiles[v] for v in op.operation.operands]
    slots = _slots(operands, reg)
    early = [f for f in operands if any(other.reads_first(f) for other in operands)]

    def scalar(i: int) -> Any:
        for f in early:
            f.force()
        return make(*[f.scalar(s[i]) for f, s in zip(operands, slots)])

    _note(op, c, operands, Fragment(reg, "scalar", scalar))


def _slots(operands: Sequence[Fragment], reg: Reg) -> list[Sequence[int]]:
    """Returns for each operand which of its slots goes into each slot of the result."""
    return [f.reg.layout.slots_for(reg.layout) for f in operands]


def _pairs_up(slots: Sequence[int]) -> bool:
    """Whether every two slots are a pair of the source, or the same element twice."""
    return all(b == a or (a % 2 == 0 and b == a + 1) for a, b in zip(slots[::2], slots[1::2], strict=True))


def _note(op: Any, c: LoweringContext, operands: Sequence[Fragment], result: Fragment) -> None:
    c.pending.computed(result, operands)
    c.tiles[op.result] = result
