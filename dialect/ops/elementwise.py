"""Arithmetic on tiles, element by element.

Operands have the element and the shape of the result, or dims of size 1, which are broadcast. What is exact or rounded
once on a GPU is so here; the docstring of every approximation has its largest error. Elements of f16 and bf16 are
computed as f32 where the GPU has no instruction for them, and rounded then. Integers of 32 bits are added, subtracted
and multiplied modulo 2^32, compared as numbers with a sign, and divided as numbers without one.
"""

# Annotations are evaluated by the bindings' dialect builder: no `from __future__ import annotations` here.
from typing import Any

from lowbit.dialect.bindings import ext, ir
from lowbit.dialect.checks import expect, in_range, number, real, same_element, text, verifier
from lowbit.dialect.ops.common import check_rounding
from lowbit.dialect.optional import Optional
from lowbit.dialect.types import CONDITION, FormatAttr, Lowbit, Reg, RegType, read_format

COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
_INTEGERS = ("i8", "i16", "i32")


def _check_elementwise(op: Any) -> None:
    """Operands have the result's shape, or dims of size 1 that are spread over it without moving data."""
    result = Reg.of(op.result.type)
    real(result.element, "result")
    _check_operands(list(op.operands), result.element, result)


def _check_numbers(op: Any) -> None:
    """The same for operations that integers of 32 bits have, too."""
    result = Reg.of(op.result.type)
    number(result.element, "result")
    _check_operands(list(op.operands), result.element, result)


def _check_operands(values: list[Any], element: Any, result: Reg) -> None:
    """Values must be tiles of an element that can be broadcast to the result."""
    for value in values:
        tile = Reg.of(value.type)
        same_element(element, tile.element, "element")
        tile.layout.slots_for(result.layout)  # raises LayoutError


def _check_table(format_: ir.Attribute | None, kind: str) -> None:
    """A cast has a format exactly if it looks bytes up in a table."""
    what = f"format of a cast of kind {kind}"
    if format_ is None:
        expect(kind != "table", what, "a #lowbit.format", "none")
        return
    expect(kind == "table", what, "none", format_)
    t = read_format(format_)
    expect(t.kind == "table" and t.bits == 8, "format of a cast", "a table of 256 numbers", t.name)


def raised_power(first: int) -> float:
    """Returns the power of two in whose f32 mantissa the bit at `first` counts ones."""
    return 2.0 ** (23 - first)


class CastOp(Lowbit.Operation, name="cast", traits=[ext.Pure]):
    """Every element converted to another type.

    "float": f16, bf16 or f32 to another of them, exactly or to nearest even; f32 to i32, of whole numbers that i32 has.
    To f32, to nearest even: "signed" and "unsigned" integers (i8, i16, i32). From bytes (i8) to f32: "e4m3" and "e8m0"
    scales, and "table", the number that a `format` of 8 bits has at this place in its table, rounded to f32.
    """

    source: ext.Operand[RegType]
    kind: ir.StringAttr
    format = Optional(FormatAttr, "a #lowbit.format")
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        kind = text(op.kind, "kind")
        allowed = ("float", "signed", "unsigned", "e4m3", "e8m0", "table")
        expect(kind in allowed, "kind", f"one of {', '.join(allowed)}", kind)
        _check_table(op.format, kind)
        got = f"{a.element} to {b.element}"
        if kind == "float":
            real(a.element, "source")
            if (a.element, b.element) != ("f32", "i32"):
                real(b.element, "result")
            expect(a.element != b.element, "cast", "two types", got)
        else:
            sources = _INTEGERS if kind in ("signed", "unsigned") else ("i8",)
            expect(a.element in sources and b.element == "f32", kind, f"{' or '.join(sources)} to f32", got)
        expect(a.layout == b.layout, "layout", a.layout, b.layout)


class RaiseBitsOp(Lowbit.Operation, name="raise_bits", traits=[ext.Pure]):
    """`raised_power` + the unsigned number in the bits `first` .. `first` + `bits` - 1 of every byte (i8), in f32: one
    lop3 puts the bits into the mantissa."""

    source: ext.Operand[RegType]
    first: ir.IntegerAttr
    bits: ir.IntegerAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        a, b = Reg.of(op.source.type), Reg.of(op.result.type)
        first = in_range(op.first, "first", 0, 7)
        in_range(op.bits, "bits", 1, 8 - first)
        same_element("i8", a.element, "element of the source")
        same_element("f32", b.element, "element of the result")
        expect(a.layout == b.layout, "layout", a.layout, b.layout)


class AddOp(Lowbit.Operation, name="add", traits=[ext.Pure]):
    """a + b, rounded to nearest even."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_numbers)


class SubOp(Lowbit.Operation, name="sub", traits=[ext.Pure]):
    """a - b, rounded to nearest even."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_numbers)


class MulOp(Lowbit.Operation, name="mul", traits=[ext.Pure]):
    """a * b, rounded to nearest even."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_numbers)


class DivOp(Lowbit.Operation, name="div", traits=[ext.Pure]):
    """a / b, by div.full.f32: at most 2 ulps of f32 off."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class QuotientOp(Lowbit.Operation, name="quotient", traits=[ext.Pure]):
    """The quotient of two integers (i32) without a sign, rounded down. It is undefined for a divisor of 0."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        result = Reg.of(op.result.type)
        same_element("i32", result.element, "element of the result")
        _check_operands(list(op.operands), "i32", result)


class MaxOp(Lowbit.Operation, name="max", traits=[ext.Pure]):
    """The larger of a and b, NaN if one of them is; -0 is less than 0."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_numbers)


class MinOp(Lowbit.Operation, name="min", traits=[ext.Pure]):
    """The smaller of a and b, NaN if one of them is; -0 is less than 0."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_numbers)


class FmaOp(Lowbit.Operation, name="fma", traits=[ext.Pure]):
    """a * b + c, rounded once to nearest even; of integers (i32) the lowest 32 bits."""

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    c: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_numbers)


class NegOp(Lowbit.Operation, name="neg", traits=[ext.Pure]):
    """-a."""

    a: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class AbsOp(Lowbit.Operation, name="abs", traits=[ext.Pure]):
    """The magnitude of a."""

    a: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class ReciprocalOp(Lowbit.Operation, name="reciprocal", traits=[ext.Pure]):
    """1 / a in f32, rounded to nearest even."""

    a: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_elementwise(op)
        same_element("f32", Reg.of(op.result.type).element, "element of the result")


class RoundToOp(Lowbit.Operation, name="round_to", traits=[ext.Pure]):
    """a in f32, rounded to the numbers that `encode_bytes` makes of it: those of `kind`, "f8e4m3" or "i8"."""

    a: ext.Operand[RegType]
    kind: ir.StringAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        _check_elementwise(op)
        same_element("f32", Reg.of(op.result.type).element, "element of the result")
        check_rounding(op.kind)


class ExpOp(Lowbit.Operation, name="exp", traits=[ext.Pure]):
    """e to the power of a, by ex2.approx.f32 of a * log2(e): at most 2 + |1.173 a| ulps of f32 off."""

    a: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class TanhOp(Lowbit.Operation, name="tanh", traits=[ext.Pure]):
    """The hyperbolic tangent of a, by tanh.approx.f32: with a relative error of at most 2^-11, about as f16 rounds."""

    a: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class SqrtOp(Lowbit.Operation, name="sqrt", traits=[ext.Pure]):
    """The square root of a, by sqrt.rn.f32: rounded to nearest even."""

    a: ext.Operand[RegType]
    result: ext.Result[RegType]

    verify_invariants = verifier(_check_elementwise)


class CompareOp(Lowbit.Operation, name="compare", traits=[ext.Pure]):
    """A tile of conditions (i1): whether a is less ("lt"), less or equal ("le"), "eq", "ne", "gt" or "ge" b.

    A NaN compares as in IEEE 754: it is "ne" all numbers and itself, and nothing else.
    """

    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    predicate: ir.StringAttr
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        predicate, element = text(op.predicate, "predicate"), Reg.of(op.a.type).element
        expect(predicate in COMPARISONS, "predicate", f"one of {', '.join(COMPARISONS)}", predicate)
        result = Reg.of(op.result.type)
        same_element(CONDITION, result.element, "element of the result")
        number(element, "operands")
        _check_operands([op.a, op.b], element, result)


class SelectOp(Lowbit.Operation, name="select", traits=[ext.Pure]):
    """a where the condition holds, else b; the one that is not taken has no influence, not even as a NaN."""

    condition: ext.Operand[RegType]
    a: ext.Operand[RegType]
    b: ext.Operand[RegType]
    result: ext.Result[RegType]

    @verifier
    def verify_invariants(op: Any) -> None:
        result = Reg.of(op.result.type)
        number(result.element, "result")
        _check_operands([op.condition], CONDITION, result)
        _check_operands([op.a, op.b], result.element, result)
